"""Runs the gates of a grid on every arm and writes what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from slipstream import provenance
from slipstream.lab import gates as judge
from slipstream.lab.backends.base import Backend, Scores
from slipstream.lab.gate_specs import Gates, LosslessGate
from slipstream.lab.gates import Audit, CountTokens, Task
from slipstream.lab.grid import Grid
from slipstream.lab.ledger import Ledger, Record, complete_blocks, read_samples
from slipstream.lab.results import GateResult, GateStatus
from slipstream.lab.samples import Request, Sample

ANSWER_ROOM = 128  # salt, chat template and draft positions of a gate request
SHORT_PROMPT = 640  # longest JSON task or audit prompt, in tokens
CONTROL = "lossless-control"


def users(gates: Gates) -> int:
    """Most requests the gates keep in flight."""
    found = [g.users for g in (gates.needle, gates.json, gates.lossless) if g is not None]
    return max(*found, control_users(gates), 1)


def control_users(gates: Gates) -> int:
    """Requests in flight while the lossless gate asks the baseline again; 0 without that gate."""
    return 0 if gates.lossless is None else gates.lossless.control_users


def longest(requests: Sequence[Request]) -> int:
    """Most tokens that one of these answers may have."""
    return max((r.params.max_tokens for r in requests), default=0)


def measures(grid: Grid) -> bool:
    """Whether the lossless gate compares measured answers. Without a greedy cell there is nothing
    to compare, and it asks requests of its own.
    """
    gate = grid.gates.lossless
    return gate is not None and gate.measured and any(c.sampling == "greedy" for c in grid.cells)


def named(request: Request, slug: str) -> Request:
    """A cell's request under a name that no other cell uses."""
    return replace(request, id=_name(request.params.greedy, slug, request.id))


def _name(greedy: bool, slug: str, name: str) -> str:
    return f"{'greedy' if greedy else 'sampled'}-{slug}-{name}"


def kv_tokens(gates: Gates) -> int:
    """Positions the gates need at once."""
    most = 0
    if gates.needle is not None:
        needle = gates.needle
        most = needle.users * (max(needle.lengths) + needle.max_tokens + ANSWER_ROOM)
    for gate in (gates.json, gates.lossless):
        if gate is not None:
            width = max(gate.users, getattr(gate, "control_users", 0))
            most = max(most, width * (SHORT_PROMPT + gate.max_tokens + ANSWER_ROOM))
    return most


@dataclass(frozen=True, slots=True)
class GateTasks:
    """What the gates of a grid will ask. Made before anything runs, so that a gate that cannot be
    asked stops the grid at its start. `lossless`: what every arm's answers are compared on, asked
    here or measured; `control`: what the baseline is asked once more.
    """

    needle: tuple[Task, ...]
    json: tuple[Task, ...]
    lossless: tuple[Request, ...]
    control: tuple[Request, ...]


def prepare(grid: Grid, count_tokens: CountTokens, *, first: Sequence[Request]) -> GateTasks:
    """Tasks of the grid's gates. `first`: every cell's requests of the first repeat, `named`.

    Raises `InvalidConfig` for lengths or counts that do not exist.
    """
    needle, json_gate, gate = grid.gates.needle, grid.gates.json, grid.gates.lossless
    lossless: list[Request] = []
    control: list[Request] = []
    if gate is not None and measures(grid):
        lossless = list(first)
        for greedy in (True, False):
            control += [r for r in first if r.params.greedy is greedy][: gate.prompts]
    elif gate is not None:
        lossless = control = judge.lossless_requests(gate, grid, count_tokens)
    return GateTasks(
        tuple(judge.needle_tasks(needle, grid, count_tokens)) if needle else (),
        tuple(judge.json_gate_tasks(json_gate, grid)) if json_gate else (),
        tuple(lossless),
        tuple(control),
    )


def to_be_asked(grid: Grid, records: Sequence[Record]) -> set[str]:
    """Arms that a gate will ask something in this start."""
    names = [name for name in ("needle", "json") if getattr(grid.gates, name) is not None]
    if grid.gates.lossless is not None and not measures(grid):
        names.append("lossless")
    answered = {(r["gate"], r["arm"]) for r in records if r["kind"] == "gate-samples"}
    return {arm for arm in grid.arms for name in names if (name, arm) not in answered}


def unasked(
    grid: Grid, tasks: GateTasks, records: Sequence[Record]
) -> list[tuple[Sequence[Request], int]]:
    """What the gates still have to ask: for every arm the requests and the users that send them."""
    answered = {(r["gate"], r["arm"]) for r in records if r["kind"] == "gate-samples"}
    gates = grid.gates
    asked = (
        ("needle", gates.needle, [task.request for task in tasks.needle]),
        ("json", gates.json, [task.request for task in tasks.json]),
    )
    left: list[tuple[Sequence[Request], int]] = []
    for name, gate, requests in asked:
        if gate is not None:
            left += [(requests, gate.users) for a in grid.arms if (name, a) not in answered]
    lossless = gates.lossless
    if lossless is not None and not measures(grid):
        own = [
            (_compared(grid, arm, tasks), lossless.users)
            for arm in grid.arms
            if ("lossless", arm) not in answered
        ]
        left += own
    if lossless is not None and (CONTROL, grid.baseline) not in answered:
        left.append((tasks.control, lossless.control_users))
    return left


def _compared(grid: Grid, arm: str, tasks: GateTasks) -> list[Request]:
    """What an arm is asked for the lossless gate: the baseline everything that others are."""
    if arm == grid.baseline:
        return list(tasks.lossless)
    return judge.asked(arm, tasks.lossless)


