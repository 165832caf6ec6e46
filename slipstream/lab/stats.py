"""Intervals: a paired bootstrap over prompts and repeats, ratios of totals, exact binomials.

Machines that run grids are noisy and repeats are few, so every interval is the wider of two: the
percentile bootstrap, and a Student interval around the bootstrap's standard error. Percentile
intervals of a handful of values are too narrow, because resampling cannot leave the values it has
(Hesterberg 2015, "What teachers should know about the bootstrap", section 5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

from slipstream.lab.results import Interval, Resolution

LEVEL = 0.95
RESAMPLES = 4000
CLUSTER_FROM = 6  # prompts; fewer cannot stand for a population of prompts
MIN_UNITS = 3  # fewer values than this have no interval

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Unit:
    """Totals of one prompt (or wave) in one repeat: seconds or another cost, and tokens or another
    count. `prompt` and `repeat` say what it shares with others.
    """

    prompt: int
    repeat: int
    cost: float
    count: float


Statistic = Callable[[Floats], Floats]
"""Weighted totals [resamples, columns] -> value [resamples]."""


def mean_cost(units: Sequence[Unit], *, seed: int, scale: float = 1.0) -> Interval | None:
    """Total cost / total count, times `scale`, with its interval. None without any count."""
    return _interval(units, _columns(units), lambda t: scale * t[:, 0] / t[:, 1], seed=seed)


def mean_rate(units: Sequence[Unit], *, seed: int, scale: float = 1.0) -> Interval | None:
    """Total count / total cost, times `scale`, with its interval."""
    return _interval(units, _columns(units), lambda t: scale * t[:, 1] / t[:, 0], seed=seed)


def speedup(baseline: Sequence[Unit], arm: Sequence[Unit], *, seed: int) -> Interval | None:
    """Baseline's cost per count / the arm's, over units that line up.

    A ratio of totals; a resample draws pairs, so what hits both arms alike drops out.
    Raises `ValueError` where the units are not the same prompts and repeats.
    """
    if [(u.prompt, u.repeat) for u in baseline] != [(u.prompt, u.repeat) for u in arm]:
        raise ValueError("baseline and arm were not measured on the same prompts and repeats")
    both = np.concatenate([_columns(baseline), _columns(arm)], axis=1)
    return _interval(arm, both, lambda t: (t[:, 0] / t[:, 1]) / (t[:, 2] / t[:, 3]), seed=seed)


def median(units: Sequence[Unit], *, seed: int, scale: float = 1.0) -> Interval | None:
    """Median of cost / count, with its interval."""
    if not units:
        return None
    values = scale * np.array([u.cost / u.count for u in units])
    middle = float(np.median(values))
    if len(units) < MIN_UNITS:
        return Interval(middle)
    weights = _weights(units, seed=seed)
    order = np.argsort(values)
    share = np.cumsum(weights[:, order], axis=1) / weights.sum(axis=1, keepdims=True)
    return _bounds(middle, values[order][(share >= 0.5).argmax(axis=1)], _freedom(units))


def resolution(interval: Interval | None, *, bar: float = 1.0) -> Resolution:
    """Faster if the whole interval lies above `bar`, slower if below 1.0, else not resolved."""
    if interval is None or interval.low is None or interval.high is None:
        return Resolution.NOT_RESOLVED
    if interval.low > max(bar, 1.0):
        return Resolution.FASTER
    return Resolution.SLOWER if interval.high < 1.0 else Resolution.NOT_RESOLVED


def _columns(units: Sequence[Unit]) -> Floats:
    return np.array([(u.cost, u.count) for u in units], dtype=np.float64).reshape(-1, 2)


def _interval(
    units: Sequence[Unit], columns: Floats, statistic: Statistic, *, seed: int
) -> Interval | None:
    totals = columns.sum(axis=0, keepdims=True)
    if not units or not bool((totals > 0).all()):
        return None
    value = float(statistic(totals)[0])
    if len(units) < MIN_UNITS:
        return Interval(value)
    drawn = _weights(units, seed=seed) @ columns
    drawn = drawn[(drawn > 0).all(axis=1)]
    return _bounds(value, statistic(drawn), _freedom(units))


def _weights(units: Sequence[Unit], *, seed: int) -> Floats:
    """How often each resample holds each unit, [RESAMPLES, units].

    With enough prompts to stand for a population: prompts first, then repeats within a prompt.
    With fewer: the units themselves, and the interval speaks for these prompts only.
    """
    rng = np.random.default_rng(seed)
    prompts = sorted({u.prompt for u in units})
    if len(prompts) < CLUSTER_FROM:
        n = len(units)
        return rng.multinomial(n, np.full(n, 1 / n), size=RESAMPLES).astype(np.float64)
    times = rng.multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), size=RESAMPLES)
    weights = np.zeros((RESAMPLES, len(units)))
    for column, prompt in enumerate(prompts):
        members = [i for i, u in enumerate(units) if u.prompt == prompt]
        drawn = times[:, column] * len(members)
        weights[:, members] = rng.multinomial(drawn, np.full(len(members), 1 / len(members)))
    return weights


def _freedom(units: Sequence[Unit]) -> int:
    prompts = len({u.prompt for u in units})
    return (prompts if prompts >= CLUSTER_FROM else len(units)) - 1


def _bounds(value: float, drawn: Floats, freedom: int) -> Interval:
    """The wider of the percentile interval and a Student interval on the log scale."""
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    n = freedom + 1
    # A bootstrap's standard error is that of a mean with n, not n - 1, in the denominator.
    error = float(np.std(np.log(drawn))) * math.sqrt(n / freedom)
    reach = math.exp(float(distributions.t.ppf(1 - tail, freedom)) * error)
    return Interval(value, min(float(low), value / reach), max(float(high), value * reach))


# --- shares -------------------------------------------------------------------------------------


def binomial(passed: int, total: int) -> tuple[float, float]:
    """Exact 95 % interval of a share (Clopper and Pearson 1934)."""
    tail = (1 - LEVEL) / 2
    low = distributions.beta.ppf(tail, passed, total - passed + 1) if passed else 0.0
    high = distributions.beta.ppf(1 - tail, passed + 1, total - passed) if passed < total else 1.0
    return float(low), float(high)


def differ(only_first: int, only_second: int) -> bool:
    """Exact McNemar test on paired outcomes: True where the discordant pairs lean one way beyond
    the 95 % level.
    """
    discordant = only_first + only_second
    if not discordant:
        return False
    return bool(distributions.binomtest(only_first, discordant).pvalue < 1 - LEVEL)


def more(first: int, first_total: int, second: int, second_total: int) -> bool:
    """Fisher's exact test, one-sided: is the first share larger beyond the 95 % level?"""
    table = np.array([[first, first_total - first], [second, second_total - second]])
    return bool(distributions.fisher_exact(table, alternative="greater").pvalue < 1 - LEVEL)
