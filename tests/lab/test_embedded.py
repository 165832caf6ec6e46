"""The embedded backend on a tiny random model: closed loop, matched arms, the whole pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch

from slipstream.engine.engine import StepOutput
from slipstream.errors import InvalidConfig, ModelError
from slipstream.lab import grid, traffic
from slipstream.lab.analyze import analyze
from slipstream.lab.backends import open_backend
from slipstream.lab.backends.embedded import Embedded
from slipstream.lab.prompts import Prompt
from slipstream.lab.results import GateStatus
from slipstream.lab.runner import run_grid
from slipstream.lab.samples import Request, window
from slipstream.lab.scrutiny import adds_up
from slipstream.types import FinishReason, SamplingParams

ARMS = ("none", "ngram:3")


@pytest.fixture(scope="module")
def backend() -> Iterator[Embedded]:
    torch.set_num_threads(1)
    opened = Embedded("tiny", dtype="float32", threads=1)
    opened.open(ARMS, users=4, kv_tokens=4096)
    yield opened
    opened.close()


def requests(count: int, *, temperature: float = 0.0) -> list[Request]:
    return [
        Request(
            id=f"p{i}",
            prompt=Prompt(f"p{i}", ({"role": "user", "content": f"{i}: abcabcabc"},)),
            params=SamplingParams(temperature=temperature, max_tokens=12, seed=i),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("users", [1, 3])
def test_arms_give_the_same_tokens(backend: Embedded, users: int, temperature: float) -> None:
    runs = [backend.run(arm, requests(5, temperature=temperature), users=users) for arm in ARMS]
    assert [s.id for s in runs[0]] == [f"p{i}" for i in range(5)]
    assert [s.token_ids for s in runs[0]] == [s.token_ids for s in runs[1]]
    assert all(adds_up(s) for run in runs for s in run)


def test_closed_loop_holds_its_users(backend: Embedded) -> None:
    samples = backend.run("none", requests(5), users=2)
    rows = {r.rows for s in samples for r in s.records or ()}
    assert max(rows) == 2
    arrivals = [s.timings.arrived for s in samples]
    assert arrivals == sorted(arrivals)
    ends = sorted(s.timings.chunk_times[-1] for s in samples)
    assert arrivals[2] >= ends[0]  # the third was sent when the first ended


def test_reset_drops_reusable_prefixes(backend: Embedded) -> None:
    """Traps 23 and 25: a repeated prompt is prefilled again."""
    long = [
        Request(
            id="long",
            prompt=Prompt("long", ({"role": "user", "content": "word " * 60},)),
            params=SamplingParams(max_tokens=2),
        )
    ]

    def prefilled() -> int:
        (sample,) = backend.run("none", long, users=1)
        assert sample.records is not None
        return sample.records[0].prefill_tokens

    backend.reset("none")
    cold = prefilled()
    assert prefilled() < cold
    backend.reset("none")
    assert prefilled() == cold


def test_scores_line_up_with_greedy_output(backend: Embedded) -> None:
    (request,) = requests(1)
    (sample,) = backend.run("none", [request], users=1)
    assert sample.token_ids is not None
    scores = backend.score(request, sample.token_ids)
    assert scores.argmax == sample.token_ids
    assert len(scores.margins) == len(sample.token_ids)
    assert min(scores.margins) >= 0


def test_the_tiny_grid_runs_and_is_lossless(tmp_path: Path) -> None:
    plan = grid.load("spec_tiny")
    result = analyze(run_grid(plan, root=tmp_path, quick=True))
    assert {c.arm for c in result.cells} == set(plan.arms)
    lossless = [g for g in result.gates if g.gate == "lossless" and g.arm != "none"]
    assert lossless
    assert all(g.status is GateStatus.PASS for g in lossless)
    assert not any(c.publishable for c in result.cells)
    assert any("random weights" in reason for reason in result.cells[0].reasons)
    assert result.meta["arms"]["ngram:3"]["drafter"].startswith("ngram:3,")


def test_bad_targets_and_arms_are_named() -> None:
    plan = grid.from_table(
        {"target": "/no/such", "arms": ["none"], "cells": [{"traffic": "chat"}]}, name="x"
    )
    with pytest.raises(ModelError, match="/no/such"):
        open_backend(plan)
    with pytest.raises(InvalidConfig, match="dtype is 'int3'"):
        Embedded("tiny", dtype="int3", threads=1)
    with pytest.raises(InvalidConfig, match="1 to 64 users, not 65"):
        Embedded("tiny", dtype="float32", threads=1).open(ARMS, users=65, kv_tokens=64)
    with pytest.raises(InvalidConfig, match="eagle9"):
        Embedded("tiny", dtype="float32", threads=1).open(["eagle9"], users=1, kv_tokens=64)


def test_warmup_fits_every_model(backend: Embedded) -> None:
    plan = grid.load("spec_tiny")
    samples = backend.run("none", traffic.warmup_requests(plan, users=2), users=2)
    assert all(s.error is None for s in samples)


def test_arms_that_take_turns_answer_as_they_do_alone(backend: Embedded) -> None:
    work = requests(5)
    alone = {arm: backend.run(arm, work, users=2) for arm in ARMS}
    for arm in ARMS:
        backend.reset(arm)
    together = backend.run_together(ARMS, work, users=2)
    for arm in ARMS:
        assert [s.id for s in together[arm]] == [r.id for r in work]
        assert [s.token_ids for s in together[arm]] == [s.token_ids for s in alone[arm]]


def test_an_arms_clock_counts_its_own_work_only(backend: Embedded) -> None:
    start = time.perf_counter()
    together = backend.run_together(ARMS, requests(5), users=2)
    wall = time.perf_counter() - start
    own = [window(samples) for samples in together.values()]
    assert sum(own) <= wall
    stepped = [
        sum(t.total for t in {r.step: r.times for s in rows for r in s.records or ()}.values())
        for rows in together.values()
    ]
    assert all(clock >= work for clock, work in zip(own, stepped, strict=True))


# --- taking turns, on a clock that tells the truth ------------------------------------------------


class Machine:
    """Time that passes only while an engine steps, and who stepped when."""

    def __init__(self) -> None:
        self.now = 100.0
        self.turns: list[str] = []

    def perf_counter(self) -> float:
        return self.now


class ScriptedEngine:
    """`cost` seconds and one token a row each step; raises at step `breaks`."""

    def __init__(self, machine: Machine, name: str, *, cost: float, breaks: int = -1) -> None:
        self.machine, self.name, self.cost, self.breaks = machine, name, cost, breaks
        self.left: dict[int, int] = {}
        self.steps = self.sent = 0
        self.cancelled: list[int] = []

    def submit(self, prompt: list[int], params: SamplingParams) -> int:
        self.sent += 1
        self.left[self.sent] = params.max_tokens
        return self.sent

    def step(self) -> list[StepOutput]:
        self.steps += 1
        self.machine.turns.append(self.name)
        self.machine.now += self.cost
        if self.steps == self.breaks:
            raise RuntimeError("the machine is on fire")
        return [self._advance(request_id) for request_id in list(self.left)]

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)
        del self.left[request_id]

    def _advance(self, request_id: int) -> StepOutput:
        self.left[request_id] -= 1
        if self.left[request_id]:
            return StepOutput(request_id, (7,), "x", None)
        del self.left[request_id]
        done: Any = SimpleNamespace(
            text="x",
            finish_reason=FinishReason.LENGTH,
            cached_tokens=0,
            token_ids=[7],
            records=(),
            error=None,
        )
        return StepOutput(request_id, (7,), "x", done)


def scripted(
    monkeypatch: pytest.MonkeyPatch, machine: Machine, *engines: ScriptedEngine
) -> Embedded:
    monkeypatch.setattr("slipstream.lab.backends.embedded.time", machine)
    made = Embedded.__new__(Embedded)
    made._turn = 0.0
    made._arms = {
        engine.name: cast(Any, SimpleNamespace(engine=engine, encode=lambda prompt: [1, 2, 3]))
        for engine in engines
    }
    return made


def limited(*limits: int) -> list[Request]:
    return [
        Request(
            id=f"p{i}",
            prompt=Prompt(f"p{i}", None, text="x"),
            params=SamplingParams(max_tokens=limit),
        )
        for i, limit in enumerate(limits)
    ]


def test_a_clock_stands_still_while_other_arms_work(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    slow = ScriptedEngine(machine, "slow", cost=0.04)
    fast = ScriptedEngine(machine, "fast", cost=0.01)
    made = scripted(monkeypatch, machine, slow, fast)
    found = made.run_together(["fast", "slow"], limited(4, 4), users=1)
    for engine in (slow, fast):
        samples = found[engine.name]
        assert window(samples) == pytest.approx(8 * engine.cost)
        assert [s.timings.arrived for s in samples] == pytest.approx([0, 4 * engine.cost])
        gaps = [b - a for s in samples for a, b in pairwise(s.timings.chunk_times)]
        assert gaps == pytest.approx([engine.cost] * 6)
    assert machine.now - 100 == pytest.approx(8 * 0.05)


class AheadEngine(ScriptedEngine):
    """On an accelerator: a step is given to the device before the one before it is waited for."""

    queue: ClassVar[list[AheadEngine]] = []
    done = 0

    def step(self) -> list[StepOutput]:
        while self.done + self.queue.count(self) < 2:
            self.queue.append(self)
        while not self.done:
            self.work()
        self.done -= 1
        self.machine.turns.append(self.name)
        return [self._advance(request_id) for request_id in list(self.left)]

    def settle(self) -> None:
        while self.queue:
            self.work()

    def work(self) -> None:
        first = self.queue.pop(0)
        self.machine.now += first.cost
        first.done += 1


@pytest.mark.parametrize(("turn", "honest"), [(0.25, True), (0.0, False)])
def test_on_an_accelerator_turns_end_with_the_device_idle(
    monkeypatch: pytest.MonkeyPatch, turn: float, honest: bool
) -> None:
    """Step by step an arm would wait for what another one left to the device."""
    machine = Machine()
    AheadEngine.queue.clear()
    slow, fast = (AheadEngine(machine, n, cost=c) for n, c in (("slow", 0.04), ("fast", 0.01)))
    made = scripted(monkeypatch, machine, slow, fast)
    made._turn = turn
    found = made.run_together(["fast", "slow"], limited(100), users=1)
    own = {name: samples[0].timings.chunk_times[-1] for name, samples in found.items()}
    exact = all(own[e.name] == pytest.approx(100 * e.cost, rel=0.05) for e in (slow, fast))
    assert exact is honest


def test_the_arm_furthest_behind_goes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    slow = ScriptedEngine(machine, "slow", cost=0.04)
    fast = ScriptedEngine(machine, "fast", cost=0.01)
    made = scripted(monkeypatch, machine, slow, fast)
    made.run_together(["slow", "fast"], limited(8), users=1)
    assert machine.turns[0] == "slow"  # the order given decides a tie
    clocks = {"slow": 0.0, "fast": 0.0}
    for turn in machine.turns[: machine.turns.index("fast", 8)]:
        clocks[turn] += 0.04 if turn == "slow" else 0.01
        assert abs(clocks["slow"] - clocks["fast"]) <= 0.04 + 1e-9


def test_samples_come_in_the_order_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    made = scripted(monkeypatch, machine, ScriptedEngine(machine, "one", cost=0.01))
    samples = made.run("one", limited(6, 1, 2, 1), users=2)
    assert [s.id for s in samples] == ["p0", "p1", "p2", "p3"]
    ends = [s.timings.chunk_times[-1] for s in samples]
    assert ends[0] == max(ends)  # the first sent ended last


def test_an_exception_cancels_what_every_arm_has_running(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    sound = ScriptedEngine(machine, "sound", cost=0.01)
    broken = ScriptedEngine(machine, "broken", cost=0.01, breaks=3)
    made = scripted(monkeypatch, machine, sound, broken)
    with pytest.raises(RuntimeError, match="on fire"):
        made.run_together(["sound", "broken"], limited(1, 9, 9, 9), users=2)
    for engine in (sound, broken):
        assert not engine.left
        assert engine.cancelled == [2, 3]  # not the one that ended, nor the one not sent yet
        assert engine.sent == 3


def test_engines_are_free_again_after_an_exception(
    backend: Embedded, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = requests(3)
    before = backend.run("none", work, users=2)
    engine = backend._arms["ngram:3"].engine
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            backend.run_together(["none", "ngram:3"], work, users=2)
    assert not any(backend._arms[arm].engine.has_work for arm in ARMS)
    for arm in ARMS:
        backend.reset(arm)
        after = backend.run(arm, work, users=2)
        assert [s.token_ids for s in after] == [s.token_ids for s in before]
