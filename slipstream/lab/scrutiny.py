"""Doubts about a row: unmatched pairs, records that do not add up, drafters that do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.lab.grid import Bars, Cell, Grid
from slipstream.lab.results import CellResult
from slipstream.lab.samples import Sample, window
from slipstream.metrics import BROKEN_ROW_STEPS, BROKEN_SHARE, acceptance

CACHE_BLOCK = 16  # prompt tokens by which cache hits of two arms may differ (traps 23)
ENOUGH_DRAFTED = 100  # draft tokens before "nothing is accepted" means anything
NOTHING_ACCEPTED = 0.02
RESTLESS = 1.5  # slowest repeat of the baseline / fastest


def matched_reasons(
    samples: Sequence[Sample], baseline: Sequence[Sample], *, bars: Bars
) -> list[str]:
    """Why an arm and its baseline cannot be compared; empty where they can."""
    reasons = []
    hits, base_hits = _cached(samples), _cached(baseline)
    if hits is not None and base_hits is not None and abs(hits - base_hits) > CACHE_BLOCK:
        reasons.append(
            f"not matched: {hits:.0f} cached prompt tokens a request against {base_hits:.0f} in "
            "the baseline"
        )
    tokens, base_tokens = sum(s.tokens for s in samples), sum(s.tokens for s in baseline)
    if not tokens or not base_tokens:
        reasons.append("not matched: one of the arms wrote no tokens")
    elif not 1 / bars.length_ratio <= tokens / base_tokens <= bars.length_ratio:
        reasons.append(
            f"not matched: outputs are {tokens / base_tokens:.2f} times as long as the baseline's, "
            f"the bar is {bars.length_ratio:g} either way"
        )
    return reasons


def _cached(samples: Sequence[Sample]) -> float | None:
    """Mean cached prompt tokens a request; None where any request does not say."""
    found = [s.cached_tokens for s in samples]
    known = [c for c in found if c is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def record_reasons(samples: Sequence[Sample]) -> list[str]:
    """Requests that failed, and step records that contradict the tokens (traps 24)."""
    reasons = []
    errors = [s for s in samples if s.error is not None]
    if errors:
        reasons.append(f"{len(errors)} requests ended in an error: {errors[0].error}")
    odd = [s.id for s in samples if s.error is None and not adds_up(s)]
    if odd:
        reasons.append(f"step records do not add up to the output of {len(odd)} requests: {odd[0]}")
    return reasons


def adds_up(sample: Sample) -> bool:
    """Tokens by chunk, by id and by step record agree, and no step accepts more than it drafted."""
    if sample.token_ids is not None and len(sample.token_ids) != sample.tokens:
        return False
    if sample.records is None:
        return True
    committed = sum(r.committed for r in sample.records)
    return committed == sample.tokens and all(r.accepted <= r.drafted for r in sample.records)


def cell_warnings(
    grid: Grid,
    cell: Cell,
    rows: Sequence[CellResult],
    baseline: Mapping[tuple[int, int], Sequence[Sample]],
) -> list[str]:
    """Things a reader of this cell should know."""
    warnings = []
    if rows[0].repeats < grid.repeats:
        warnings.append(f"{cell.name}: {rows[0].repeats} of {grid.repeats} repeats were measured.")
    spread = _spread(baseline)
    if spread is not None and spread > RESTLESS:
        warnings.append(
            f"{cell.name}: a restless machine, the baseline's slowest repeat took {spread:.1f} "
            "times its fastest; only paired ratios mean anything here."
        )
    return warnings


def drafter_warnings(cell: Cell, arm: str, samples: Sequence[Sample]) -> list[str]:
    """A drafter of which nothing is accepted is broken or made for another target (traps 20)."""
    counts = acceptance(r for s in samples for r in s.records or ())
    rate = counts.acceptance_rate
    if rate is None or rate >= NOTHING_ACCEPTED or counts.drafted < ENOUGH_DRAFTED:
        return []
    return [
        f"{cell.name}, {arm}: {counts.accepted} of {counts.drafted} draft tokens were accepted; "
        "is the drafter made for this target?"
    ]


def drafter_reasons(samples: Sequence[Sample]) -> list[str]:
    """Marks a cell whose drafter did no better than chance from the start (traps 20)."""
    records = sorted((r for s in samples for r in s.records or ()), key=lambda r: r.step)
    drafts = [r for r in records if r.drafted][:BROKEN_ROW_STEPS]
    kept = sum(r.accepted > 0 for r in drafts)
    if len(drafts) < BROKEN_ROW_STEPS or kept >= BROKEN_SHARE * len(drafts):
        return []
    return [f"drafter broken: {kept} of its first {len(drafts)} drafts had a token accepted"]


def _spread(units: Mapping[tuple[int, int], Sequence[Sample]]) -> float | None:
    """Slowest / fastest repeat by seconds a token; None for one repeat."""
    seconds: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for (_, repeat), rows in units.items():
        seconds[repeat] = seconds.get(repeat, 0.0) + window(rows)
        tokens[repeat] = tokens.get(repeat, 0) + sum(s.tokens for s in rows)
    paces = [seconds[r] / tokens[r] for r in seconds if tokens[r] and seconds[r] > 0]
    return max(paces) / min(paces) if len(paces) > 1 else None
