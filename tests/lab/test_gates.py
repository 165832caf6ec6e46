"""Gates: what passes, what fails, what an audit calls a fork, and that nothing is inherited."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.lab import gate_runner, gates, ledger
from slipstream.lab.analyze import analyze
from slipstream.lab.backends.base import Scores
from slipstream.lab.backends.simulated import Simulated, SimulatedArm, pseudo_answer
from slipstream.lab.gate_specs import NeedleGate
from slipstream.lab.gates import Audit, ForkKind
from slipstream.lab.grid import Grid, from_table
from slipstream.lab.prompts import Prompt, json_tasks
from slipstream.lab.results import GateResult, GateStatus
from slipstream.lab.runner import run_grid
from slipstream.lab.samples import Request
from slipstream.types import SamplingParams

Make = Callable[..., Simulated]
Words = tuple[str, ...]
PLAIN = SimulatedArm(verify=lambda rows: 0.01)
REQUEST = Request(id="a", prompt=Prompt("a", None, text="x"), params=SamplingParams())


def arm(alter: Callable[[Request, Words, int], Words]) -> dict[str, SimulatedArm]:
    """The drafting arm, with changed answers."""
    return {"ngram:3": SimulatedArm(verify=lambda rows: 0.01, alter=alter)}


def result(found: Sequence[GateResult], gate: str, name: str = "ngram:3") -> GateResult:
    (one,) = (g for g in found if (g.gate, g.arm) == (gate, name))
    return one


def run(grid: Grid, backend: Simulated, root: Path) -> tuple[GateResult, ...]:
    return analyze(run_grid(grid, root=root, backend=backend)).gates


# --- rates --------------------------------------------------------------------------------------


def outcome(right: int, total: int) -> dict[str, bool]:
    return {str(i): i < right for i in range(total)}


@pytest.mark.parametrize(
    ("right", "base", "total", "bar", "status", "says"),
    [
        (12, 12, 12, 0.67, GateStatus.PASS, "12 of 12 right"),
        (2, 2, 3, 0.67, GateStatus.FAIL, "below the bar of 0.67"),  # the article's 2/3
        (3, 3, 3, 0.67, GateStatus.PASS, "3 of 3"),
        (9, 10, 12, 0.67, GateStatus.PASS, "1 lost, 0 gained"),
        (14, 20, 20, 0.67, GateStatus.FAIL, "differs from the baseline beyond the interval"),
        (20, 14, 20, 0.67, GateStatus.FAIL, "differs from the baseline"),  # better is broken too
        (0, 0, 5, 0.0, GateStatus.PASS, "0 of 5"),
    ],
)
def test_judge_rate(
    right: int, base: int, total: int, bar: float, status: GateStatus, says: str
) -> None:
    found = gates.judge_rate(
        "needle", "x", outcome(right, total), baseline=outcome(base, total), bar=bar
    )
    assert found.status is status
    assert says in found.evidence
    assert found.value == right / total
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high


def test_needles_cover_lengths_and_depths(grid: Grid) -> None:
    gate = NeedleGate(lengths=(400, 600), depths=(0.1, 0.9), per_point=2)
    tasks = gates.needle_tasks(gate, grid, lambda text: len(text.split()))
    assert len({t.request.id for t in tasks}) == 8
    assert len({t.request.prompt.content() for t in tasks}) == 8
    assert not any(t.check("I do not know.") for t in tasks)
    assert all(t.request.params.greedy for t in tasks)


def test_arms_are_judged_on_their_own_answers(
    table: dict[str, Any], simulated: Make, tmp_path: Path
) -> None:
    """An arm that no longer finds needles or writes JSON fails; the baseline's pass is no help."""
    table["gates"] |= {"json": {"prompts": 8, "bar": 0.5}}
    table["gates"]["needle"] = {"lengths": [400], "depths": [0.2, 0.8], "per_point": 4}
    grid = from_table(table, name="sim")
    backend = simulated(arm(lambda request, words, users: ("nothing",)), answer=knows(grid))
    found = run(grid, backend, tmp_path)
    for gate in ("needle", "json"):
        assert result(found, gate, "none").status is GateStatus.PASS
        assert result(found, gate, "none").value == 1.0
        assert result(found, gate).status is GateStatus.FAIL
        assert result(found, gate).value == 0.0


