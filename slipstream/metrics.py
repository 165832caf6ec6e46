"""The definitions of DESIGN section 4. Every counter, report cell and evaluation calls these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.types import StageTimes, StepRecord, Timings

BROKEN_ROW_STEPS = 200
"""Row-steps with a draft that are looked at before a drafter is called broken."""

BROKEN_SHARE = 0.02
"""A drafter is broken where a smaller share of these had a token accepted: near chance."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts over decode row-steps. `reached[i]`: drafts whose position i was checked after all
    earlier ones held; `kept[i]`: of those, how many were accepted.
    """

    row_steps: int
    drafts: int
    drafted: int
    accepted: int
    committed: int
    reached: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def tokens_per_step(self) -> float | None:
        """Committed tokens per row-step, steps without a draft counted, nothing after a stop."""
        return self.committed / self.row_steps if self.row_steps else None

    @property
    def acceptance_length(self) -> float | None:
        """The field's number: 1 + accepted / drafts. Skips draftless steps, counts past stops."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def by_position(self) -> tuple[float | None, ...]:
        """Accepted at i / drafts that reached i."""
        return tuple(k / r if r else None for k, r in zip(self.kept, self.reached, strict=True))


def acceptance(records: Iterable[StepRecord]) -> Acceptance:
    """Fold decode row-steps into counts. Steps that ended a prompt are not decode steps."""
    decode = [r for r in records if not r.prefill]
    width = max((r.drafted for r in decode), default=0)
    reached, kept = [0] * width, [0] * width
    for r in decode:
        for i in range(r.drafted):
            if i > r.accepted:
                break
            reached[i] += 1
            kept[i] += i < r.accepted
    return Acceptance(
        row_steps=len(decode),
        drafts=sum(r.drafted > 0 for r in decode),
        drafted=sum(r.drafted for r in decode),
        accepted=sum(r.accepted for r in decode),
        committed=sum(r.committed for r in decode),
        reached=tuple(reached),
        kept=tuple(kept),
    )


def ttft(timings: Timings) -> float | None:
    """Seconds from arrival to the first chunk that holds a token."""
    return timings.chunk_times[0] - timings.arrived if timings.chunk_times else None


def tpot(timings: Timings) -> float | None:
    """Seconds a token: (last - first chunk) / tokens after the first chunk. None for one chunk."""
    after_first = sum(timings.chunk_tokens[1:])
    if not after_first:
        return None
    return (timings.chunk_times[-1] - timings.chunk_times[0]) / after_first


def tok_per_s(tokens: int, window: float) -> float | None:
    """Committed output tokens per second of the measured window (seconds), all users."""
    return tokens / window if window > 0 else None


def speedup(baseline_cost: Sequence[float], arm_cost: Sequence[float]) -> float | None:
    """Ratio of totals over the same prompts, baseline / arm; costs are seconds per token or inverse
    rates. Pairs must line up.
    """
    if len(baseline_cost) != len(arm_cost):
        raise ValueError(f"{len(baseline_cost)} baseline costs against {len(arm_cost)} of the arm")
    total = sum(arm_cost)
    return sum(baseline_cost) / total if total > 0 else None


def efficiency(speedup_value: float, tokens_per_step: float) -> float:
    """Share of the ideal gain that drafting, verifying and the host left over."""
    return speedup_value / tokens_per_step


def stage_totals(records: Iterable[StepRecord]) -> StageTimes:
    """Seconds by stage over the distinct steps in `records` (a step's rows share its times)."""
    steps = {r.step: r.times for r in records}
    return StageTimes(
        draft=sum(t.draft for t in steps.values()),
        verify=sum(t.verify for t in steps.values()),
        sample=sum(t.sample for t in steps.values()),
        host=sum(t.host for t in steps.values()),
    )
