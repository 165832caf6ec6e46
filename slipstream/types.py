"""Plain values shared by every room. No torch: tensors appear as `Any`, their shapes stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import InvalidRequest

IntArray = NDArray[np.int64]


class FinishReason(Enum):
    """Why a completion ended."""

    STOP = "stop"  # EOS, a stop token id or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"  # the caller asked
    ERROR = "error"  # this request could not go on (non-finite logits); `Completion.error` says why


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. All of it is applied per token, also inside an accepted run.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0, penalties 0 (repetition 1) are off.
    `logprobs` n reports the n likeliest tokens beside the chosen one, from the unprocessed logits.
    `bad_words` are strings never to be generated; `stop` strings end the text before themselves.
    `grammar` constrains the output: `{"regex": ...}`, `{"json_schema": ...}` or `{"lark": ...}`.
    Raises `InvalidRequest` on any value that has no meaning.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    grammar: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
            _require_finite(name, getattr(self, name))
        _require_finite("frequency_penalty", self.frequency_penalty)
        _require("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100")
        _require("top_k", self.top_k, self.top_k >= 0, "0 (off) or more")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p < 1, "0 (off) up to below 1")
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            0 < self.repetition_penalty <= 100,
            "above 0 (1 is off), at most 100",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(name, getattr(self, name), -2 <= getattr(self, name) <= 2, "-2 to 2")
        _require("max_tokens", self.max_tokens, self.max_tokens >= 1, "1 or more")
        _require("min_tokens", self.min_tokens, self.min_tokens >= 0, "0 or more")
        _require(
            "min_tokens",
            self.min_tokens,
            self.min_tokens <= self.max_tokens,
            f"at most max_tokens ({self.max_tokens})",
        )
        _require("n", self.n, 1 <= self.n <= 128, "1 to 128")
        if self.logprobs is not None:
            _require("logprobs", self.logprobs, 0 <= self.logprobs <= 20, "0 to 20")
        if self.seed is not None:
            _require("seed", self.seed, 0 <= self.seed < 2**63, "0 to 2**63 - 1")
        for name in ("stop", "bad_words"):
            value = getattr(self, name)
            _require(name, value, not isinstance(value, str), f"a list of strings, ({value!r},)")
        for text in (*self.stop, *self.bad_words):
            _require("stop and bad_words", text, bool(text), "non-empty strings")
        for token, bias in self.logit_bias.items():
            _require_finite(f"logit_bias[{token}]", bias)
            _require(f"logit_bias[{token}]", bias, -100 <= bias <= 100, "-100 to 100")

    @property
    def greedy(self) -> bool:
        """True where the next token is an argmax and no randomness is used."""
        return self.temperature == 0.0


def _require(name: str, value: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise InvalidRequest(f"{name} is {value!r}; allowed: {allowed}.")


def _require_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvalidRequest(f"{name} is {value!r}; it must be a finite number.")


# --- draft laws: the distribution draft tokens were really sampled from ------------------------


@dataclass(frozen=True, slots=True)
class OneHot:
    """Every draft token was chosen without randomness: its draft probability is 1."""


@dataclass(frozen=True, slots=True)
class Dense:
    """`probs`: float tensor [rows, draft_len, vocab], each position summing to 1."""

    probs: Any


@dataclass(frozen=True, slots=True)
class TopK:
    """`ids` int64 and `probs` float tensors [rows, draft_len, k]; mass outside `ids` is zero."""

    ids: Any
    probs: Any


DraftLaw = OneHot | Dense | TopK


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of one step, anchors excluded.

    `tokens`: int64 [rows, width], padded with -1 past `lens`. `lens`: int64 [rows], 0 where a row
    has nothing to verify. `law` covers [rows, width]; entries past `lens` are never read.
    """

    tokens: IntArray
    lens: IntArray
    law: DraftLaw

    @classmethod
    def empty(cls, rows: int) -> Draft:
        """A draft without tokens: every row takes a plain step."""
        return cls(np.empty((rows, 0), np.int64), np.zeros(rows, np.int64), OneHot())

    def row(self, index: int) -> list[int]:
        """Draft tokens of one row, padding removed."""
        tokens: list[int] = self.tokens[index, : self.lens[index]].tolist()
        return tokens

    def padded(self, rows: int) -> Draft:
        """The same draft followed by rows without draft tokens (the law is not extended)."""
        extra = rows - len(self.lens)
        if not extra:
            return self
        tokens = np.pad(self.tokens, ((0, extra), (0, 0)), constant_values=-1)
        return Draft(tokens, np.pad(self.lens, (0, extra)), self.law)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probability of a token, its rank (1 = likeliest) and the likeliest alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the verifier decided. `accepted`, `next_tokens`: int64 [rows].

    Row i commits its first `accepted[i]` draft tokens, then `next_tokens[i]` (recovered or bonus).
    `logprobs[i]`: one entry per such token where the request asked, else None.
    `errors`: row index -> sentence, for rows whose logits could not be sampled; such a row commits
    its accepted tokens, then ends. Its next token is -1.
    """

    accepted: IntArray
    next_tokens: IntArray
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...]
    errors: dict[int, str] = field(default_factory=dict)

    def take(self, indices: Sequence[int]) -> Verdict:
        """The verdict of some rows, in the order given."""
        return Verdict(
            self.accepted[list(indices)],
            self.next_tokens[list(indices)],
            tuple(self.logprobs[i] for i in indices),
            {n: self.errors[i] for n, i in enumerate(indices) if i in self.errors},
        )


# --- what finished steps say --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds a step spent in each stage; `host` is what is left of the step's wall time."""

    draft: float
    verify: float
    sample: float
    host: float

    @property
    def total(self) -> float:
        """Wall seconds of the step."""
        return self.draft + self.verify + self.sample + self.host


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One row-step: one request's part of one round of the batch. Every metric comes from these.

    `prefill`: True where the row's forward ended its prompt (its first token is no decode step).
    `accepted` counts draft tokens the verifier kept, `committed` the tokens added after stops and
    limits. `depth` is the number of committed tokens before the step. `rows`, `prefill_tokens` and
    `times` describe the whole step the row was part of.
    """

    step: int
    request_id: int
    prefill: bool
    depth: int
    drafted: int
    accepted: int
    committed: int
    rows: int
    prefill_tokens: int
    times: StageTimes


@dataclass(frozen=True, slots=True)
class Timings:
    """Client-clock seconds (time.perf_counter): arrival, and when each chunk of tokens came out."""

    arrived: float
    chunk_times: tuple[float, ...]
    chunk_tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. `cached_tokens`: prompt tokens taken from other requests' pages."""

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timings: Timings
    records: tuple[StepRecord, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
    cached_tokens: int = 0


class Row(Protocol):
    """What drafters, verifier and controller may see of a running request. Never write to it.

    `tokens` is prompt + output, all committed; the last one is the anchor (not yet in the target's
    cache). `prompt_len` splits it. `seed` keys the uniforms. `sampler` is the row's
    `sampling.RowSampler` (penalty counts, grammar position, ...), kept in step by the engine.
    `pages` is its page table in the target's cache.
    """

    request_id: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    sampler: Any

    @property
    def pages(self) -> Sequence[int]:
        """Pages of the target's cache, in order of position."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Features of committed tokens that a forward has just put into the target's cache.

    They are `row.tokens[start : start + len(features)]`; `features` [tokens, taps, hidden], taps in
    the order of the drafter's `needs`.
    """

    row: Row
    start: int
    features: Any


class Controller(Protocol):
    """Decides draft_len per row before drafting, from finished steps only."""

    def plan(self, rows: Sequence[Row]) -> IntArray:
        """draft_len per row, int64 [rows]; zero is a valid answer."""
        ...

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Take in the records of a finished step."""
        ...