def knows(grid: Grid) -> Callable[[Request], Words]:
    """A model that answers every gate task, by reading the task's own check."""
    assert grid.gates.needle is not None
    assert grid.gates.json is not None
    tasks = [
        *gates.needle_tasks(grid.gates.needle, grid, lambda text: len(text.split())),
        *gates.json_gate_tasks(grid.gates.json, grid),
    ]
    checks = {t.request.id: t.check for t in tasks}
    fillers: dict[str, Any] = {"string": "x", "integer": 1, "number": 1, "boolean": True}
    fillers |= {"array": ["x"], "object": {}}

    def answer(request: Request) -> Words:
        check = checks.get(request.id)
        if check is None:
            return pseudo_answer(request)
        if request.id.startswith("needle"):
            words = request.prompt.content().split()
            options = [*words, *(w.strip(".,;:!?\"'()") for w in words)]
        else:
            index = int(request.id.split("-")[1])
            schema = json_tasks(seed=grid.seed, count=index + 1)[index][1]
            kinds = {k: v["type"] for k, v in schema["properties"].items()}
            options = [json.dumps({k: fillers[kind] for k, kind in kinds.items()})]
        return (next(option for option in options if option and check(option)),)

    return answer


# --- the lossless audit -------------------------------------------------------------------------


def scores(margin: float, best: int) -> Callable[[Request, Sequence[int]], Scores]:
    """Every token but the best lies `margin` below it."""
    return lambda request, ids: Scores(
        (margin,) * len(ids),
        (best,) * len(ids),
        tuple(0.0 if token == best else margin for token in ids),
    )


@pytest.mark.parametrize(
    ("first", "second", "margin", "best", "kind"),
    [
        ([1, 2, 3], [1, 2, 3], 9.0, 0, ForkKind.IDENTICAL),
        ([1, 2, 3], [1, 7, 3], 0.1, 2, ForkKind.NUMERIC),
        ([1, 2, 3], [1, 7, 3], 0.1, 7, ForkKind.NUMERIC),
        ([1, 2, 3], [1, 7, 3], 0.25, 7, ForkKind.NUMERIC),
        ([1, 2, 3], [1, 7, 3], 0.26, 7, ForkKind.SUSPECT),
        ([1, 2, 3], [1, 7, 3], 0.1, 5, ForkKind.NUMERIC),  # a near tie of three
        ([1, 2, 3], [1, 7, 3], 0.3, 5, ForkKind.SUSPECT),  # the target wanted neither
        ([1, 2], [1, 2, 3], 0.1, 3, ForkKind.NUMERIC),  # one ended, in a near tie
        ([1, 2], [1, 2, 3], 4.0, 3, ForkKind.SUSPECT),  # one leaked past its end
    ],
)
def test_classify(
    first: list[int], second: list[int], margin: float, best: int, kind: ForkKind
) -> None:
    found, _ = gates.classify(REQUEST, first, second, score=scores(margin, best), tolerance=0.25)
    assert found is kind


@pytest.mark.parametrize(
    ("first", "second", "best", "kind"),
    [(2, 7, 2, ForkKind.SUSPECT), (7, 2, 2, ForkKind.SUSPECT), (2, 5, 9, ForkKind.NUMERIC)],
)
def test_the_second_best_being_near_excuses_no_third(
    first: int, second: int, best: int, kind: ForkKind
) -> None:
    """Tokens 2, 5 and 9 are near ties; 7 was never likely."""

    def score(request: Request, ids: Sequence[int]) -> Scores:
        gaps = tuple(4.0 if token == 7 else 0.0 if token == best else 0.1 for token in ids)
        return Scores((0.1,) * len(ids), (best,) * len(ids), gaps)

    found, margin = gates.classify(REQUEST, [first], [second], score=score, tolerance=0.25)
    assert found is kind
    assert margin == (4.0 if kind is ForkKind.SUSPECT else 0.1)


def test_what_cannot_be_scored_is_suspect() -> None:
    found = gates.classify(REQUEST, [1], [2], score=lambda r, ids: None, tolerance=9.0)
    assert found == (ForkKind.SUSPECT, None)


def audit(suspect: int, forks: int, *, numeric: int = 0) -> Audit:
    return Audit(8, numeric, suspect, None, 8, forks)


