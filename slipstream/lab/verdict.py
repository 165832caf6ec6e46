"""What the numbers say per cell: faster, slower or not resolved, and what to run.

A recommendation needs a publishable arm whose whole 95 % interval lies above 1.0. Everything else
ends in `none`, with the reason: guesses that did not hold are a different fault from checks that
cost too much, and call for a different remedy.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from slipstream.lab.arms import Arm, parse_arm
from slipstream.lab.formats import cell_title, number, ratio, speedup_text, users_text
from slipstream.lab.results import CellResult, GridResult, Interval, Resolution
from slipstream.lab.stats import resolution

NONE = "none"
COLLAPSED_TOKENS_PER_STEP = 1.15  # below this even free drafts could not gain 15 %
HOLDING_ACCEPTANCE_LENGTH = 1.5  # above this the drafts that were made did hold
TIE = 0.99  # lower bounds within 1 % are a tie; the simpler arm takes it
PAYS = 1.1  # tokens a step brings, over what it costs in plain steps: no stage is to blame

CellKey = tuple[str, str, int, str]  # target, traffic, users, sampling


class Cause(Enum):
    """Why an arm did not pay."""

    ACCEPTANCE_COLLAPSED = "acceptance collapsed"
    RARE_DRAFTS = "drafts hold but are rare"
    DRAFT_DEAR = "drafting got dear"
    VERIFY_DEAR = "verify got dear"
    SAMPLE_DEAR = "sampling got dear"
    HOST_DEAR = "host work got dear"
    STEP_DEAR = "steps got dear"


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of an arm against one plain step of its baseline.

    `ratio`: wall time over wall time. `verify`: the same for the target's forward alone, None where
    the stages were not measured. `cause` names the stage that grew most.
    """

    ratio: float
    verify: float | None
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class CellVerdict:
    """The verdict on one cell of one target. `run` is an arm, or `none` to leave speculation off.

    `best` is the arm the sentence is about, None where nothing could be compared.
    """

    target: str
    traffic: str
    users: int
    sampling: str
    title: str
    label: str
    resolution: Resolution
    run: str
    best: CellResult | None
    sentence: str
    advice: tuple[str, ...]


def resolve(speedup: Interval | None, *, bar: float = 1.0) -> Resolution:
    """Compare a speedup's interval with the bar (faster) and with 1.0 (slower).

    Without an interval nothing is resolved.
    """
    return resolution(speedup, bar=bar)


def bar_of(result: GridResult) -> float:
    """The speedup that the grid's bars asked for before the run; 1.0 where it wrote none."""
    bars = result.meta.get("bars")
    bar = bars.get("speedup", 1.0) if isinstance(bars, Mapping) else 1.0
    return float(bar)


def verdicts(result: GridResult) -> tuple[CellVerdict, ...]:
    """One verdict per target and cell, in the order the cells were measured."""
    groups: dict[CellKey, list[CellResult]] = defaultdict(list)
    for cell in result.cells:
        groups[cell_key(cell)].append(cell)
    bar = bar_of(result)
    return tuple(_judge(cells, bar) for cells in groups.values() if not _only_empty(cells))


def cell_key(cell: CellResult) -> CellKey:
    """What cells of different arms have in common."""
    return cell.target, cell.traffic, cell.users, cell.sampling


def has_numbers(cell: CellResult) -> bool:
    """False for a row that only records that an arm was run or planned."""
    return any(v is not None for v in (cell.ms_per_token, cell.user_tok_s, cell.total_tok_s))


def _only_empty(cells: Iterable[CellResult]) -> bool:
    return not any(has_numbers(c) for c in cells)


def _judge(cells: Sequence[CellResult], bar: float) -> CellVerdict:
    compared = [c for c in cells if not c.baseline and c.publishable and c.speedup is not None]
    faster = [c for c in compared if resolve(c.speedup, bar=bar) is Resolution.FASTER]
    if faster:
        best: CellResult | None = _simplest_of_best(faster)
        found = Resolution.FASTER
    else:
        best = max(compared, key=_lower_bound, default=None)
        slower = compared and all(resolve(c.speedup) is Resolution.SLOWER for c in compared)
        found = Resolution.SLOWER if slower else Resolution.NOT_RESOLVED
    run = best.arm if best and faster else NONE
    first = cells[0]
    return CellVerdict(
        target=first.target,
        traffic=first.traffic,
        users=first.users,
        sampling=first.sampling,
        title=cell_title(first),
        label=next((c.label for c in cells if c.label), ""),
        resolution=found,
        run=run,
        best=best,
        sentence=_sentence(found, best, bar) if best else _nothing(cells),
        advice=tuple(_advice(cells, compared)),
    )


