"""What a ledger with known costs must say: traps 1, 3, 23, 24 and the numbers of a row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.lab import scrutiny, stats
from slipstream.lab.analyze import analyze, decode_units, stage_ms
from slipstream.lab.backends.simulated import Simulated, SimulatedArm
from slipstream.lab.grid import Bars, Grid, from_table
from slipstream.lab.results import CellResult, GridResult, Resolution
from slipstream.lab.runner import run_grid
from slipstream.lab.samples import Sample
from slipstream.lab.verdict import verdicts
from slipstream.types import StageTimes, StepRecord, Timings

Make = Callable[..., Simulated]


def row(result: GridResult, arm: str, users: int) -> CellResult:
    (one,) = (c for c in result.cells if (c.arm, c.users) == (arm, users))
    return one


def test_every_number_of_a_row(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    result = analyze(run_grid(grid, root=tmp_path, backend=simulated()))
    none, ngram = row(result, "none", 1), row(result, "ngram:3", 1)
    assert none.baseline
    assert none.speedup is None
    assert none.efficiency is None
    assert none.ms_per_token is not None
    assert ngram.ms_per_token is not None
    assert none.ms_per_token.value == pytest.approx(10.0)
    assert ngram.speedup is not None
    assert ngram.speedup.value == pytest.approx(none.ms_per_token.value / ngram.ms_per_token.value)
    # Accepted 3, 0, 2, 1, ... of 3: after the prompt's token, 23 more come in 9 steps.
    assert ngram.tokens_per_step == pytest.approx(23 / 9)
    assert ngram.acceptance_rate == pytest.approx(15 / 27)
    assert ngram.ms_per_token.value == pytest.approx(9 * 12 / 23)
    assert ngram.efficiency == pytest.approx(ngram.speedup.value / (23 / 9))
    assert ngram.stage_ms is not None
    assert ngram.stage_ms.draft == pytest.approx(2.0)
    assert ngram.stage_ms.verify == pytest.approx(10.0)
    assert none.ttft_ms is not None
    assert none.ttft_ms.value == pytest.approx(10.0)
    assert (ngram.repeats, ngram.prompts, ngram.tokens) == (3, 3, 216)
    assert ngram.by_position[0] == pytest.approx(7 / 9)
    wide = row(result, "none", 4)
    assert wide.total_tok_s is not None
    assert wide.user_tok_s is not None
    assert wide.total_tok_s.value == pytest.approx(400.0)
    assert wide.user_tok_s.value == pytest.approx(100.0)
    assert all(c.publishable and c.label == "simulated" for c in result.cells)


def test_the_same_ledger_gives_the_same_result(grid: Grid, simulated: Make, tmp_path: Path) -> None:
    directory = run_grid(grid, root=tmp_path, backend=simulated())
    assert analyze(directory) == analyze(directory)


def crossover_grid(table: dict[str, Any]) -> Grid:
    table["cells"] = [
        {"traffic": "chat", "users": users, "prompts": 2 * users, "max_tokens": 24}
        for users in (1, 8, 16)
    ]
    return from_table(table, name="crossover")


def test_trap_1_off_at_16_users(table: dict[str, Any], simulated: Make, tmp_path: Path) -> None:
    """Draft 2 ms, verify 10 ms up to 8 users and 30 ms above, plain step 10 ms, length 3:
    3 / (12/10) = 2.5x at 8 users, 3 / (32/10) = 0.94x at 16."""
    costly = SimulatedArm(
        verify=lambda rows: 0.010 if rows <= 8 else 0.030,
        draft=0.002,
        draft_len=4,
        accepted=(2,),
    )
    backend = simulated({"ngram:3": costly})
    result = analyze(run_grid(crossover_grid(table), root=tmp_path, backend=backend))
    found = {users: stats.resolution(row(result, "ngram:3", users).speedup) for users in (1, 8, 16)}
    assert found == {1: Resolution.FASTER, 8: Resolution.FASTER, 16: Resolution.SLOWER}
    run = {v.users: v.run for v in verdicts(result)}
    assert run == {1: "ngram:3", 8: "ngram:3", 16: "none"}


def test_trap_3_do_not_speculate_on_a_dear_verify(
    table: dict[str, Any], simulated: Make, tmp_path: Path
) -> None:
    """Verify costs 2.6 plain steps, 2.0 tokens a step: slower, and the step's cost shows why."""
    moe = SimulatedArm(verify=lambda rows: 0.026, draft_len=3, accepted=(1,))
    result = analyze(
        run_grid(crossover_grid(table), root=tmp_path, backend=simulated({"ngram:3": moe}))
    )
    one = row(result, "ngram:3", 1)
    assert stats.resolution(one.speedup) is Resolution.SLOWER
    assert one.tokens_per_step == pytest.approx(2.0, rel=0.05)
    plain = row(result, "none", 1).stage_ms
    assert one.stage_ms is not None
    assert plain is not None
    assert one.stage_ms.verify / plain.verify == pytest.approx(2.6)
    assert {v.run for v in verdicts(result)} == {"none"}


