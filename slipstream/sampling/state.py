"""What one request carries to turn logits into scores at any position, also inside a draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InvalidRequest
from slipstream.sampling.grammar import Grammar
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import IntArray, SamplingParams

_BANNED = float("-inf")


class RowSampler:
    """Penalty counts, bans and grammar position of one request.

    The engine calls `commit` with the tokens each step adds; `process` is asked about any
    continuation of those without changing anything. `plain` is True when processing does nothing,
    so that only temperature, top_k, top_p and min_p are left to apply.
    Raises `InvalidRequest` for unknown token ids, bad words without tokens, a grammar that does not
    compile.
    """

    def __init__(
        self, params: SamplingParams, vocabulary: Vocabulary, prompt: Sequence[int]
    ) -> None:
        self.params = params
        self.vocabulary = vocabulary
        self.output: list[int] = []
        _require_ids("logit_bias", params.logit_bias, vocabulary)
        _require_ids("stop_token_ids", params.stop_token_ids, vocabulary)
        _require_ids("prompt", prompt, vocabulary)
        self.grammar = Grammar(params.grammar, vocabulary) if params.grammar is not None else None
        self._penalties = _Penalties.of(params, vocabulary, prompt)
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        self._bad_words = _tokenized(params.bad_words, vocabulary)
        self._enders = sorted({*vocabulary.eos_ids, *params.stop_token_ids})
        self.plain = not (
            self.grammar or self._penalties or params.logit_bias or self._bad_words
        ) and not (params.min_tokens and self._enders)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take in tokens that are now part of the output."""
        if self._penalties:
            self._penalties.commit(tokens)
        if self.grammar:
            self.grammar.commit(tokens)
        self.output.extend(int(t) for t in tokens)

    def process(self, scores: Tensor, prefix: Sequence[int]) -> None:
        """Apply penalties, bias and bans in place, as if `prefix` had been committed.

        `scores`: float32 [vocab]. Banned tokens become -inf. Where nothing legal is left under a
        grammar, EOS is; a grammar that failed leaves nothing at all.
        """
        raw_eos = scores[list(self.vocabulary.eos_ids)] if self.grammar else None
        if self._penalties:
            self._penalties.apply(scores, prefix)
        if len(self._bias):
            scores[self._bias_ids.to(scores.device)] += self._bias.to(scores.device)
        banned = self._banned(prefix)
        if banned:
            scores[banned] = _BANNED
        if self.grammar and raw_eos is not None:
            self._apply_grammar(self.grammar, scores, prefix, raw_eos)

    def _banned(self, prefix: Sequence[int]) -> list[int]:
        banned = []
        if len(self.output) + len(prefix) < self.params.min_tokens:
            banned += self._enders
        for word in self._bad_words:
            need = len(word) - 1
            if _tail(self.output, prefix, need) == word[:need]:
                banned.append(word[-1])
        return banned

    def _apply_grammar(
        self, grammar: Grammar, scores: Tensor, prefix: Sequence[int], raw_eos: Tensor
    ) -> None:
        legal = grammar.mask(prefix)
        if grammar.error:
            scores.fill_(_BANNED)
        elif legal is not None:  # an illegal prefix has probability 0: nobody reads beyond it
            scores.masked_fill_(torch.from_numpy(~legal).to(scores.device), _BANNED)
            if bool((scores == _BANNED).all()):
                scores[list(self.vocabulary.eos_ids)] = raw_eos


class _Penalties:
    """Counts behind the repetition (prompt + output), presence and frequency (output) penalties.

    Source of the meanings: Keskar et al., "CTRL" (2019), section 4.1, for repetition; the OpenAI
    API for the other two. Order: repetition on the model's score, then the subtractions.
    """

    def __init__(self, params: SamplingParams, size: int, seen: Iterable[int]) -> None:
        self._params = params
        self._counts = np.zeros(size, np.int64)  # in the output
        self._known = np.zeros(size, np.bool_)
        self._ids = np.empty(0, np.int64)  # every id a penalty applies to, in order of arrival
        self._note(np.fromiter(seen, np.int64))

    @classmethod
    def of(
        cls, params: SamplingParams, vocabulary: Vocabulary, prompt: Sequence[int]
    ) -> _Penalties | None:
        """None where every penalty is off."""
        repeats = params.repetition_penalty != 1.0
        if not (repeats or params.presence_penalty or params.frequency_penalty):
            return None
        return cls(params, vocabulary.size, prompt if repeats else ())

    def commit(self, tokens: Sequence[int]) -> None:
        """Count output tokens."""
        fresh = np.asarray(tokens, np.int64)
        np.add.at(self._counts, fresh, 1)
        self._note(fresh)

    def apply(self, scores: Tensor, prefix: Sequence[int]) -> None:
        """Penalize `scores` float32 [vocab] in place, `prefix` counted as output."""
        ahead = np.asarray(prefix, np.int64)
        ids = np.concatenate([self._ids, np.unique(ahead[~self._known[ahead]])])
        if not len(ids):
            return
        counts = self._counts[ids] + (ids[:, None] == ahead[None, :]).sum(1)
        index = torch.from_numpy(ids).to(scores.device)
        times = torch.from_numpy(counts).to(scores.device, torch.float32)
        values, repeat = scores[index], self._params.repetition_penalty
        values = torch.where(values > 0, values / repeat, values * repeat)
        values -= self._params.presence_penalty * (times > 0)
        values -= self._params.frequency_penalty * times
        scores[index] = values

    def _note(self, ids: IntArray) -> None:
        fresh = np.unique(ids[~self._known[ids]])
        self._known[fresh] = True
        self._ids = np.concatenate([self._ids, fresh])


def _tail(output: Sequence[int], prefix: Sequence[int], length: int) -> list[int]:
    """The last `length` tokens of output + prefix; fewer if there are no more."""
    if not length:
        return []
    ahead = [int(t) for t in prefix[-length:]]
    missing = length - len(ahead)
    return [*(output[-missing:] if missing else []), *ahead]


def _tokenized(words: Sequence[str], vocabulary: Vocabulary) -> list[list[int]]:
    """Each bad word as the token lists it starts with: bare, and after a space."""
    found: list[list[int]] = []
    for word in words:
        forms = [vocabulary.encode(word)]
        with suppress(InvalidRequest):  # a toy vocabulary without a space has one form only
            forms.append(vocabulary.encode(" " + word))
        if not forms[0]:
            raise InvalidRequest(f"bad_words has {word!r}, which has no tokens; remove it.")
        found += [form for form in forms if form and form not in found]
    return found


def _require_ids(name: str, tokens: Iterable[int], vocabulary: Vocabulary) -> None:
    for token in tokens:
        if not 0 <= token < vocabulary.size:
            raise InvalidRequest(
                f"{name} has token id {token}; this model has ids 0 to {vocabulary.size - 1}."
            )
