"""The embedded backend on a tiny random model: closed loop, matched arms, the whole pipeline."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
from slipstream.types import SamplingParams

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
