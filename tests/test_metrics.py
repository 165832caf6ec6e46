"""The definitions, on the worked example of DESIGN section 4 and its edges."""

import pytest

from slipstream import metrics
from slipstream.types import StageTimes, StepRecord, Timings

TIMES = StageTimes(draft=0.001, verify=0.01, sample=0.002, host=0.003)


def record(step, drafted, accepted, committed, *, prefill=False):
    return StepRecord(step, 0, prefill, 10, drafted, accepted, committed, 1, 0, TIMES)


WORKED = [record(0, 4, 4, 5), record(1, 4, 0, 1), record(2, 4, 2, 3), record(3, 4, 4, 2)]


def test_worked_example_tokens_per_step_is_2_75_and_acceptance_length_3_5():
    found = metrics.acceptance([record(9, 0, 0, 1, prefill=True), *WORKED])
    assert found.committed == 11
    assert found.tokens_per_step == pytest.approx(2.75)
    assert found.acceptance_length == pytest.approx(3.5)
    assert found.acceptance_rate == pytest.approx(10 / 16)
    assert found.by_position == (3 / 4, 3 / 3, 2 / 3, 2 / 2)


def test_a_step_without_a_draft_counts_as_a_step_and_not_as_a_draft():
    found = metrics.acceptance([*WORKED, record(4, 0, 0, 1)])
    assert found.tokens_per_step == pytest.approx(12 / 5)
    assert found.acceptance_length == pytest.approx(3.5)


def test_nothing_measured_is_none_not_zero():
    found = metrics.acceptance([])
    assert found.tokens_per_step is found.acceptance_length is found.acceptance_rate is None
    assert metrics.tpot(Timings(0.0, (1.0,), (1,))) is None
    assert metrics.ttft(Timings(0.0, (), ())) is None
    assert metrics.tok_per_s(5, 0.0) is None


def test_tpot_leaves_out_all_tokens_of_the_first_chunk():
    timings = Timings(arrived=1.0, chunk_times=(2.0, 3.0, 5.0), chunk_tokens=(3, 2, 4))
    assert metrics.tpot(timings) == pytest.approx(3.0 / 6)
    assert metrics.ttft(timings) == pytest.approx(1.0)


def test_speedup_is_a_ratio_of_totals():
    assert metrics.speedup([10.0, 1.0], [5.0, 1.0]) == pytest.approx(11 / 6)
    assert metrics.efficiency(1.5, 2.0) == pytest.approx(0.75)
    with pytest.raises(ValueError, match="2 baseline"):
        metrics.speedup([1.0, 2.0], [1.0])


def test_stage_totals_count_a_step_shared_by_rows_once():
    total = metrics.stage_totals([record(0, 0, 0, 1), record(0, 0, 0, 1), record(1, 0, 0, 1)])
    assert total.verify == pytest.approx(0.02)
    assert total.total == pytest.approx(0.032)
