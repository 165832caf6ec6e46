"""The loop: plan, draft, verify, decide, advance. Plain decoding is the drafter `none` in it.

One `step` is one round of the batch with exactly one target forward. Prompt chunks ride in the same
forward as the verify rows. Nothing here knows a drafter's name.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.cache.pages import PageTable
from slipstream.drafters.base import Drafter, TakesFeatures
from slipstream.engine.clock import Clock
from slipstream.engine.features import Fed, fed_rows, spans
from slipstream.engine.scheduler import Batch, Scheduler
from slipstream.engine.sequence import Sequence
from slipstream.engine.text import NoText, TextStream, TokenText
from slipstream.engine.verifier import Verifier
from slipstream.engine.watch import DraftWatch
from slipstream.errors import InvalidRequest
from slipstream.sampling.state import RowSampler
from slipstream.sampling.uniforms import Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.target.target import ForwardOutput, ForwardRow, Target
from slipstream.types import (
    Completion,
    Controller,
    Draft,
    FinishReason,
    SamplingParams,
    StepRecord,
    Verdict,
)

if TYPE_CHECKING:
    from slipstream.engine.fast import FastPath


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one request: new tokens, the new text, and the answer if it ended."""

    request_id: int
    tokens: tuple[int, ...]
    text: str
    completion: Completion | None