def test_trap_23_unequal_cache_hits_are_not_matched(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    def cached(none: int | None, ngram: int | None) -> CellResult:
        arms = {
            name: SimulatedArm(verify=lambda rows: 0.01, cached_tokens=tokens)
            for name, tokens in (("none", none), ("ngram:3", ngram))
        }
        directory = run_grid(grid, root=tmp_path, backend=simulated(arms))
        return row(analyze(directory), "ngram:3", 1)

    assert "not matched: 0 cached prompt tokens a request against 71" in cached(71, 0).reasons[0]
    assert cached(16, 0).publishable  # within one block
    assert cached(None, 0).publishable  # absent is not zero


def test_output_lengths_must_match() -> None:
    def samples(tokens: int) -> list[Sample]:
        return [Sample(id="a", text="", finish="stop", timings=Timings(0.0, (1.0,), (tokens,)))]

    bars = Bars(length_ratio=1.25)
    assert scrutiny.matched_reasons(samples(120), samples(100), bars=bars) == []
    assert "1.30 times" in scrutiny.matched_reasons(samples(130), samples(100), bars=bars)[0]
    assert "0.70 times" in scrutiny.matched_reasons(samples(70), samples(100), bars=bars)[0]
    assert "no tokens" in scrutiny.matched_reasons(samples(0), samples(100), bars=bars)[0]


# --- trap 24: tokens, chunks and records --------------------------------------------------------


def step(index: int, accepted: int, committed: int, *, drafted: int = 4) -> StepRecord:
    times = StageTimes(draft=0.001, verify=0.01, sample=0.0, host=0.0)
    return StepRecord(index, 1, index == 0, 10, drafted, accepted, committed, 1, 0, times)


def worked_example() -> Sample:
    """engines.md: accept 4, 0, 2, then [a, EOS, c, d] all matching; the prompt's token first."""
    records = (
        step(0, 0, 1, drafted=0),
        step(1, 4, 5),
        step(2, 0, 1),
        step(3, 2, 3),
        step(4, 4, 2),
    )
    return Sample(
        id="a",
        text="",
        finish="stop",
        timings=Timings(0.0, (1.0, 1.5, 1.6, 1.7, 2.1), (1, 5, 1, 3, 2)),
        token_ids=tuple(range(12)),
        records=records,
    )


def test_trap_24_ms_per_token_is_by_token_not_by_chunk() -> None:
    sample = worked_example()
    (unit,) = decode_units({(0, 0): [sample]})
    assert unit.cost / unit.count == pytest.approx(1.1 / 11)
    assert scrutiny.adds_up(sample)
    stages = stage_ms({(0, 0): [sample]})
    assert stages is not None
    assert stages.total == pytest.approx(11.0)


def test_trap_24_records_that_do_not_add_up_keep_a_row_out() -> None:
    sample = worked_example()
    assert sample.records is not None
    past_eos = dataclasses.replace(sample.records[-1], committed=5)
    leaking = dataclasses.replace(sample, records=(*sample.records[:-1], past_eos))
    assert not scrutiny.adds_up(leaking)
    assert "do not add up" in scrutiny.record_reasons([sample, leaking])[0]
    impossible = dataclasses.replace(sample.records[1], drafted=3)
    assert not scrutiny.adds_up(
        dataclasses.replace(sample, records=(sample.records[0], impossible, *sample.records[2:]))
    )
    assert not scrutiny.adds_up(dataclasses.replace(sample, token_ids=(1,)))
    failed = dataclasses.replace(sample, error="Non-finite logits.")
    assert "1 requests ended in an error: Non-finite" in scrutiny.record_reasons([failed])[0]


def test_an_answer_in_one_chunk_has_no_pace() -> None:
    sample = Sample(id="a", text="", finish="stop", timings=Timings(0.0, (1.0,), (3,)))
    assert decode_units({(0, 0): [sample]}) == []


def test_a_drafter_of_which_nothing_is_accepted_is_reported(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    broken = SimulatedArm(verify=lambda rows: 0.01, draft_len=3, accepted=(0,))
    result = analyze(run_grid(grid, root=tmp_path, backend=simulated({"ngram:3": broken})))
    assert any("0 of 621 draft tokens were accepted" in w for w in result.warnings)


def test_backends_without_records_leave_dashes() -> None:
    bare = Sample(id="a", text="x", finish="stop", timings=Timings(0.0, (1.0, 2.0), (1, 4)))
    assert stage_ms({(0, 0): [bare]}) is None
    assert scrutiny.adds_up(bare)