def _known(interval: Interval | None) -> Interval:
    """The interval of a cell that was chosen because it has one."""
    assert interval is not None
    return interval


def _lower_bound(cell: CellResult) -> float:
    speedup = _known(cell.speedup)
    return speedup.value if speedup.low is None else speedup.low


def _simplest_of_best(cells: Sequence[CellResult]) -> CellResult:
    bar = TIE * max(map(_lower_bound, cells))
    tied = [c for c in cells if _lower_bound(c) >= bar]
    return min(tied, key=lambda c: parse_arm(c.arm).simplicity)


def _nothing(cells: Sequence[CellResult]) -> str:
    if any(c.speedup is not None for c in cells):
        return "Run none: every arm with a matched baseline is held back."
    return "Run none: no arm has a matched baseline to compare with."


def _sentence(found: Resolution, best: CellResult, bar: float) -> str:
    if best.speedup is None:
        return _nothing([best])
    arm = f"{best.arm} at {speedup_text(best.speedup)}"
    if found is Resolution.FASTER:
        return f"Run {arm}."
    if best.speedup.low is None:
        return f"No interval was measured; the largest ratio is {arm}. Measure before switching."
    if found is Resolution.SLOWER:
        return f"Run none; the best arm is {arm}."
    if best.speedup.low > 1.0:
        return f"Run none; the best arm is {arm}, not clear of this grid's bar of {ratio(bar)}."
    return f"Run none; the best arm is {arm}, and more repeats would tell."


def _advice(cells: Sequence[CellResult], compared: Sequence[CellResult]) -> Iterable[str]:
    baselines = {c.batch: c for c in cells if c.baseline}
    for cell in compared:
        baseline = baselines.get(cell.batch)
        if _direction(_known(cell.speedup)) is not Resolution.FASTER:
            text = diagnose(cell, baseline)
            if text:
                yield f"{cell.arm}: {text}"
        if baseline is not None and _latency_gains_throughput_loses(cell, baseline):
            before, after = _known(baseline.ms_per_token), _known(cell.ms_per_token)
            yield (
                f"{cell.arm}: total tok/s falls while each user's ms/token improves"
                f" ({number(before.value)} to {number(after.value)});"
                " choose by which one you sell."
            )
    yield from _depth_advice(compared)
    for cell in cells:
        if not cell.publishable and not cell.baseline and cell.speedup is not None:
            why = "; ".join(cell.reasons) or "no reason was recorded"
            yield f"{cell.arm} measured {speedup_text(cell.speedup)} and is held back: {why}."


def _latency_gains_throughput_loses(cell: CellResult, baseline: CellResult) -> bool:
    if cell.users == 1 or cell.ms_per_token is None or baseline.ms_per_token is None:
        return False
    gains = cell.ms_per_token.value < baseline.ms_per_token.value
    return gains and _direction(_known(cell.speedup)) is Resolution.SLOWER


def step_cost(cell: CellResult, baseline: CellResult | None) -> StepCost | None:
    """What a step of `cell` costs in plain steps of its baseline; None where nothing tells.

    Without stage times the ratio follows from efficiency: tokens per step over speedup.
    """
    mine, plain = cell.stage_ms, baseline.stage_ms if baseline else None
    if mine is None or plain is None or plain.total <= 0:
        return StepCost(1 / cell.efficiency, None, Cause.STEP_DEAR) if cell.efficiency else None
    growth = {
        Cause.DRAFT_DEAR: mine.draft - plain.draft,
        Cause.VERIFY_DEAR: mine.verify - plain.verify,
        Cause.SAMPLE_DEAR: mine.sample - plain.sample,
        Cause.HOST_DEAR: mine.host - plain.host,
    }
    verify = mine.verify / plain.verify if plain.verify > 0 else None
    return StepCost(mine.total / plain.total, verify, max(growth, key=lambda c: growth[c]))


def find_cause(cell: CellResult, baseline: CellResult | None) -> Cause | None:
    """Why `cell` did not pay; None where tokens per step or costs are not known."""
    if cell.tokens_per_step is None:
        return None
    if cell.tokens_per_step < COLLAPSED_TOKENS_PER_STEP:
        length = cell.acceptance_length
        holds = length is not None and length >= HOLDING_ACCEPTANCE_LENGTH
        return Cause.RARE_DRAFTS if holds else Cause.ACCEPTANCE_COLLAPSED
    cost = step_cost(cell, baseline)
    return cost.cause if cost else None


