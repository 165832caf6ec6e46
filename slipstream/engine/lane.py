"""The fast lane: decoding steps that run on the device, with the host one step behind.

While requests decode, a step is one captured graph and the host's part (stops, text, streaming,
admission) happens while the next one runs. A request that ends is noticed a step late and what it
made meanwhile is discarded; its cache cells lie behind its verified tokens, and whoever gets its
pages next writes later in stream order. Whatever the lane does not do (penalties, grammars,
logprobs, preemption) drains it and takes the engine's own five lines; prompts are read beside it
(`engine.reading`) or there.

A drafter that reads features takes those of a step in at the beginning of the next one. After the
last step in flight there is none, so its features go to the host (`StepResult.features`), and the
next launch enters anew, with nothing to take in. Drafts are one-hot, also for sampled requests:
each position's token is drawn from the target's law as if nothing had been drafted.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.drafters.base import DeviceForm, Drafter, KeepsState
from slipstream.engine.sequence import Sequence
from slipstream.sampling.fused import BROKEN, SKIPPED
from slipstream.target.graphs import Step, StepShape
from slipstream.target.slots import Entry, Slots
from slipstream.target.target import Target
from slipstream.types import Draft, StageTimes

_AHEAD = 64
"""Positions reserved beyond what the next steps need, so that page tables are seldom sent."""
_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_DEPTH = 2  # steps in flight: the one that runs and the one behind it


@dataclass(frozen=True, slots=True)
class RowResult:
    """What a step did for a row: draft tokens offered, accepted, and the tokens to commit."""

    row: Sequence
    drafted: int
    accepted: int
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Rows in batch order and the step's times. `broken`: some row's logits had no law.

    `features` [rows, draft_len + 1, taps, hidden]: what the target saw from each row's anchor on,
    if the drafter needs it and no later step takes it in; else None. Good until the next launch.
    """

    rows: list[RowResult]
    times: StageTimes
    broken: bool
    features: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step: its rows, where its result will be, and the events around it."""

    rows: list[Sequence]
    result: torch.Tensor
    clocks: tuple[Any, Any, Any]


class Lane:
    """Launches steps and collects their results, in order.

    `form`: the drafter's on the device, None where the host drafts. `forced`: synthetic acceptance,
    for cost measurements only (see `target.graphs.StepShape`).
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        form: DeviceForm | None,
        *,
        max_users: int,
        forced: float | None = None,
    ) -> None:
        self._target, self._forced = target, forced
        self._draft_len, self._form = drafter.max_draft_len, form
        self._reach: int = getattr(drafter, "reach", 0)
        self._longest: int | None = getattr(form, "max_context", None)
        model, pool = target.loaded.model, target.pool
        tokens = min(model.config.max_context, pool.num_pages * pool.page_size)
        self._slots = Slots(
            max_users,
            capacity=tokens,
            page_size=pool.page_size,
            device=model.device,
            spare=self._reach,
        )
        self._steps: dict[StepShape, Step] = {}
        self._step: Step | None = None
        self._members: list[Sequence] = []
        self._slot_of: dict[int, int] = {}
        self._synced: dict[int, int] = {}
        self._covered: dict[int, int] = {}
        self._flights: deque[_Flight] = deque()
        self._last = 0.0
        self._cuda = model.device.type == "cuda"
        self.clock = cuda_clock if self._cuda else HostClock

    # --- who may use it ----------------------------------------------------------------------

    def admits(self, row: Sequence) -> bool:
        """Whether the lane can serve a request: a plain law, no logprobs, and no more tokens than
        the drafter's own context holds.
        """
        fits = self._longest is None or _limit(row) <= self._longest
        return fits and row.sampler.plain and row.params.logprobs is None

    @property
    def pipelined(self) -> bool:
        """Whether drafts are made on the device, so that steps can be launched ahead."""
        return self._form is not None

    @property
    def busy(self) -> bool:
        """Whether steps are in flight."""
        return bool(self._flights)

    @property
    def in_flight(self) -> int:
        """How many steps are."""
        return len(self._flights)

    @property
    def current(self) -> Step:
        """The step of the last launch. Raises RuntimeError before there is one."""
        if self._step is None:
            raise RuntimeError("the lane has launched nothing yet")
        return self._step

    @property
    def full(self) -> bool:
        """Whether the next thing to do is to collect."""
        return len(self._flights) >= (_DEPTH if self.pipelined else 1)

    # --- steps -------------------------------------------------------------------------------

    def launch(self, rows: Seq[Sequence], draft: Draft | None = None) -> bool:
        """Enqueue one step over `rows`; False, and nothing changed, if pages are short or if a row
        has no room for another token. `draft`: one-hot drafts where the host makes them.
        """
        width = self._draft_len + 1
        reach = len(self._flights) * width + max(width, self._reach)
        if not all(self._cover(row, len(row.tokens) + reach) for row in rows):
            return False
        if not self._serves(rows, exactly=draft is not None):
            if not self._flights:
                self._enter(rows)
            elif draft is not None or not self._join(rows):
                return False
        step = self._step
        assert step is not None
        if draft is not None:
            self._send_draft(step, draft)
        begun, done, landed = self.clock(), self.clock(), self.clock()
        begun.record()
        step.launch()
        done.record()
        result = torch.empty(step.result.shape, dtype=torch.int32, pin_memory=self._cuda)
        result.copy_(step.result, non_blocking=True)
        landed.record()
        self._target.forwards += 1
        self._flights.append(_Flight(list(self._members), result, (begun, done, landed)))
        return True

    def collect(self) -> StepResult:
        """Wait for the oldest step in flight and read what it committed."""
        flight = self._flights.popleft()
        begun, done, landed = flight.clocks
        landed.synchronize()
        now = time.perf_counter()
        device = begun.elapsed_time(done) / 1e3
        host = max(0.0, now - self._last - device) if self._last else 0.0
        self._last = now
        features = None if self._flights else self._leftover()
        rows, broken = [], False
        for row, values in zip(flight.rows, flight.result.tolist(), strict=False):
            drafted, accepted, *tokens = values
            broken |= accepted == BROKEN
            if accepted in (SKIPPED, BROKEN):
                rows.append(RowResult(row, 0, 0, []))
                continue
            rows.append(RowResult(row, drafted, accepted, tokens[: accepted + 1]))
            if row.request_id in self._synced:
                self._synced[row.request_id] += accepted + 1
        return StepResult(rows, StageTimes(0.0, device, 0.0, host), broken, features)

    def _leftover(self) -> torch.Tensor | None:
        """Features that nobody on the device takes in: the next launch has to enter anew."""
        step = self.current
        if not step.features.shape[1]:
            return None
        self._members = []
        return step.features.view(step.shape.rows, -1, *step.features.shape[1:])

    @torch.inference_mode()
    def forget(self, row: Sequence) -> None:
        """A request ended or left: its slot is free. What is in flight for it is discarded."""
        slot = self._slot_of.pop(row.request_id, None)
        if row in self._members:
            # Its pages may be another's when the next step takes in what this one saw of it.
            self._row_cells(self._members.index(row)).fill_(-1)
        self._synced.pop(row.request_id, None)
        self._covered.pop(row.request_id, None)
        if slot is not None:
            self._slots.stop_at[slot] = 0  # from the next launch on its batch row rests
            self._slots.lengths[slot] = 0

    def settle(self) -> None:
        """Wait for the device. What passes until the next result is no host time of a step."""
        if self._flights:
            self._flights[-1].clocks[-1].synchronize()
        self._last = 0.0

    def skip(self, seconds: float) -> None:
        """The device did something else for so long: that is no host time of a step."""
        if self._last:
            self._last += seconds

    def leave(self) -> None:
        """Nothing is in flight and the host goes its own way: sizes and pages may change."""
        self._members, self._last = [], 0.0
        self._covered.clear()

    def warm_up(self) -> None:
        """Capture the steps of every size, greedy and sampled, before there are requests."""
        for size in _SIZES[: _SIZES.index(_size(self._slots.count)) + 1]:
            for sampled in (False, True):
                self._captured(self._shape(size, sampled=sampled))

    # --- state -------------------------------------------------------------------------------

    def _serves(self, rows: Seq[Sequence], *, exactly: bool) -> bool:
        """Whether the tables and the graph are right for these rows; ended ones may still be in."""
        if exactly:
            return [*rows] == self._members
        known = {row.request_id for row in self._members}
        same_size = self._step is not None and self._step.shape.rows == _size(len(rows))
        return same_size and all(row.request_id in known for row in rows)

    def _cover(self, row: Sequence, tokens: int) -> bool:
        """Make the row's pages reach `tokens` positions, as far as the row itself and the
        drafter's block can go.
        """
        most = _limit(row) + self._reach
        need = min(tokens, most)
        if self._covered.get(row.request_id, 0) >= need:
            return True
        ahead = min(need + _AHEAD, most)
        if row.table.reserve(ahead):
            need = ahead
        elif not row.table.reserve(need):
            return False
        if row.request_id in self._slot_of and row in self._members:
            self._send_pages(row, need)
        self._covered[row.request_id] = need
        return True

    def _send_pages(self, row: Sequence, tokens: int) -> None:
        size = self._slots.page_size
        first = self._covered.get(row.request_id, 0) // size
        last = -(-tokens // size)
        pages = torch.tensor(row.table.pages[first:last], dtype=torch.int32)
        self._slots.pages[self._slot_of[row.request_id], first:last].copy_(pages, non_blocking=True)

    def _enter(self, rows: Seq[Sequence]) -> None:
        """Bring the tables up to date for these rows and pick the graph of their size."""
        self._bring(rows)
        self._step = self._sized(rows)
        self._step.cells.fill_(-1)  # whatever was committed has been absorbed
        self._members = list(rows)
        self._send_members(self._step)

    def _join(self, rows: Seq[Sequence]) -> bool:
        """Let new rows take the places of ended ones behind the steps in flight; False, and nothing
        changed, where these rows want another graph.
        """
        step = self._step
        known = {row.request_id for row in self._members}
        new = [row for row in rows if row.request_id not in known]
        if step is None or not self._members or step.shape.rows != _size(len(rows)):
            return False
        if not step.shape.sampled and any(not row.params.greedy for row in new):
            return False
        self._bring(new)
        ended = (i for i, row in enumerate(self._members) if row.request_id not in self._slot_of)
        for row, place in zip(new, [*ended, *[None] * len(new)], strict=False):
            if place is None:
                self._members.append(row)
            else:
                self._members[place] = row
        self._send_members(step)
        return True

    def _bring(self, rows: Seq[Sequence]) -> None:
        """Bring the tables up to date for these rows, each in a slot of its own."""
        slots, entries = self._slots, []
        free = iter(sorted(set(range(slots.count)) - set(self._slot_of.values())))
        for row in rows:
            slot = self._slot_of.get(row.request_id)
            if slot is None:
                slot = self._slot_of[row.request_id] = next(free)
            known, length = self._synced.get(row.request_id, 0), len(row.tokens)
            fresh, pages = row.tokens[known:], row.table.pages
            entries.append(
                Entry(slot, known, fresh, length, _limit(row), pages, row.params, row.seed)
            )
            self._synced[row.request_id] = length
        slots.enter(entries)
        if isinstance(self._form, KeepsState):
            self._form.entered(rows, [entry.slot for entry in entries])

    def _send_members(self, step: Step) -> None:
        """Tell the step whom its batch rows serve; those of ended requests serve nobody."""
        nobody = self._slots.count
        slots = [self._slot_of.get(row.request_id, nobody) for row in self._members]
        slots += [nobody] * (step.shape.rows - len(slots))
        step.slot_of.copy_(torch.tensor(slots, dtype=torch.int32), non_blocking=True)

    def _row_cells(self, index: int) -> torch.Tensor:
        """Where the last step's tokens of a batch row lie in the cache."""
        step = self.current
        width = step.shape.draft_len + 1
        return step.cells[index * width : (index + 1) * width]

    def _sized(self, rows: Seq[Sequence]) -> Step:
        """The captured step that fits these rows."""
        sampled = any(not r.params.greedy for r in rows)
        return self._captured(self._shape(_size(len(rows)), sampled=sampled))

    def _shape(self, rows: int, *, sampled: bool) -> StepShape:
        return StepShape(rows=rows, draft_len=self._draft_len, sampled=sampled, forced=self._forced)

    def _captured(self, shape: StepShape) -> Step:
        step = self._steps.get(shape)
        if step is None:
            form = (
                self._form.sized(shape.rows, self._slots.tokens.device)
                if self._form is not None
                else None
            )
            step = Step(
                self._target.loaded.model,
                self._target.storage,
                self._slots,
                shape,
                drafter=form,
            )
            if self._cuda:
                step.capture()
            self._steps[shape] = step
        return step

    def _send_draft(self, step: Step, draft: Draft) -> None:
        rows, width = len(draft.lens), draft.tokens.shape[1]
        step.counts[:rows].copy_(torch.from_numpy(draft.lens).int(), non_blocking=True)
        if width:
            step.drafts[:rows, :width].copy_(torch.from_numpy(draft.tokens).int())


def _size(rows: int) -> int:
    return next(size for size in _SIZES if size >= rows)


def _limit(row: Sequence) -> int:
    """Tokens at which the row certainly ends."""
    return min(row.prompt_len + row.params.max_tokens, row.max_context)


def cuda_clock() -> Any:
    """An event on the current stream that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class HostClock:
    """An event where launches are synchronous: on a CPU."""

    def record(self) -> None:
        """The event is now."""
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Nothing runs behind the host's back."""

    def elapsed_time(self, end: HostClock) -> float:
        """Milliseconds until another event."""
        return (end.at - self.at) * 1e3
