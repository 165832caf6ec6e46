"""A grid from start to finish on the simulated backend: order, resuming, budget, interruption."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import InvalidConfig, LedgerError
from slipstream.lab import ledger
from slipstream.lab.analyze import analyze
from slipstream.lab.backends.simulated import Simulated, SimulatedArm
from slipstream.lab.events import Event, Kind
from slipstream.lab.gate_specs import Gates
from slipstream.lab.grid import Grid
from slipstream.lab.runner import run_grid
from slipstream.lab.samples import Request, Sample

Make = Callable[..., Simulated]


def measured_runs(backend: Simulated) -> list[tuple[str, int, tuple[str, ...]]]:
    """Runs of the backend that were neither warm-ups nor gates."""
    words = ("warmup", "needle", "json", "greedy", "sampled")
    return [run for run in backend.runs if not run[2][0].startswith(words)]


def test_arms_take_turns_on_the_same_prompts(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    backend = simulated()
    run_grid(grid, root=tmp_path, backend=backend)
    runs = measured_runs(backend)
    assert len(runs) == grid.repeats * (3 + 2) * 2
    for first, second in zip(runs[::2], runs[1::2], strict=True):
        assert {first[0], second[0]} == {"none", "ngram:3"}
        assert first[1:] == second[1:]
    leading = [run[0] for run in runs[::2]]
    assert abs(leading.count("none") - leading.count("ngram:3")) <= len(grid.cells)


def test_caches_are_reset_before_every_run(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    backend = simulated()
    run_grid(grid, root=tmp_path, backend=backend)
    assert len(backend.resets) >= len(backend.runs)


def test_matched_requests_share_salt_and_seed(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    directory = run_grid(grid, root=tmp_path, backend=simulated())
    lines = [r for r in ledger.read(directory) if r["kind"] == "cell"]
    blocks = ledger.complete_blocks(lines, grid.arms)
    for arms in blocks.values():
        none, ngram = (ledger.read_samples(directory, arms[arm]) for arm in grid.arms)
        assert [(s.id, s.seed, s.token_ids) for s in none] == [
            (s.id, s.seed, s.token_ids) for s in ngram
        ]
    seeds = [s.seed for line in lines for s in ledger.read_samples(directory, line)]
    assert len(set(seeds)) == len(seeds) / len(grid.arms)


class Killed(Simulated):
    """Interrupted at its n-th run."""

    def __init__(self, inner: Simulated, at: int) -> None:
        super().__init__(inner.arms)
        self.at = at

    def run(self, arm: str, requests: Sequence[Request], *, users: int) -> list[Sample]:
        if len(self.runs) == self.at:
            raise KeyboardInterrupt
        return super().run(arm, requests, users=users)


@pytest.mark.parametrize("at", [0, 3, 6, 9, 11, 14, 20, 38])
def test_an_interrupted_run_resumes_at_the_next_block(
    grid: Grid, simulated: Make, tmp_path: Path, at: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, root=tmp_path, backend=Killed(simulated(), at))
    (first,) = tmp_path.iterdir()
    done = ledger.complete_blocks(ledger.read(first), grid.arms)
    backend = simulated()
    assert run_grid(grid, root=tmp_path, backend=backend) == first
    blocks = grid.repeats * len(grid.cells)
    assert len(ledger.complete_blocks(ledger.read(first), grid.arms)) == blocks
    per_block = {"chat-x1-sampled": 3 * 2, "code-x4-greedy": 2 * 2}
    already = sum(per_block[slug] for slug, _ in done)
    assert len(measured_runs(backend)) == grid.repeats * 10 - already
    result = analyze(first)
    assert all(c.repeats == grid.repeats for c in result.cells)
    again = analyze(run_grid(grid, root=tmp_path / "whole", backend=simulated()))
    assert [c.tokens_per_step for c in result.cells] == [c.tokens_per_step for c in again.cells]


def test_gates_are_not_run_twice_in_one_run(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, root=tmp_path, backend=Killed(simulated(), 20))
    backend = simulated()
    run_grid(grid, root=tmp_path, backend=backend)
    gates = [r for r in backend.runs if r[2][0].startswith(("needle", "json", "greedy"))]
    assert gates == []


def test_gates_warm_the_arms_they_ask(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    """A start that has no gates left to ask warms every arm instead."""

    def warmed(backend: Simulated) -> list[tuple[str, int]]:
        return [run[:2] for run in backend.runs if run[2][0].startswith("warmup")]

    first = Killed(simulated(), 20)
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, root=tmp_path, backend=first)
    assert warmed(first) == [("none", 1), ("none", 4)]
    second = simulated()
    run_grid(grid, root=tmp_path, backend=second)
    assert warmed(second) == [(arm, users) for users in (1, 4) for arm in grid.arms]
    bare, third = dataclasses.replace(grid, gates=Gates()), simulated()
    run_grid(bare, root=tmp_path, backend=third)
    assert warmed(third) == warmed(second)


def test_finished_and_fresh_runs_are_new(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    first = run_grid(grid, root=tmp_path, backend=simulated())
    second = run_grid(grid, root=tmp_path, backend=simulated())
    assert first != second
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, root=tmp_path, backend=Killed(simulated(), 20))
    third = run_grid(grid, root=tmp_path, backend=simulated(), resume=False)
    assert len({first, second, third}) == 3
    assert len(list(tmp_path.iterdir())) == 4


def test_another_model_or_prompt_starts_a_run_of_its_own(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    for fingerprint in ("a", "b"):
        backend = Killed(simulated(), 20)
        backend._info = dataclasses.replace(backend.info, fingerprint=fingerprint)
        with pytest.raises(KeyboardInterrupt):
            run_grid(grid, root=tmp_path, backend=backend)
    assert len(list(tmp_path.iterdir())) == 2


class Renamed(Simulated):
    """The same arms with other resolved settings, as after a changed default."""

    def open(self, arms: Sequence[str], *, users: int, kv_tokens: int) -> dict[str, dict[str, Any]]:
        settings = super().open(arms, users=users, kv_tokens=kv_tokens)
        return {arm: {**s, "drafter": f"{arm},min=2"} for arm, s in settings.items()}


def test_changed_settings_do_not_mix_with_old_ones(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, root=tmp_path, backend=Killed(simulated(), 20))
    with pytest.raises(LedgerError, match=r"other settings of ngram:3, none"):
        run_grid(grid, root=tmp_path, backend=Renamed(simulated().arms))


def test_the_budget_stops_between_blocks_with_equal_repeats(
    grid: Grid, simulated: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, events = simulated(), list[Event]()
    monkeypatch.setattr(time, "monotonic", lambda: backend.now)  # the virtual clock
    run_grid(grid, root=tmp_path / "whole", backend=backend)
    limit = 0.85 * backend.now
    backend.now = 0.0
    limited = dataclasses.replace(grid, budget_minutes=limit / 60)
    directory = run_grid(limited, root=tmp_path / "cut", backend=backend, on_event=events.append)
    records = ledger.read(directory)
    done = ledger.complete_blocks(records, grid.arms)
    assert 0 < len(done) < grid.repeats * len(grid.cells)
    assert records[-1]["kind"] == "stop"
    assert backend.now <= limit
    assert any(e.kind is Kind.WARNING and "budget" in e.text for e in events)
    result = analyze(directory)
    assert any("start the same grid again" in w for w in result.warnings)
    short = [c for c in result.cells if c.repeats < 3]
    assert short
    assert all("of 3 repeats" in " ".join(c.reasons) for c in short)
    more = simulated()
    monkeypatch.setattr(time, "monotonic", lambda: more.now)
    for _ in range(9):
        more.now = 0.0
        assert run_grid(limited, root=tmp_path / "cut", backend=more) == directory
        if ledger.read(directory)[-1]["kind"] == "finish":
            break
    assert len(ledger.complete_blocks(ledger.read(directory), grid.arms)) == 6


def test_a_full_disk_in_the_middle_can_be_resumed(
    grid: Grid, simulated: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    original = ledger.Ledger._write_whole

    def fills_up(self: ledger.Ledger, line: bytes) -> None:
        nonlocal written
        written += 1
        if written > 16:
            raise OSError(28, "No space left on device")
        original(self, line)

    monkeypatch.setattr(ledger.Ledger, "_write_whole", fills_up)
    with pytest.raises(LedgerError, match="No space left on device"):
        run_grid(grid, root=tmp_path, backend=simulated())
    monkeypatch.undo()
    (directory,) = tmp_path.iterdir()
    assert len(ledger.read(directory)) == 16
    assert run_grid(grid, root=tmp_path, backend=simulated()) == directory
    assert all(c.repeats == 3 for c in analyze(directory).cells)


def test_own_prompts_replace_the_traffic(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"Question {i}?"}]} for i in range(3)]
    file.write_text("\n".join(map(json.dumps, rows)))
    events: list[Event] = []
    directory = run_grid(
        grid,
        root=tmp_path / "runs",
        backend=simulated(),
        prompts_file=file,
        on_event=events.append,
    )
    result = analyze(directory)
    assert {c.traffic for c in result.cells} == {"own"}
    assert {c.users for c in result.cells} == {1}
    assert "own x 4 greedy needs 4 prompts" in events[0].text


def test_quick_runs_are_small_and_never_published(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    backend = simulated()
    result = analyze(run_grid(grid, root=tmp_path, backend=backend, quick=True))
    assert len(measured_runs(backend)) == 4
    assert not any(c.publishable for c in result.cells)


def test_prompts_that_do_not_fit_stop_the_grid_before_it_starts(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    backend = simulated()
    backend._info = dataclasses.replace(backend.info, context=200)
    with pytest.raises(InvalidConfig, match=r"Cell chat x 1 sampled needs \d+ prompt tokens"):
        run_grid(grid, root=tmp_path, backend=backend)
    assert not list(tmp_path.iterdir())


def test_an_unknown_arm_is_named(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    unknown = dataclasses.replace(grid, arms=("none", "eagle9"))
    with pytest.raises(InvalidConfig, match="'eagle9'"):
        run_grid(unknown, root=tmp_path, backend=simulated())


def test_events_count_to_the_end(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    events: list[Event] = []
    run_grid(grid, root=tmp_path, backend=simulated(), on_event=events.append)
    done = [e.done for e in events]
    assert done == sorted(done)
    assert events[-1].kind is Kind.DONE
    assert events[-1].done == events[-1].total == 30
    assert any(e.kind is Kind.PLAN and "6 blocks to measure, about" in e.text for e in events)


def test_the_estimate_is_close(grid: Grid, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt cost and step cost are learned from the warm-up: within 2x of what is measured."""
    plain = SimulatedArm(verify=lambda rows: 0.01 + 0.001 * rows)
    backend = Simulated({"none": plain, "ngram:3": plain}, prefill=0.0002)
    monkeypatch.setattr(time, "monotonic", lambda: backend.now)
    plans: list[tuple[float, float]] = []

    def watch(event: Event) -> None:
        if event.kind in (Kind.PLAN, Kind.DONE):
            plans.append((backend.now, event.seconds_left or 0.0))

    run_grid(grid, root=tmp_path, backend=backend, on_event=watch)
    (start, estimate), (end, _) = plans
    assert 0.5 < estimate / (end - start) < 2
