"""When the engine takes the lane, and what it does with the lane's results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slipstream.drafters.base import OnDevice, Pads, TakesFeatures
from slipstream.engine.lane import Lane, StepResult
from slipstream.engine.reading import Reading
from slipstream.engine.sequence import Sequence
from slipstream.types import Span, StepRecord, Verdict

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine, StepOutput


def attach(
    engine: Engine, *, max_users: int, forced: float | None = None, warm: bool = False
) -> None:
    """Give an engine on an accelerator its lane, if its drafter can use one: it drafts on the
    device, or its drafts are one-hot and need no features. `forced`: synthetic acceptance
    (`target.graphs.StepShape`). `warm`: compile and capture now all that requests can need, rather
    than while they wait.
    """
    drafter, target = engine.drafter, engine.target
    form = drafter.on_device() if isinstance(drafter, OnDevice) else None
    if target.loaded.model.device.type == "cuda":
        # Steps that read prompts, and what the lane does not do: verify rows of every user.
        tokens = engine.scheduler.prefill_chunk + max_users * (drafter.max_draft_len + 1)
        target.pad(rows=max_users, tokens=tokens)
        if isinstance(drafter, Pads):
            drafter.pad(rows=max_users, tokens=tokens, positions=target.positions)
    if warm:
        target.warm_up()
        if isinstance(drafter, Pads):
            drafter.warm_up()
    one_hot = isinstance(drafter, OnDevice) or getattr(drafter, "one_hot", False)
    if form is not None or (one_hot and not drafter.needs):
        lane = Lane(engine.target, drafter, form, max_users=max_users, forced=forced)
        if warm:
            lane.warm_up()
        engine.fast = FastPath(engine, lane)
        # Beside a prompt the host would draft from features, slower than the device takes a step.
        engine.drafts_beside_prompts = form is None or not drafter.needs


class FastPath:
    """Steps through the lane while requests decode; new ones' prompts are read between them."""

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self._engine, self.lane = engine, lane
        self._hold = False  # broken logits: the engine's own step says what is wrong with them
        self._reading: Reading | None = None
        self._before = 0  # steps in flight that were launched before the reading

    def step(self) -> list[StepOutput] | None:
        """One round through the lane; None where the engine has to take its own step now."""
        lane, scheduler = self.lane, self._engine.scheduler
        rows = scheduler.decoding
        if scheduler.reads and self._reading is None and not self._reads(rows):
            rows = []
        while rows and not lane.full and not self._hold:
            if not self._launch(rows):
                break
        if self._reading is not None and not self._before:
            return self._read(self._reading)
        if lane.busy:
            self._before = max(0, self._before - 1)
            return self._finish(lane.collect())
        lane.leave()
        self._hold = False
        return None

    def _reads(self, rows: list[Sequence]) -> bool:
        """Have the device read prompts beside the lane; False where these and the decoding rows
        should share a forward. With no step in flight the lane may be unable to go on.
        """
        lane, engine = self.lane, self._engine
        goes_on = rows and lane.pipelined and lane.busy and not self._hold
        if not goes_on or not engine.target.pads(engine.scheduler.prefill_chunk):
            return False
        batch = engine.scheduler.prompts()
        if batch.chunks:
            self._before = lane.in_flight
            self._reading = Reading(engine, batch, begun=lane.clock(), done=lane.clock())
        return True

    def _read(self, reading: Reading) -> list[StepOutput]:
        self._reading = None  # whatever comes of it: rows that it did not open are read again
        outputs, seconds = reading.finish()
        self.lane.skip(seconds)
        return outputs

    def forget(self, row: Sequence) -> None:
        """A request ended or was preempted."""
        self.lane.forget(row)

    def _launch(self, rows: list[Sequence]) -> bool:
        lane, engine = self.lane, self._engine
        if not all(lane.admits(row) for row in rows):
            return False
        if lane.pipelined:
            return lane.launch(rows)
        plan = engine.controller.plan(rows)
        for i, row in enumerate(rows):
            if plan[i]:
                plan[i] = engine.scheduler.reserve_draft(row, int(plan[i]))
        return lane.launch(rows, engine.drafter.draft(rows, plan))

    def _finish(self, result: StepResult) -> list[StepOutput]:
        """Commit what the device committed; a request that is gone by now gets nothing."""
        engine = self._engine
        self._hold |= result.broken
        found = [r for r in result.rows if r.tokens and engine.knows(r.row.request_id)]
        records, spans = [], []
        for each in found:
            row, depth = each.row, len(each.row.tokens)
            committed = row.commit(each.tokens, None)
            if result.features is not None:
                own = result.features[result.rows.index(each), :committed]
                spans.append(Span(row, row.computed, own))
            row.computed += committed
            record = StepRecord(
                engine.steps,
                row.request_id,
                False,
                depth,
                each.drafted,
                each.accepted,
                committed,
                len(found),
                0,
                result.times,
            )
            row.records.append(record)
            records.append(record)
        engine.steps += 1
        if spans and isinstance(engine.drafter, TakesFeatures):
            engine.drafter.absorb(spans)
        going = [r.row for r in found if r.row.finish_reason is None]
        if going:
            engine.drafter.advance(going, _verdict(len(going)))
        engine.observe(records)
        return engine.emit([r.row for r in found], records)


def _verdict(rows: int) -> Verdict:
    """For drafters that read the rows' tokens: what the device did is in no other form here."""
    return Verdict(np.zeros(rows, np.int64), np.zeros(rows, np.int64), (None,) * rows)