@pytest.mark.parametrize(
    ("name", "found", "control", "status"),
    [
        ("ngram:3", audit(0, 0), audit(0, 0), GateStatus.PASS),
        ("ngram:3", audit(0, 2, numeric=5), audit(0, 1), GateStatus.PASS),
        ("ngram:3", audit(1, 0), audit(0, 0), GateStatus.FAIL),
        ("ngram:3", audit(1, 0), audit(1, 0), GateStatus.PASS),  # no more than the control
        ("ngram:3", Audit(32, 0, 2, None, 0, 0), audit(1, 0), GateStatus.PASS),  # a smaller share
        ("ngram:3", Audit(4, 0, 1, None, 0, 0), audit(1, 0), GateStatus.FAIL),
        ("ngram:3", audit(0, 7), audit(0, 0), GateStatus.FAIL),
        ("draft_model:x:4", audit(0, 8), audit(0, 0), GateStatus.PASS),  # has its own uniforms
        ("ngram:3", None, audit(0, 0), GateStatus.NOT_APPLICABLE),
    ],
)
def test_judge_lossless(name: str, found: Audit | None, control: Audit, status: GateStatus) -> None:
    assert gates.judge_lossless(name, found, control=control).status is status


def flip_last(request: Request, words: Words, users: int) -> Words:
    return (*words[:-1], "changed") if len(words) > 1 else words


