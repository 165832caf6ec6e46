"""Intervals: coverage, pairing, honesty with few values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.lab import stats
from slipstream.lab.results import Interval, Resolution
from slipstream.lab.stats import Unit


def units(costs: np.ndarray, *, prompts: int, count: float = 100.0) -> list[Unit]:
    return [Unit(i % prompts, i // prompts, float(c), count) for i, c in enumerate(costs)]


def test_speedup_is_a_ratio_of_totals() -> None:
    base = [Unit(0, 0, 10.0, 100), Unit(1, 0, 1.0, 100), Unit(2, 0, 1.0, 100)]
    arm = [Unit(0, 0, 5.0, 100), Unit(1, 0, 2.0, 100), Unit(2, 0, 1.0, 50)]
    found = stats.speedup(base, arm, seed=0)
    assert found is not None
    assert found.value == pytest.approx((12 / 300) / (8 / 250))


def test_unpaired_units_are_refused() -> None:
    with pytest.raises(ValueError, match="same prompts and repeats"):
        stats.speedup([Unit(0, 0, 1, 1)], [Unit(1, 0, 1, 1)], seed=0)


def test_what_hits_both_arms_drops_out() -> None:
    """A machine that is now 1x, now 4x as slow hides nothing from pairs measured side by side."""
    rng = np.random.default_rng(0)
    slow = rng.uniform(1, 4, 24)
    base = units(slow, prompts=8)
    arm = units(slow / 1.1 * rng.normal(1, 0.01, 24), prompts=8)
    found = stats.speedup(base, arm, seed=0)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert 1.07 < found.low < 1.1 < found.high < 1.13
    alone = stats.mean_cost(base, seed=0)
    assert alone is not None
    assert alone.low is not None
    assert alone.high is not None
    assert alone.high / alone.low > 1.2


@pytest.mark.parametrize(("n", "prompts"), [(3, 1), (6, 2), (9, 3), (24, 8)])
def test_no_difference_is_rarely_called_one(n: int, prompts: int) -> None:
    """False verdicts under equal arms and 30 % noise: 5 % by design, at most 9 % in 150 trials."""
    wrong = 0
    for trial in range(150):
        rng = np.random.default_rng(trial)
        base = units(rng.lognormal(0, 0.3, n), prompts=prompts)
        arm = units(rng.lognormal(0, 0.3, n), prompts=prompts)
        verdict = stats.resolution(stats.speedup(base, arm, seed=trial))
        wrong += verdict is not Resolution.NOT_RESOLVED
    assert wrong <= 13


def test_a_percentile_interval_alone_would_not_do() -> None:
    """The failing control: three values' own range misses far more often than 5 %."""
    wrong = 0
    for trial in range(200):
        rng = np.random.default_rng(trial)
        ratios = rng.lognormal(0, 0.3, 3) / rng.lognormal(0, 0.3, 3)
        drawn = ratios[rng.integers(0, 3, (2000, 3))].mean(axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        wrong += not low <= 1 <= high
    assert wrong > 20


def test_few_values_have_no_interval() -> None:
    found = stats.mean_cost([Unit(0, 0, 1, 2), Unit(0, 1, 1, 2)], seed=0)
    assert found == Interval(0.5)
    assert stats.resolution(found) is Resolution.NOT_RESOLVED
    assert stats.mean_cost([], seed=0) is None
    assert stats.median([], seed=0) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=12), st.integers(1, 6))
def test_intervals_hold_their_value_and_repeat(costs: list[float], prompts: int) -> None:
    rows = units(np.array(costs), prompts=min(prompts, len(costs)))
    for function in (stats.mean_cost, stats.mean_rate, stats.median):
        found = function(rows, seed=3)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high
        assert found == function(rows, seed=3)


def test_resolution_needs_the_whole_interval() -> None:
    assert stats.resolution(Interval(1.2, 1.1, 1.3)) is Resolution.FASTER
    assert stats.resolution(Interval(1.2, 1.1, 1.3), bar=1.15) is Resolution.NOT_RESOLVED
    assert stats.resolution(Interval(0.8, 0.7, 0.9)) is Resolution.SLOWER
    assert stats.resolution(Interval(1.2, 0.9, 1.5)) is Resolution.NOT_RESOLVED
    assert stats.resolution(None) is Resolution.NOT_RESOLVED


def test_exact_shares() -> None:
    low, high = stats.binomial(2, 3)  # the article's needle check: two of three
    assert low == pytest.approx(0.0943, abs=1e-3)
    assert high == pytest.approx(0.9916, abs=1e-3)
    assert stats.binomial(0, 8)[0] == 0
    assert stats.binomial(8, 8)[1] == 1
    assert not stats.differ(0, 0)
    assert not stats.differ(5, 0)  # p = 0.0625
    assert stats.differ(6, 0)  # p = 0.031
    assert stats.differ(0, 6)
    assert stats.more(6, 8, 0, 8)
    assert not stats.more(2, 8, 1, 8)
