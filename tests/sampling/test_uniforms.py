"""Keyed uniforms: uniform, independent across keys, and a function of the key alone."""

import numpy as np
import pytest
from scipy import stats

from slipstream.sampling.uniforms import Purpose, Uniforms

UNIFORMS = Uniforms()


def _grid(seeds: int, positions: int, purpose: Purpose) -> np.ndarray:
    s, p = np.meshgrid(np.arange(seeds), np.arange(positions), indexing="ij")
    return UNIFORMS(s.ravel(), p.ravel(), purpose).reshape(seeds, positions)


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_on_the_unit_interval(purpose: Purpose) -> None:
    values = _grid(200, 500, purpose).ravel()
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-6
    # The low bits too: what is left after a few binary digits is again uniform.
    assert stats.kstest((values * 2**20) % 1, "uniform").pvalue > 1e-6


@pytest.mark.parametrize(("axis", "lag"), [(0, 1), (0, 2), (1, 1), (1, 7)])
def test_neighbors_are_independent(axis: int, lag: int) -> None:
    values = _grid(300, 300, Purpose.NEXT)
    first = np.take(values, range(300 - lag), axis).ravel()
    second = np.take(values, range(lag, 300), axis).ravel()
    table, _, _ = np.histogram2d(first, second, bins=10, range=[[0, 1], [0, 1]])
    assert stats.chisquare(table.ravel()).pvalue > 1e-6


def test_purposes_are_independent() -> None:
    drawn = [_grid(200, 200, purpose).ravel() for purpose in Purpose]
    for i in range(3):
        for j in range(i):
            table, _, _ = np.histogram2d(drawn[i], drawn[j], bins=10, range=[[0, 1], [0, 1]])
            assert stats.chisquare(table.ravel()).pvalue > 1e-6


def test_no_two_keys_share_a_value() -> None:
    values = np.concatenate([_grid(300, 300, purpose).ravel() for purpose in Purpose])
    assert len(np.unique(values)) == len(values)


def test_a_value_does_not_depend_on_the_call_it_came_in() -> None:
    seeds, positions = np.array([5, 2**63 - 1, 0]), np.array([0, 10**9, 3])
    together = UNIFORMS(seeds, positions, Purpose.ACCEPT)
    alone = [UNIFORMS(seeds[i : i + 1], positions[i : i + 1], Purpose.ACCEPT)[0] for i in range(3)]
    assert together.tolist() == alone


def test_the_numbers_are_part_of_the_interface() -> None:
    """A seed in a saved run must give the same tokens in the next release."""
    drawn = UNIFORMS(np.array([0, 1, 42]), np.array([0, 1, 1000]), Purpose.NEXT)
    assert drawn.tolist() == pytest.approx(GOLDEN, abs=0)


GOLDEN = [0.5082848046397189, 0.6006657339540804, 0.7117617799064645]