def diagnose(cell: CellResult, baseline: CellResult | None) -> str:
    """One sentence on why `cell` is not faster and what would help; empty where unknown."""
    cause, tokens = find_cause(cell, baseline), cell.tokens_per_step
    if cause is None or tokens is None:
        return ""
    if cause is Cause.ACCEPTANCE_COLLAPSED:
        return (
            f"{cause.value}: {tokens:.2f} tokens per step. Depth and hardware will not help;"
            " check that the drafter fits this target and traffic."
        )
    if cause is Cause.RARE_DRAFTS:
        return (
            f"{cause.value}: {tokens:.2f} tokens per step, {cell.acceptance_length:.2f} where"
            " there was a draft. This traffic repeats too little for it."
        )
    cost = step_cost(cell, baseline)
    slower = cell.speedup is not None and _direction(cell.speedup) is Resolution.SLOWER
    return _cost_sentence(cause, tokens, cost, slower=slower) if cost else ""


def _cost_sentence(cause: Cause, tokens: float, cost: StepCost, *, slower: bool) -> str:
    if not slower and tokens >= PAYS * cost.ratio:
        return (
            f"its steps pay, {tokens:.2f} tokens for {ratio(cost.ratio)} of a plain one, so no"
            " stage is to blame; prompts and repeats differ too much to tell."
        )
    verify = "" if cost.verify is None else f" (verify alone {ratio(cost.verify)})"
    end = "too close to call; a shallower draft may pay"
    if slower:
        end = (
            f"to pay it must bring more than {cost.ratio:.2f}, so do not speculate here, or draft"
            " fewer tokens"
        )
    return (
        f"{cause.value}: a step costs {ratio(cost.ratio)} a plain one{verify} and brings"
        f" {tokens:.2f} tokens; {end}."
    )


def _depth_advice(compared: Sequence[CellResult]) -> Iterable[str]:
    """Compare neighbors in depth among arms of one batch that differ in draft_len only."""
    families: dict[tuple[str, str], list[tuple[Arm, CellResult]]] = defaultdict(list)
    for cell in compared:
        arm = parse_arm(cell.arm)
        if arm.draft_len is not None:
            families[cell.batch, arm.stem].append((arm, cell))
    for family in families.values():
        ordered = sorted(family, key=lambda pair: pair[0].draft_len or 0)
        for (_, shallow), (_, deep) in pairwise(ordered):
            yield _depth_sentence(shallow, deep)


def _depth_sentence(shallow: CellResult, deep: CellResult) -> str:
    low, high = _known(shallow.speedup), _known(deep.speedup)
    pair = f"Depth: {deep.arm} at {ratio(high.value)}, {shallow.arm} at {ratio(low.value)}"
    if shallow.tokens_per_step is not None and deep.tokens_per_step is not None:
        pair += f" ({deep.tokens_per_step:.2f} and {shallow.tokens_per_step:.2f} tokens per step)"
    if high.low is None or high.high is None or low.low is None or low.high is None:
        better = deep if high.value > low.value else shallow
        return f"{pair}; {better.arm} by medians, without intervals."
    if high.low > low.high:
        return f"{pair}; deeper pays."
    if high.high < low.low:
        return f"{pair}; deeper costs, stay at {shallow.arm}."
    return f"{pair}; not resolved, so the shallower."


def crossovers(result: GridResult) -> tuple[str, ...]:
    """Where an arm stops paying as users are added: `on at 8 users, off at 16 users`."""
    series: dict[tuple[str, str, str, str, str], list[CellResult]] = defaultdict(list)
    for cell in result.cells:
        if not cell.baseline and cell.publishable and cell.speedup is not None:
            key = (cell.target, cell.batch, cell.arm, cell.traffic, cell.sampling)
            series[key].append(cell)
    lines = []
    for cells in series.values():
        for fewer, more in pairwise(sorted(cells, key=lambda c: c.users)):
            before, after = _direction(_known(fewer.speedup)), _direction(_known(more.speedup))
            if before is Resolution.FASTER and after is Resolution.SLOWER:
                lines.append(_crossover_sentence(fewer, more))
    return tuple(lines)


def _direction(speedup: Interval) -> Resolution:
    """Like `resolve`, but a median without an interval counts as what it says."""
    if speedup.low is not None:
        return resolve(speedup)
    return Resolution.FASTER if speedup.value > 1 else Resolution.SLOWER


def _crossover_sentence(fewer: CellResult, more: CellResult) -> str:
    traffic = f"{fewer.traffic} {fewer.sampling}".rstrip()
    rider = " (medians, no intervals)" if _known(more.speedup).low is None else ""
    label = f" [{fewer.label}]" if fewer.label else ""
    return (
        f"{fewer.target}, {fewer.arm}{label} on {traffic}: on at {users_text(fewer.users)}"
        f" ({speedup_text(fewer.speedup)}), off at {users_text(more.users)}"
        f" ({speedup_text(more.speedup)}); the crossover lies between{rider}."
    )
