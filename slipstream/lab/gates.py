"""Quality gates. Each runs on the arm it judges, in the run it belongs to; nothing is inherited.

An arm fails below the bar, or where it differs from the baseline beyond the interval: a drafter
that changes quality in either direction is broken (docs/lossless.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slipstream.lab import stats, traffic
from slipstream.lab.backends.base import Scores
from slipstream.lab.gate_specs import JsonGate, LosslessGate, NeedleGate
from slipstream.lab.grid import Grid
from slipstream.lab.prompts import Prompt, check_json, json_tasks, load, needle, with_salt
from slipstream.lab.results import GateResult, GateStatus
from slipstream.lab.samples import Request, Sample

CountTokens = Callable[[str], int]
Score = Callable[[Request, Sequence[int]], Scores | None]

# Drafts without randomness leave the target's uniforms alone: equal seeds give equal tokens.
SAME_SEED_SAME_TOKENS = ("none", "ngram", "suffix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One gate question and what its answer must satisfy."""

    request: Request
    check: Callable[[str], bool]


# --- tasks with a right answer ------------------------------------------------------------------


def needle_tasks(gate: NeedleGate, grid: Grid, count_tokens: CountTokens) -> list[Task]:
    """Haystacks of every length x depth, `per_point` of each."""
    points = [(n, d, i) for n in gate.lengths for d in gate.depths for i in range(gate.per_point)]
    tasks = []
    for length, depth, index in points:
        name = f"needle-{length}-{depth}-{index}"
        prompt, expected = needle(
            length=length,
            depth=depth,
            seed=traffic.number(grid.seed, name),
            count_tokens=count_tokens,
        )
        request = _request(grid, name, prompt, max_tokens=gate.max_tokens)
        tasks.append(Task(request=request, check=_contains(expected)))
    return tasks


def json_gate_tasks(gate: JsonGate, grid: Grid) -> list[Task]:
    """Requests for small JSON objects, with the check of required keys and types."""
    return [
        Task(
            request=_request(grid, f"json-{i}", prompt, max_tokens=gate.max_tokens),
            check=_valid(schema),
        )
        for i, (prompt, schema) in enumerate(json_tasks(seed=grid.seed, count=gate.prompts))
    ]


def _contains(expected: str) -> Callable[[str], bool]:
    return lambda text: expected.casefold() in text.casefold()


def _valid(schema: dict[str, Any]) -> Callable[[str], bool]:
    return lambda text: check_json(text, schema)


def _request(
    grid: Grid, name: str, prompt: Prompt, *, max_tokens: int, sampling: str = "greedy"
) -> Request:
    return Request(
        id=name,
        prompt=with_salt(prompt, traffic.salt(grid.seed, name)),
        params=traffic.params(
            grid,
            sampling=sampling,
            max_tokens=max_tokens,
            seed=traffic.number(grid.seed, "seed", name),
        ),
    )


def outcomes(tasks: Sequence[Task], samples: Sequence[Sample]) -> dict[str, bool]:
    """Request id -> whether the answer satisfies its check. An error does not."""
    texts = {s.id: s.text for s in samples if s.error is None}
    return {t.request.id: t.request.id in texts and t.check(texts[t.request.id]) for t in tasks}


def judge_rate(
    gate: str,
    arm: str,
    passed: Mapping[str, bool],
    *,
    baseline: Mapping[str, bool],
    bar: float,
) -> GateResult:
    """Compare a pass rate with its bar and with the baseline on the same questions."""
    right, total = sum(passed.values()), len(passed)
    low, high = stats.binomial(right, total)
    lost = sum(baseline[i] and not passed[i] for i in passed)
    gained = sum(passed[i] and not baseline[i] for i in passed)
    evidence = f"{right} of {total} right"
    status = GateStatus.PASS
    if right / total < bar:
        status = GateStatus.FAIL
        evidence += f", below the bar of {bar:.2f}"
    if stats.differ(lost, gained):
        status = GateStatus.FAIL
        evidence += ", which differs from the baseline beyond the interval"
    if baseline is not passed:
        evidence += f"; baseline {sum(baseline.values())}, {lost} lost, {gained} gained"
    return GateResult(
        arm=arm,
        gate=gate,
        status=status,
        value=right / total,
        low=low,
        high=high,
        bar=bar,
        evidence=f"{evidence}.",
    )


# --- the lossless audit -------------------------------------------------------------------------


class ForkKind(Enum):
    """What the first difference between two outputs of one prompt means."""

    IDENTICAL = "identical"
    NUMERIC = "numeric"  # a near tie of the likeliest two, decided by rounding
    SUSPECT = "suspect"  # the target was sure, and the outputs differ all the same


@dataclass(frozen=True, slots=True)
class Audit:
    """Forks of an arm against the baseline. `sampled_forks` of `sampled` runs with equal seeds."""

    greedy: int
    numeric: int
    suspect: int
    largest_margin: float | None
    sampled: int
    sampled_forks: int

    @property
    def text(self) -> str:
        """Counts as a clause."""
        same = self.greedy - self.numeric - self.suspect
        clause = f"{same} of {self.greedy} greedy outputs identical, {self.numeric} numeric forks"
        clause += f", {self.suspect} suspect"
        if self.largest_margin is not None:
            clause += f" (largest margin {self.largest_margin:.3f} nats)"
        if self.sampled:
            clause += f"; {self.sampled - self.sampled_forks} of {self.sampled} sampled identical"
        return clause


def lossless_requests(gate: LosslessGate, grid: Grid, count_tokens: CountTokens) -> list[Request]:
    """Each prompt greedy and sampled; the sampling mode stands in the id."""
    prompts = load(gate.traffic, seed=grid.seed, count=gate.prompts, count_tokens=count_tokens)
    return [
        _request(grid, f"{mode}-{p.id}", p, max_tokens=gate.max_tokens, sampling=mode)
        for mode in ("greedy", "sampled")
        for p in prompts
    ]


