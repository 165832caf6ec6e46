"""Runs the gates of a grid on every arm and writes what they found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from slipstream import provenance
from slipstream.lab import gates as judge
from slipstream.lab.backends.base import Backend
from slipstream.lab.gate_specs import Gates, LosslessGate
from slipstream.lab.gates import Audit, CountTokens, Task
from slipstream.lab.grid import Grid
from slipstream.lab.ledger import Ledger, Record, read_samples
from slipstream.lab.results import GateResult, GateStatus
from slipstream.lab.samples import Request, Sample

ANSWER_ROOM = 128  # salt, chat template and draft positions of a gate request
SHORT_PROMPT = 640  # longest JSON task or audit prompt, in tokens
CONTROL = "lossless-control"


def users(gates: Gates) -> int:
    """Most requests the gates keep in flight."""
    found = [g.users for g in (gates.needle, gates.json, gates.lossless) if g is not None]
    if gates.lossless is not None:
        found.append(gates.lossless.control_users)
    return max(found, default=1)


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
    asked stops the grid at its start.
    """

    needle: tuple[Task, ...]
    json: tuple[Task, ...]
    lossless: tuple[Request, ...]


def prepare(grid: Grid, count_tokens: CountTokens) -> GateTasks:
    """Tasks of the grid's gates. Raises `InvalidConfig` for lengths or counts that do not exist."""
    needle, json_gate, lossless = grid.gates.needle, grid.gates.json, grid.gates.lossless
    return GateTasks(
        tuple(judge.needle_tasks(needle, grid, count_tokens)) if needle else (),
        tuple(judge.json_gate_tasks(json_gate, grid)) if json_gate else (),
        tuple(judge.lossless_requests(lossless, grid, count_tokens)) if lossless else (),
    )


def unasked(
    grid: Grid, tasks: GateTasks, records: Sequence[Record]
) -> list[tuple[Sequence[Request], int]]:
    """What the gates still have to ask: for every arm the requests and the users that send them."""
    answered = {(r["gate"], r["arm"]) for r in records if r["kind"] == "gate-samples"}
    gates = grid.gates
    asked = (
        ("needle", gates.needle, [task.request for task in tasks.needle]),
        ("json", gates.json, [task.request for task in tasks.json]),
        ("lossless", gates.lossless, list(tasks.lossless)),
    )
    left: list[tuple[Sequence[Request], int]] = []
    for name, gate, requests in asked:
        if gate is not None:
            left += [(requests, gate.users) for a in grid.arms if (name, a) not in answered]
    if gates.lossless is not None and (CONTROL, grid.baseline) not in answered:
        left.append((tasks.lossless, gates.lossless.control_users))
    return left


def run_gates(
    grid: Grid,
    tasks: GateTasks,
    *,
    backend: Backend,
    book: Ledger,
    on_event: Callable[[str], None],
) -> None:
    """Run the gates that have no result in this run yet, the baseline first.

    `degenerate` needs no requests of its own: the analysis judges the measured answers.
    """
    arms = [grid.baseline, *(arm for arm in grid.arms if arm != grid.baseline)]
    runner = _Gates(grid, backend, book, on_event)
    gates = grid.gates
    if gates.needle is not None:
        runner.rate("needle", arms, tasks.needle, bar=gates.needle.bar, users=gates.needle.users)
    if gates.json is not None:
        runner.rate("json", arms, tasks.json, bar=gates.json.bar, users=gates.json.users)
    if gates.lossless is not None:
        runner.lossless(gates.lossless, arms, tasks.lossless)


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
            passed = judge.outcomes(tasks, self._samples(gate, arm, requests, users=users))
            baseline = passed if baseline is None else baseline
            self._result(judge.judge_rate(gate, arm, passed, baseline=baseline, bar=bar))

    def lossless(self, gate: LosslessGate, arms: list[str], requests: Sequence[Request]) -> None:
        """Every arm's tokens against the baseline's, and the baseline's against itself."""
        if all(self._known("lossless", arm) for arm in arms):
            return
        reference = self._samples("lossless", arms[0], requests, users=gate.users)
        again = self._samples(CONTROL, arms[0], requests, users=gate.control_users)

        def compare(other: list[Sample]) -> Audit | None:
            return judge.audit(
                requests,
                reference,
                other,
                score=self.backend.score,
                tolerance=gate.tolerance,
            )

        control = compare(again)
        self._result(judge.lossless_baseline(arms[0], control))
        for arm in arms[1:]:
            found = compare(self._samples("lossless", arm, requests, users=gate.users))
            self._result(judge.judge_lossless(arm, found, control=control))

    def _samples(
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


def from_record(record: Record) -> GateResult:
    """A gate's line in the ledger as the value the report takes."""
    names = ("arm", "gate", "value", "low", "high", "bar", "evidence")
    values = {name: record[name] for name in names}
    return GateResult(status=GateStatus(record["status"]), **values)
