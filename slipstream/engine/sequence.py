"""One running request: its tokens, its pages, and what each commit does to it."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from slipstream.cache.pages import PageTable
from slipstream.engine.text import TextStream
from slipstream.sampling.state import RowSampler
from slipstream.types import (
    Completion,
    FinishReason,
    SamplingParams,
    StepRecord,
    Timings,
    TokenLogprobs,
)


@dataclass(eq=False, slots=True, kw_only=True)
class Sequence:
    """A request in the engine; satisfies the `Row` protocol.

    `computed` counts leading tokens whose keys and values are in the target's cache; a row that
    decodes has `computed == len(tokens) - 1` (all but the anchor).
    """

    request_id: int
    index: int
    tokens: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int
    sampler: RowSampler
    table: PageTable
    stream: TextStream
    stop_ids: frozenset[int]
    max_context: int
    arrived: float
    computed: int = 0
    cached_tokens: int | None = None
    opened: bool = False
    finish_reason: FinishReason | None = None
    error: str | None = None
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def pages(self) -> Seq[int]:
        """Pages of the target's cache that hold this request, in order of position."""
        return self.table.pages

    @property
    def generated(self) -> int:
        """Output tokens so far."""
        return len(self.tokens) - self.prompt_len

    @property
    def pending(self) -> int:
        """Committed tokens not yet in the target's cache: 1 (the anchor) while decoding."""
        return len(self.tokens) - self.computed

    def commit(self, tokens: Seq[int], logprobs: Seq[TokenLogprobs] | None) -> int:
        """Append verified tokens one by one until a stop or a limit; returns how many it took."""
        taken = 0
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            self.finish_reason = self._after(token)
            if self.finish_reason is not None:
                break
        if logprobs is not None:
            self.logprobs.extend(logprobs[:taken])
        self.sampler.commit(tokens[:taken])
        if taken:
            self.chunk_times.append(time.perf_counter())
            self.chunk_tokens.append(taken)
        return taken

    def _after(self, token: int) -> FinishReason | None:
        """Whether the token just appended ends the request. A stop wins over a limit."""
        may_stop = self.generated >= self.params.min_tokens
        if self.stream.push(token, may_stop=may_stop) or (may_stop and token in self.stop_ids):
            return FinishReason.STOP
        if self.generated >= self.params.max_tokens or len(self.tokens) >= self.max_context:
            return FinishReason.LENGTH
        return None

    def completion(self) -> Completion:
        """The finished answer."""
        assert self.finish_reason is not None
        return Completion(
            request_id=self.request_id,
            index=self.index,
            text=self.stream.final(),
            token_ids=tuple(self.tokens[self.prompt_len :]),
            finish_reason=self.finish_reason,
            timings=Timings(self.arrived, tuple(self.chunk_times), tuple(self.chunk_tokens)),
            records=tuple(self.records),
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            error=self.error,
            cached_tokens=self.cached_tokens or 0,
        )