def run_gates(
    grid: Grid,
    tasks: GateTasks,
    *,
    backend: Backend,
    book: Ledger,
    on_event: Callable[[str], None],
) -> None:
    """Run the gates that have no result in this run yet, the baseline first.

    `degenerate` needs no requests of its own: the analysis judges the measured answers. Nor does
    `lossless` where it compares measured ones (`audit_measured`).
    """
    arms = _baseline_first(grid)
    runner = _Gates(grid, backend, book, on_event)
    gates = grid.gates
    if gates.needle is not None:
        runner.rate("needle", arms, tasks.needle, bar=gates.needle.bar, users=gates.needle.users)
    if gates.json is not None:
        runner.rate("json", arms, tasks.json, bar=gates.json.bar, users=gates.json.users)
    if gates.lossless is not None and not measures(grid):
        users = gates.lossless.users

        def answers(arm: str) -> list[Sample]:
            requests = _compared(grid, arm, tasks)
            return runner.samples("lossless", arm, requests, users=users)

        runner.lossless(gates.lossless, arms, tasks, answers)


def audit_measured(
    grid: Grid,
    tasks: GateTasks,
    *,
    backend: Backend,
    book: Ledger,
    on_event: Callable[[str], None],
) -> None:
    """The lossless gate on the first repeat's answers, once every cell has them."""
    gate = grid.gates.lossless
    blocks = complete_blocks(book.records, grid.arms)
    if gate is None or not measures(grid) or any((c.slug, 0) not in blocks for c in grid.cells):
        return

    def answers(arm: str) -> list[Sample]:
        on_event(f"gate lossless: {arm}")
        return [
            replace(sample, id=_name(cell.sampling == "greedy", cell.slug, sample.id))
            for cell in grid.cells
            for sample in read_samples(book.directory, blocks[cell.slug, 0][arm])
        ]

    runner = _Gates(grid, backend, book, on_event)
    runner.lossless(gate, _baseline_first(grid), tasks, answers)


def _baseline_first(grid: Grid) -> list[str]:
    return [grid.baseline, *(arm for arm in grid.arms if arm != grid.baseline)]


class _Gates:
    def __init__(
        self, grid: Grid, backend: Backend, book: Ledger, on_event: Callable[[str], None]
    ) -> None:
        self.grid, self.backend, self.book, self.on_event = grid, backend, book, on_event

    def rate(
        self, gate: str, arms: list[str], tasks: Sequence[Task], *, bar: float, users: int
    ) -> None:
        """Tasks with a right answer; every arm against the bar and against the baseline."""
        if all(self._known(gate, arm) for arm in arms):
            return
        requests = [task.request for task in tasks]
        baseline: Mapping[str, bool] | None = None
        for arm in arms:
            passed = judge.outcomes(tasks, self.samples(gate, arm, requests, users=users))
            baseline = passed if baseline is None else baseline
            self._result(judge.judge_rate(gate, arm, passed, baseline=baseline, bar=bar))

    def lossless(
        self,
        gate: LosslessGate,
        arms: list[str],
        tasks: GateTasks,
        answers: Callable[[str], list[Sample]],
    ) -> None:
        """Every arm's tokens against the baseline's, and the baseline's against itself."""
        if all(self._known("lossless", arm) for arm in arms):
            return
        reference, score = answers(arms[0]), _remembered(self.backend.score)
        again = self.samples(CONTROL, arms[0], tasks.control, users=gate.control_users)

        def compare(requests: Sequence[Request], other: list[Sample]) -> Audit | None:
            return judge.audit(requests, reference, other, score=score, tolerance=gate.tolerance)

        control = compare(tasks.control, again)
        self._result(judge.lossless_baseline(arms[0], control))
        for arm in arms[1:]:
            found = compare(judge.asked(arm, tasks.lossless), answers(arm))
            self._result(judge.judge_lossless(arm, found, control=control))

    def samples(
        self, gate: str, arm: str, requests: Sequence[Request], *, users: int
    ) -> list[Sample]:
        """An arm's answers: from this run's ledger if they are there, else measured and written."""
        line = next(
            (
                r
                for r in self.book.records
                if r["kind"] == "gate-samples" and (r["gate"], r["arm"]) == (gate, arm)
            ),
            None,
        )
        if line is not None:
            return read_samples(self.book.directory, line)
        self.on_event(f"gate {gate}: {arm}")
        self.backend.reset(arm)
        samples = self.backend.run(arm, requests, users=users)
        self.backend.reset(arm)
        name = f"gate-{gate}.{self.grid.arms.index(arm)}"
        written = self.book.write_samples(name, samples)
        self.book.append({"kind": "gate-samples", "gate": gate, "arm": arm, **written})
        return samples

    def _known(self, gate: str, arm: str) -> bool:
        return any(
            r["kind"] == "gate" and (r["gate"], r["arm"]) == (gate, arm) for r in self.book.records
        )

    def _result(self, result: GateResult) -> None:
        if not self._known(result.gate, result.arm):
            row = {**asdict(result), "status": result.status.value}
            self.book.append({"kind": "gate", "time": provenance.now(), **row})


def _remembered(score: judge.Score) -> judge.Score:
    """Arms fork at the same near ties: each is scored once."""
    known: dict[tuple[str, tuple[int, ...]], Scores | None] = {}

    def ask(request: Request, token_ids: Sequence[int]) -> Scores | None:
        key = request.id, tuple(token_ids)
        if key not in known:
            known[key] = score(request, token_ids)
        return known[key]

    return ask


def from_record(record: Record) -> GateResult:
    """A gate's line in the ledger as the value the report takes."""
    names = ("arm", "gate", "value", "low", "high", "bar", "evidence")
    values = {name: record[name] for name in names}
    return GateResult(status=GateStatus(record["status"]), **values)