def asked(arm: str, requests: Sequence[Request]) -> list[Request]:
    """The requests whose answers `judge_lossless` compares for an arm: sampled ones say nothing of
    a drafter that draws by itself.
    """
    equal_seeds = arm.split(":")[0] in SAME_SEED_SAME_TOKENS
    return [r for r in requests if equal_seeds or r.params.greedy]


def first_fork(first: Sequence[int], second: Sequence[int]) -> int | None:
    """Position of the first difference (an earlier end is one); None if there is none."""
    for position, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return position
    return None if len(first) == len(second) else min(len(first), len(second))


def classify(
    request: Request, first: Sequence[int], second: Sequence[int], *, score: Score, tolerance: float
) -> tuple[ForkKind, float | None]:
    """Kind of the first fork of two greedy outputs, and how far below the target's likeliest token
    there the less likely of the two lies (the top-2 margin where one of the two just ended).

    Numeric: within `tolerance` nats. Then rounding can have decided, also between three tokens. A
    fork that cannot be scored is suspect.
    """
    position = first_fork(first, second)
    if position is None:
        return ForkKind.IDENTICAL, None
    there = [out for out in (second, first) if len(out) > position]
    margins: list[float] = []
    for out in there:
        scores = score(request, out[: position + 1])
        if scores is None or len(scores.gaps) <= position:
            return ForkKind.SUSPECT, None
        margins.append(scores.gaps[position])
        if len(there) == 1:
            margins.append(scores.margins[position])
        elif scores.argmax[position] == there[1][position]:
            break  # the other one is the likeliest: nothing to ask
    margin = max(margins)
    return (ForkKind.NUMERIC if margin <= tolerance else ForkKind.SUSPECT), margin


def audit(
    requests: Sequence[Request],
    baseline: Sequence[Sample],
    other: Sequence[Sample],
    *,
    score: Score,
    tolerance: float,
) -> Audit | None:
    """Compare two runs of the same requests. None where token ids were not reported."""
    first = {s.id: s.token_ids for s in baseline}
    second = {s.id: s.token_ids for s in other}
    kinds: list[ForkKind] = []
    margins: list[float] = []
    sampled = forks = 0
    for request in requests:
        a, b = first[request.id], second[request.id]
        if a is None or b is None:
            return None
        if request.params.greedy:
            kind, margin = classify(request, a, b, score=score, tolerance=tolerance)
            kinds.append(kind)
            margins += [] if margin is None else [margin]
        else:
            sampled += 1
            forks += a != b
    return Audit(
        greedy=len(kinds),
        numeric=kinds.count(ForkKind.NUMERIC),
        suspect=kinds.count(ForkKind.SUSPECT),
        largest_margin=max(margins, default=None),
        sampled=sampled,
        sampled_forks=forks,
    )


def judge_lossless(arm: str, found: Audit | None, *, control: Audit | None) -> GateResult:
    """Fail on suspect forks at more than the control's rate, or on sampled forks beyond its rate.

    The control is the baseline against itself at another batch width. Sampled outputs are compared
    only for drafters that use no randomness of their own.
    """
    if found is None or control is None:
        status, evidence, value = GateStatus.NOT_APPLICABLE, "No token ids were reported", None
        return GateResult(arm, "lossless", status, value, None, None, None, f"{evidence}.")
    equal_seeds = arm.split(":")[0] in SAME_SEED_SAME_TOKENS
    status, value = GateStatus.PASS, found.suspect / found.greedy
    evidence = f"{found.text}; control: {control.text}"
    if found.suspect * control.greedy > control.suspect * found.greedy:
        status = GateStatus.FAIL
        evidence = f"More suspect forks than the control: {evidence}"
    elif equal_seeds and stats.more(
        found.sampled_forks, found.sampled, control.sampled_forks, control.sampled
    ):
        status = GateStatus.FAIL
        evidence = f"Equal seeds fork more often than in the control: {evidence}"
    low, high = stats.binomial(found.suspect, found.greedy)
    bar = control.suspect / control.greedy
    return GateResult(arm, "lossless", status, value, low, high, bar, f"{evidence}.")


def lossless_baseline(arm: str, control: Audit | None) -> GateResult:
    """The baseline is what others are compared with; its line shows the control."""
    evidence = "No token ids were reported" if control is None else f"The control: {control.text}"
    status = GateStatus.NOT_APPLICABLE
    return GateResult(arm, "lossless", status, None, None, None, None, f"{evidence}.")


# --- degenerate output --------------------------------------------------------------------------


def judge_degenerate(
    arm: str, loops: Mapping[Any, bool], *, baseline: Mapping[Any, bool], bar: float
) -> GateResult:
    """Compare looping answers with the baseline's on the same prompts of the measured cells.

    Keys are (cell, prompt): repeats of a prompt are not independent, so any of them counts once.
    Fails if the rate differs beyond the interval by more than `bar`.
    """
    looping, total = sum(loops.values()), len(loops)
    reference = sum(baseline.values())
    only_arm = sum(loops[k] and not baseline[k] for k in loops)
    only_baseline = sum(baseline[k] and not loops[k] for k in loops)
    evidence = f"{looping} of {total} prompts got a looping answer; baseline {reference}"
    status = GateStatus.PASS
    moved = abs(looping - reference) / total
    if moved > bar and stats.differ(only_arm, only_baseline):
        status = GateStatus.FAIL
        evidence += ", a difference beyond the interval"
    low, high = stats.binomial(looping, total)
    rate = reference / total
    return GateResult(arm, "degenerate", status, looping / total, low, high, rate, f"{evidence}.")
