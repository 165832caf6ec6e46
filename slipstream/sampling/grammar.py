"""Which tokens a grammar allows after a prefix: llguidance, walked forward and rolled back."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest
from slipstream.sampling.vocabulary import Vocabulary

_COMPILERS: dict[str, Callable[[Any], str]] = {
    "regex": LLMatcher.grammar_from_regex,
    "json_schema": LLMatcher.grammar_from_json_schema,
    "lark": LLMatcher.grammar_from_lark,
}


class Grammar:
    """One request's grammar. `commit` moves it; `mask` looks ahead along a draft and comes back.

    After the grammar has ended only EOS is legal. Raises `InvalidRequest` where the grammar cannot
    be compiled.
    """

    def __init__(self, spec: dict[str, Any], vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._matcher = LLMatcher(vocabulary.grammar_tokenizer, _compile(spec), log_level=0)
        if self._matcher.is_error():
            raise InvalidRequest(_uncompilable(self._matcher.get_error()))
        # Tokens walked beyond the committed ones, and how many of them the matcher itself consumed
        # (an EOS after the end is legal, but there is nothing left to consume it).
        self._path: list[int] = []
        self._consumed: list[bool] = []

    @property
    def error(self) -> str | None:
        """Why the matcher gave up (a grammar too complex to go on), else None."""
        if not self._matcher.is_error():
            return None
        return f"The grammar could not go on: {_first_line(self._matcher.get_error())}."

    def commit(self, tokens: Sequence[int]) -> None:
        """Move past tokens that are now part of the output; ValueError if one is illegal."""
        if not self._walk(tokens):
            raise ValueError(f"tokens {list(tokens)} were committed against the grammar")
        self._path, self._consumed = self._path[len(tokens) :], self._consumed[len(tokens) :]

    def mask(self, prefix: Sequence[int]) -> NDArray[np.bool_] | None:
        """Legal tokens after `prefix`, bool [size]; None where the prefix itself is illegal."""
        if not self._walk(prefix):
            return None
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(words, bitorder="little", count=self._vocabulary.size)
        legal: NDArray[np.bool_] = bits.view(np.bool_)
        return legal

    def _walk(self, prefix: Sequence[int]) -> bool:
        """Bring the matcher to exactly `prefix` beyond the committed tokens; False if illegal."""
        shared = 0
        for ours, theirs in zip(self._path, prefix, strict=False):
            if ours != theirs:
                break
            shared += 1
        self._matcher.rollback(sum(self._consumed[shared:]))
        del self._path[shared:], self._consumed[shared:]
        return all(self._step(int(token)) for token in prefix[shared:])

    def _step(self, token: int) -> bool:
        ended = self._matcher.is_stopped() and not self._matcher.is_error()
        if ended and token in self._vocabulary.eos_ids:
            consumed = False
        elif not ended and self._matcher.try_consume_tokens([token]) == 1:
            consumed = True
        else:
            return False
        self._path.append(token)
        self._consumed.append(consumed)
        return True


def _compile(spec: dict[str, Any]) -> str:
    if len(spec) != 1 or next(iter(spec)) not in _COMPILERS:
        raise InvalidRequest(
            f"grammar has the keys {sorted(spec)}; give exactly one of {', '.join(_COMPILERS)}."
        )
    kind, source = next(iter(spec.items()))
    if kind == "json_schema" and isinstance(source, dict | bool):
        source = json.dumps(source)
    if not isinstance(source, str):
        raise InvalidRequest(f"grammar {kind} is {source!r}; it must be a string.")
    try:
        return _COMPILERS[kind](source)
    except ValueError as error:
        raise InvalidRequest(_uncompilable(str(error))) from error


def _uncompilable(message: str) -> str:
    return f"grammar does not compile ({_first_line(message)}); correct it."


def _first_line(message: str) -> str:
    return message.strip().splitlines()[0].rstrip(".") if message.strip() else "no reason given"
