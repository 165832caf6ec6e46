"""The estimate of what is left: gates, spread limits, blocks under way, blocks that do not fit."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest

from slipstream.lab.backends.simulated import Simulated, SimulatedArm
from slipstream.lab.events import Event, Kind
from slipstream.lab.grid import Cell, Grid
from slipstream.lab.pace import Pace
from slipstream.lab.runner import run_grid
from slipstream.lab.samples import Sample
from slipstream.types import Timings


def warmup(first: float, step: float) -> Sample:
    times = tuple(first + step * i for i in range(5))
    return Sample(
        id="w", text="", finish="length", timings=Timings(0.0, times, (1,) * 5), prompt_tokens=50
    )


def test_prompts_of_others_are_not_counted_as_steps() -> None:
    """The first user of a warm-up waits between its tokens for the prompts of the rest."""
    pace = Pace(arms=2)
    pace.warmed_up(2, [warmup(0.1, 0.30), warmup(0.2, 0.05)])
    each = pace.requests(4, users=2, prompt_tokens=0, max_tokens=10)
    assert each == pytest.approx(2 * 10 * 0.05)
    assert pace.requests(4, users=2, prompt_tokens=400, max_tokens=10) > each + 400 * 0.002
    assert pace.requests(0, users=2, prompt_tokens=0, max_tokens=10) == 0


def test_spread_limits_are_shorter_on_average() -> None:
    pace = Pace(arms=2)
    pace.warmed_up(2, [warmup(0.1, 0.05)])
    cell = Cell(traffic="chat", users=2, prompts=4, max_tokens=20, spread=0.6)
    assert pace.block(cell, prompt_tokens=0) == pytest.approx(2 * 2 * 14 * 0.05)
    pace.measured(cell.slug, 3.0)
    assert pace.block(cell, prompt_tokens=0) == 3.0


@pytest.fixture
def watched(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[Event, float]]:
    """Events of a run of equal arms, each with the seconds it really took from there."""
    plain = SimulatedArm(verify=lambda rows: 0.01 + 0.001 * rows)
    backend = Simulated({"none": plain, "ngram:3": plain}, prefill=0.0002)
    monkeypatch.setattr(time, "monotonic", lambda: backend.now)
    seen: list[tuple[Event, float]] = []
    run_grid(grid, root=tmp_path, backend=backend, on_event=lambda e: seen.append((e, backend.now)))
    return [(event, backend.now - at) for event, at in seen]


def test_gates_are_in_the_estimate(watched: list[tuple[Event, float]]) -> None:
    gates = [(e.seconds_left or 0.0, truth) for e, truth in watched if e.text.startswith("gate")]
    assert len(gates) == 7  # needle, json and lossless of two arms, and the control
    assert all(0.6 < left / truth < 1.6 for left, truth in gates)


def test_the_estimate_falls_within_a_block(watched: list[tuple[Event, float]]) -> None:
    blocks = [
        (e.seconds_left or 0.0, truth)
        for e, truth in watched
        if e.kind is Kind.PROGRESS and "repeat" in e.text
    ]
    lefts = [left for left, _ in blocks[len(blocks) // 3 :]]  # every cell is measured by then
    assert lefts == sorted(lefts, reverse=True)
    assert len(set(lefts)) == len(lefts)
    assert all(0.6 < left / truth < 1.6 for left, truth in blocks)


def test_blocks_that_will_not_be_measured_take_no_time(
    grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dear cell that never fits: what is left is the cheap ones, not the whole budget."""
    plain = SimulatedArm(verify=lambda rows: 0.01)
    backend = Simulated({"none": plain, "ngram:3": plain})
    monkeypatch.setattr(time, "monotonic", lambda: backend.now)
    dear = dataclasses.replace(grid.cells[0], max_tokens=20_000)
    plan = dataclasses.replace(grid, cells=(dear, grid.cells[1]), budget_minutes=10)
    seen: list[tuple[Event, float]] = []
    run_grid(plan, root=tmp_path, backend=backend, on_event=lambda e: seen.append((e, backend.now)))
    last, at = [(e, at) for e, at in seen if e.kind is Kind.PROGRESS][-1]
    assert last.seconds_left is not None
    assert last.seconds_left < 3 * (backend.now - at) + 1