class Engine:
    """Continuous batching with speculation over one target and one drafter.

    `tokenizer`: a Hugging Face fast tokenizer, or None for targets without text.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        controller: Controller,
        *,
        vocabulary: Vocabulary,
        tokenizer: Any | None,
        max_users: int = 16,
        prefill_chunk: int = 512,
        prefix_cache: bool = True,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.controller = controller
        self.verifier = Verifier()
        self.uniforms = Uniforms()
        self.vocabulary = vocabulary
        self._text_tokenizer = getattr(tokenizer, "backend_tokenizer", None)
        self._rows: dict[int, Sequence] = {}
        self._watch = DraftWatch(drafter.name)
        self._next_id = 0
        self._reach: int = getattr(drafter, "reach", 0)
        self._fresh_seeds = np.random.SeedSequence()
        self.steps = 0
        self.fast: FastPath | None = None
        self.drafts_beside_prompts = True
        self.scheduler = Scheduler(
            target.pool,
            max_users=max_users,
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
            spare_pages=int(getattr(drafter, "shifted", False)),
            on_preempt=self._close_drafts,
        )

    # --- requests ----------------------------------------------------------------------------

    @property
    def rows(self) -> list[Sequence]:
        """Requests waiting or running, by arrival."""
        return list(self._rows.values())

    @property
    def has_work(self) -> bool:
        """True while a request is waiting or running."""
        return bool(self._rows)

    def submit(
        self,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        index: int = 0,
        arrived: float | None = None,
    ) -> int:
        """Queue one request and return its id. `arrived`: client clock, time.perf_counter().

        Raises `InvalidRequest` for an empty or overlong prompt, unknown token ids, or sampling
        values that do not fit the model; other requests are unharmed.
        """
        self._check_prompt(prompt)
        if params.stop and self._text_tokenizer is None:
            raise InvalidRequest(
                f"stop is {params.stop!r}, but this target has no tokenizer; use stop_token_ids."
            )
        request_id = self._next_id
        row = Sequence(
            request_id=request_id,
            index=index,
            tokens=list(prompt),
            prompt_len=len(prompt),
            params=params,
            seed=self._seed(params, index),
            sampler=RowSampler(params, self.vocabulary, prompt),
            table=PageTable(
                self.target.pool,
                expected_tokens=min(
                    len(prompt) + params.max_tokens + self.drafter.max_draft_len, self._capacity
                ),
            ),
            stream=self._stream(params),
            stop_ids=self._stop_ids(params),
            max_context=self.target.config.max_context,
            arrived=time.perf_counter() if arrived is None else arrived,
        )
        self._next_id += 1
        self._rows[request_id] = row
        self.scheduler.add(row)
        return request_id

    def knows(self, request_id: int) -> bool:
        """True while the request is waiting or running."""
        return request_id in self._rows

    def cancel(self, request_id: int) -> Completion | None:
        """End a request now; None if it is not running (any more)."""
        row = self._rows.get(request_id)
        if row is None:
            return None
        row.finish_reason = FinishReason.CANCELLED
        return self._finish(row)

    def settle(self) -> None:
        """Let the device end what it was given. The time until the next step is nobody's then."""
        if self.fast is not None:
            self.fast.lane.settle()

    def reset(self) -> None:
        """Forget reusable prefixes and what the drafter kept across requests."""
        self.target.pool.reset_prefixes()
        self.drafter.reset()

    # --- the loop ----------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """One round of the batch: one target forward, every row advanced by at least one token."""
        if self.fast is not None:
            outputs = self.fast.step()
            if outputs is not None:
                return outputs
        clock = Clock()
        batch = self.scheduler.schedule()
        outputs = self._finish_exhausted()
        if not batch.decoding and not batch.chunks:
            return outputs
        clock.lap(None)
        plan = self.controller.plan(batch.decoding)
        if batch.chunks and not self.drafts_beside_prompts:
            plan[:] = 0
        plan = self._reserve(batch, plan)
        draft = self.drafter.draft(batch.decoding, plan).padded(len(batch.rows))
        clock.lap("draft")
        fed = fed_rows(batch, draft)
        scores = self.target.forward(self.forward_rows(batch, draft))
        clock.lap("verify")
        verdict = self.verifier.verify(batch.rows, draft, scores.logits, self.uniforms)
        clock.lap("sample")
        return outputs + self.conclude(batch, draft, verdict, fed, scores, clock)

    def conclude(
        self,
        batch: Batch,
        draft: Draft,
        verdict: Verdict,
        fed: Seq[Fed],
        scores: ForwardOutput,
        clock: Clock,
    ) -> list[StepOutput]:
        """After a forward over the rows `fed` and its verdict: commit, stop, roll back caches by
        length, tell the drafter; one record a row.
        """
        ending = batch.ending
        for chunk in batch.chunks:
            chunk.row.computed += chunk.length
        facts = [
            self._commit(row, i, draft, verdict, decoded=i < len(batch.decoding))
            for i, row in enumerate(batch.rows)
        ]
        for row in ending:
            self.scheduler.publish(row)
        clock.lap(None)
        if scores.features is not None and isinstance(self.drafter, TakesFeatures):
            self.drafter.absorb(spans(fed, scores.features))
        self._tell_drafter(batch, verdict)
        clock.lap("draft")
        times, prefilled = clock.times(), sum(c.length for c in batch.chunks)
        records = [
            StepRecord(self.steps, *fact, len(batch.rows), prefilled, times) for fact in facts
        ]
        for row, record in zip(batch.rows, records, strict=True):
            row.records.append(record)
        self.steps += 1
        self.observe(records)
        return self.emit(batch.rows, records) + self._fail_chunks(batch, scores)

    def observe(self, records: Seq[StepRecord]) -> None:
        """Show the records of a finished step to whoever learns from them."""
        self.controller.observe(records)
        self._watch.observe(records)

    def _reserve(self, batch: Batch, plan: Any) -> Any:
        for i, row in enumerate(batch.decoding):
            if plan[i]:
                plan[i] = self.scheduler.reserve_draft(row, int(plan[i]), reach=self._reach)
        return plan

    def forward_rows(self, batch: Batch, draft: Draft) -> list[ForwardRow]:
        """[anchor + draft tokens] of decoding rows, and prompt chunks."""
        rows = []
        for i, row in enumerate(batch.decoding):
            tokens = [row.tokens[-1], *draft.row(i)]
            rows.append(ForwardRow(tokens, row.computed, row.table.pages, len(tokens)))
        for chunk in batch.in_order:
            row, start = chunk.row, chunk.row.computed
            tokens = row.tokens[start : start + chunk.length]
            rows.append(ForwardRow(tokens, start, row.table.pages, int(chunk.ends_prompt)))
        return rows

    def _commit(
        self, row: Sequence, i: int, draft: Draft, verdict: Verdict, *, decoded: bool
    ) -> tuple[int, bool, int, int, int, int]:
        """Commit one row's verdict; (request, prefill, depth, drafted, accepted, committed)."""
        depth, accepted = len(row.tokens), int(verdict.accepted[i])
        drafted = int(draft.lens[i])
        tokens = list(draft.row(i)[:accepted])
        if i not in verdict.errors:
            tokens.append(int(verdict.next_tokens[i]))
        committed = row.commit(tokens, verdict.logprobs[i])
        if i in verdict.errors and row.finish_reason is None:
            row.finish_reason, row.error = FinishReason.ERROR, verdict.errors[i]
            row.computed = 0  # its keys and values may be broken: nobody may reuse them
            return row.request_id, not decoded, depth, drafted, accepted, committed
        if decoded:
            # The anchor and the accepted tokens are in the cache; a rejected token's entries lie
            # past `computed` and are overwritten by the next forward.
            row.computed += min(committed, accepted + 1)
        return row.request_id, not decoded, depth, drafted, accepted, committed

    def _tell_drafter(self, batch: Batch, verdict: Verdict) -> None:
        kept = [i for i, r in enumerate(batch.decoding) if r.finish_reason is None]
        if kept:
            rows = [batch.decoding[i] for i in kept]
            self.drafter.advance(rows, verdict.take(kept))
        opened = [r for r in batch.ending if r.finish_reason is None]
        for row in opened:
            row.opened = True
        if opened:
            self.drafter.open(opened)

    # --- endings -----------------------------------------------------------------------------

    def emit(self, rows: Seq[Sequence], records: Seq[StepRecord]) -> list[StepOutput]:
        """What rows and their newest records say to the caller; rows that ended are finished."""
        outputs = []
        for row, record in zip(rows, records, strict=True):
            done = row.finish_reason is not None
            tokens = tuple(row.tokens[len(row.tokens) - record.committed :])
            text = row.stream.delta(finished=done)
            completion = self._finish(row) if done else None
            outputs.append(StepOutput(row.request_id, tokens, text, completion))
        return outputs

    def _finish(self, row: Sequence) -> Completion:
        self._close_drafts(row)
        self.scheduler.remove(row)
        del self._rows[row.request_id]
        return row.completion()

    def _finish_exhausted(self) -> list[StepOutput]:
        rows, self.scheduler.exhausted = self.scheduler.exhausted, []
        return [self._end(r) for r in rows]

    def _fail_chunks(self, batch: Batch, scores: ForwardOutput) -> list[StepOutput]:
        """End requests whose prompt chunk came out broken before any logits were asked of it."""
        rest = [c.row for c in batch.chunks if not c.ends_prompt]
        bad = [r for i, r in enumerate(rest, len(batch.rows)) if i in scores.broken]
        for row in bad:
            row.finish_reason, row.computed = FinishReason.ERROR, 0
            row.error = (
                f"The target produced NaN or infinite hidden states in the prompt of request "
                f"{row.request_id}; check its weights and dtype."
            )
        return [self._end(r) for r in bad]

    def _end(self, row: Sequence) -> StepOutput:
        text = row.stream.delta(finished=True)
        return StepOutput(row.request_id, (), text, self._finish(row))

    def _close_drafts(self, row: Sequence) -> None:
        if self.fast is not None:
            self.fast.forget(row)
        if row.opened:
            self.drafter.close([row.request_id])
            row.opened = False

    # --- checks ------------------------------------------------------------------------------

    @property
    def _capacity(self) -> int:
        pool = self.target.pool
        return int(min(pool.num_pages * pool.page_size, self.target.config.max_context))

    def _check_prompt(self, prompt: Seq[int]) -> None:
        if not prompt:
            raise InvalidRequest("The prompt is empty (0 tokens); give at least one token.")
        if len(prompt) >= self._capacity:
            raise InvalidRequest(
                f"The prompt has {len(prompt)} tokens; this engine holds {self._capacity} "
                "including the answer. Shorten it, or raise kv_tokens (up to the model's context)."
            )
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self.vocabulary.size:
            raise InvalidRequest(
                f"The prompt holds token id {low if low < 0 else high}; this model's ids are 0 to "
                f"{self.vocabulary.size - 1}."
            )

    def _seed(self, params: SamplingParams, index: int) -> int:
        """Key of a request's uniforms; answers 1.. of a request get keys derived from its seed."""
        if params.seed is None:
            return int(self._fresh_seeds.spawn(1)[0].generate_state(1, np.uint64)[0] >> 1)
        if index == 0:
            return params.seed
        return int(
            np.random.SeedSequence((params.seed, index)).generate_state(1, np.uint64)[0] >> 1
        )

    def _stream(self, params: SamplingParams) -> TextStream:
        if self._text_tokenizer is None:
            return NoText()
        return TokenText(self._text_tokenizer, params.stop)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        eos = () if params.ignore_eos else self.vocabulary.eos_ids
        return frozenset((*eos, *params.stop_token_ids))
