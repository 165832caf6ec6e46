"""The token ids a request may use, and their text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import llguidance
from llguidance import TokenizerWrapper

from slipstream.errors import InvalidRequest


class FastTokenizer(Protocol):
    """The part of a Hugging Face fast tokenizer that is used here."""

    backend_tokenizer: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        ...

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        """Text of `token_ids`."""
        ...


class Vocabulary:
    """Token ids 0..size-1 (the logit width, which may exceed the tokenizer's own count).

    `eos_ids` end an answer. Text comes from a Hugging Face tokenizer (`from_tokenizer`) or, for toy
    models, from `tokens`: the bytes of each id, encoded by longest match. With neither, everything
    that needs text raises `InvalidRequest`.
    """

    def __init__(
        self,
        size: int,
        eos_ids: Sequence[int],
        *,
        tokens: Sequence[bytes] | None = None,
        tokenizer: FastTokenizer | None = None,
    ) -> None:
        self.size = size
        self.eos_ids = tuple(eos_ids)
        self._tokens = tuple(tokens) if tokens is not None else None
        self._tokenizer = tokenizer
        for token in self.eos_ids:
            if not 0 <= token < size:
                raise InvalidRequest(
                    f"EOS id {token} is outside the vocabulary of {size}; name ids below {size}."
                )

    @classmethod
    def from_tokenizer(
        cls, tokenizer: FastTokenizer, *, size: int, eos_ids: tuple[int, ...]
    ) -> Vocabulary:
        """Wrap a Hugging Face fast tokenizer; `size` is the width of the model's logits."""
        return cls(size, eos_ids, tokenizer=tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        if self._tokenizer is not None:
            return list(self._tokenizer.encode(text, add_special_tokens=False))
        return self._longest_match(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; incomplete UTF-8 becomes the replacement character."""
        if self._tokenizer is not None:
            text = self._tokenizer.decode(
                [int(i) for i in ids],
                skip_special_tokens=skip_special,
                clean_up_tokenization_spaces=False,
            )
            return str(text)
        tokens = self._bytes()
        kept = (i for i in ids if not (skip_special and i in self.eos_ids))
        return b"".join(tokens[i] for i in kept).decode(errors="replace")

    @cached_property
    def grammar_tokenizer(self) -> llguidance.LLTokenizer:
        """The tokenizer as llguidance wants it; built at first use, as it takes about a second."""
        if not self.eos_ids:
            raise InvalidRequest("grammar needs a model with an EOS token; this one names none.")
        eos = list(self.eos_ids)
        if self._tokenizer is None:
            return llguidance.LLTokenizer(
                TokenizerWrapper(_ToyTokenizer(self)), n_vocab=self.size, eos_token=eos, slices=[]
            )
        # A copy through text, so that padding and truncation of the original stay as they are.
        backend = type(self._tokenizer.backend_tokenizer).from_str(
            self._tokenizer.backend_tokenizer.to_str()
        )
        backend.no_padding()
        backend.no_truncation()
        return llguidance.LLTokenizer(backend.to_str(), n_vocab=self.size, eos_token=eos)

    def _bytes(self) -> tuple[bytes, ...]:
        if self._tokens is None:
            raise InvalidRequest(
                "This model came without a tokenizer, so text cannot be used with it; "
                "pass token ids, and no stop strings, bad_words or grammar."
            )
        return self._tokens

    def _longest_match(self, data: bytes) -> list[int]:
        ids, tokens = [], self._bytes()
        plain = [i for i, t in enumerate(tokens) if t and i not in self.eos_ids]
        while data:
            fits = [i for i in plain if data.startswith(tokens[i])]
            if not fits:
                raise InvalidRequest(
                    f"{data[:12]!r} cannot be written with this vocabulary; use text it covers."
                )
            best = max(fits, key=lambda i: len(tokens[i]))
            ids.append(best)
            data = data[len(tokens[best]) :]
        return ids


class _ToyTokenizer:
    """What `TokenizerWrapper` asks for, over a vocabulary made of bytes."""

    bos_token_id: int | None = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = list(vocabulary.eos_ids)
        self.tokens = list(vocabulary._bytes())
        self._vocabulary = vocabulary

    def __call__(self, text: str) -> list[int]:
        return self._vocabulary.encode(text)