def test_a_lossy_arm_fails_and_is_kept_out(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    directory = run_grid(grid, root=tmp_path, backend=simulated(arm(flip_last)))
    found = analyze(directory)
    assert result(found.gates, "lossless").status is GateStatus.FAIL
    kept_out = [c for c in found.cells if c.arm == "ngram:3"]
    assert not any(c.publishable for c in kept_out)
    assert all("gate lossless failed" in c.reasons[0] for c in kept_out)
    assert all(c.speedup is not None for c in kept_out)  # the measurement stays
    assert all(c.publishable for c in found.cells if c.baseline)


def test_near_ties_that_the_control_has_too_are_no_fault(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    """Both the arm and the baseline at another width flip the last word; its margin is tiny."""

    def by_width(request: Request, words: Words, users: int) -> Words:
        return flip_last(request, words, users) if users == 2 else words

    backend = simulated(
        {**arm(flip_last), "none": SimulatedArm(verify=lambda rows: 0.01, alter=by_width)},
        margin=lambda position: 0.05,
    )
    found = run(grid, backend, tmp_path)
    lossless = result(found, "lossless")
    assert lossless.status is GateStatus.PASS
    assert "6 numeric forks, 0 suspect" in lossless.evidence
    control = result(found, "lossless", "none")
    assert control.status is GateStatus.NOT_APPLICABLE
    assert "6 numeric forks" in control.evidence


# --- the audit of measured answers --------------------------------------------------------------


@pytest.fixture
def measured(table: dict[str, Any]) -> Grid:
    """The gate takes its answers from the cells."""
    table["gates"]["lossless"] |= {"measured": True, "prompts": 2}
    return from_table(table, name="sim")


def lossless_runs(backend: Simulated) -> list[tuple[str, int, tuple[str, ...]]]:
    return [run for run in backend.runs if run[2][0].startswith(("greedy", "sampled"))]


def test_measured_answers_are_audited_and_only_the_control_is_asked(
    measured: Grid, simulated: Make, tmp_path: Path
) -> None:
    backend = simulated()
    found = run(measured, backend, tmp_path)
    assert result(found, "lossless").status is GateStatus.PASS
    assert "8 of 8 greedy outputs identical" in result(found, "lossless").evidence
    assert "3 of 3 sampled identical" in result(found, "lossless").evidence
    ((name, users, ids),) = lossless_runs(backend)
    assert (name, users) == ("none", 2)
    assert [i.rsplit("-", 2)[0] for i in ids] == ["greedy-code-x4-greedy"] * 2 + [
        "sampled-chat-x1-sampled"
    ] * 2


def test_a_lossy_arm_is_found_in_what_was_measured(
    measured: Grid, simulated: Make, tmp_path: Path
) -> None:
    def lossy(request: Request, words: Words, users: int) -> Words:
        return flip_last(request, words, users) if request.id.startswith("code") else words

    backend = simulated(arm(lossy))
    assert result(run(measured, backend, tmp_path), "lossless").status is GateStatus.FAIL


def test_an_unfinished_first_repeat_is_not_judged_yet(
    measured: Grid, simulated: Make, tmp_path: Path
) -> None:
    class Stopped(Simulated):
        def run(self, arm: str, requests: Sequence[Request], *, users: int) -> Any:
            if requests[0].id.startswith("code"):
                raise KeyboardInterrupt
            return super().run(arm, requests, users=users)

    with pytest.raises(KeyboardInterrupt):
        run_grid(measured, root=tmp_path, backend=Stopped(simulated().arms))
    (directory,) = tmp_path.iterdir()
    assert result(analyze(directory).gates, "lossless").status is GateStatus.MISSING
    assert result(run(measured, simulated(), tmp_path), "lossless").status is GateStatus.PASS
    lines = [r for r in ledger.read(directory) if r["kind"] == "gate" and r["gate"] == "lossless"]
    assert [r["arm"] for r in lines] == ["none", "ngram:3"]


def test_without_greedy_cells_the_gate_asks_for_itself(
    table: dict[str, Any], simulated: Make, tmp_path: Path
) -> None:
    table["gates"]["lossless"] |= {"measured": True}
    table["cells"] = table["cells"][:1]
    backend = simulated()
    found = run(from_table(table, name="sim"), backend, tmp_path)
    assert result(found, "lossless").status is GateStatus.PASS
    assert "6 of 6 greedy" in result(found, "lossless").evidence
    assert len(lossless_runs(backend)) == 3


def test_arms_that_draw_by_themselves_are_asked_greedy_answers_only(
    table: dict[str, Any], simulated: Make, tmp_path: Path
) -> None:
    table["arms"].append("mtp:2")
    drawing = {"mtp:2": SimulatedArm(verify=lambda rows: 0.01)}
    backend = simulated(drawing)
    found = run(from_table(table, name="sim"), backend, tmp_path)
    assert "sampled" not in result(found, "lossless", "mtp:2").evidence.split("control")[0]
    asked = {name: ids for name, users, ids in lossless_runs(backend) if users == 4}
    assert all(i.startswith("greedy") for i in asked["mtp:2"])
    assert sum(i.startswith("sampled") for i in asked["ngram:3"]) == 6


# --- degenerate output --------------------------------------------------------------------------


def test_an_arm_that_loops_where_the_baseline_does_not_fails(
    table: dict[str, Any], simulated: Make, tmp_path: Path
) -> None:
    table["cells"][0]["max_tokens"] = table["cells"][1]["max_tokens"] = 40
    grid = from_table(table, name="sim")
    looping = arm(lambda request, words, users: ("a", "b") * (len(words) // 2))
    found = analyze(run_grid(grid, root=tmp_path, backend=simulated(looping)))
    gate = result(found.gates, "degenerate")
    assert gate.status is GateStatus.FAIL
    assert gate.value == 1.0
    assert result(found.gates, "degenerate", "none").status is GateStatus.PASS
    assert {c.looping for c in found.cells if c.arm == "ngram:3"} == {9, 24}


def test_the_same_loops_in_both_arms_pass() -> None:
    loops = {i: i < 4 for i in range(10)}
    found = gates.judge_degenerate("x", loops, baseline=loops, bar=0.0)
    assert found.status is GateStatus.PASS
    assert found.value == 0.4


# --- missing ------------------------------------------------------------------------------------


def test_a_gate_that_is_not_in_the_grid_keeps_every_row_out(
    table: dict[str, Any], simulated: Make, tmp_path: Path
) -> None:
    del table["gates"]["json"]
    found = analyze(run_grid(from_table(table, name="sim"), root=tmp_path, backend=simulated()))
    assert result(found.gates, "json").status is GateStatus.MISSING
    assert not any(c.publishable for c in found.cells)
    assert found.cells[0].reasons == ("gate json is missing: The gate is not part of this grid.",)


def test_no_gate_writes_missing_and_results_read_back(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    directory = run_grid(grid, root=tmp_path, backend=simulated())
    lines = [r for r in ledger.read(directory) if r["kind"] == "gate"]
    assert len(lines) == 3 * len(grid.arms)
    found = [gate_runner.from_record(r) for r in lines]
    assert all(g.status is not GateStatus.MISSING for g in found)
    assert {(g.gate, g.arm) for g in found} == {
        (gate, name) for gate in ("needle", "json", "lossless") for name in grid.arms
    }


def test_gates_of_one_run_are_unknown_to_another(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    run_grid(grid, root=tmp_path, backend=simulated())
    again = simulated()
    run_grid(grid, root=tmp_path, backend=again)
    assert any(r[2][0].startswith("needle") for r in again.runs)


def test_room_for_gates() -> None:
    plan = from_table(
        {
            "target": "t",
            "arms": ["none"],
            "cells": [{"traffic": "chat"}],
            "gates": {"needle": {"lengths": [800], "depths": [0.5], "users": 4}},
        },
        name="x",
    )
    assert gate_runner.users(plan.gates) == 4
    assert gate_runner.kv_tokens(plan.gates) >= 4 * 800
    assert math.isclose(plan.gates.needle.bar, 0.67) if plan.gates.needle else False
