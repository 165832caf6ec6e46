"""Loops in answers, and prose that is none."""

from __future__ import annotations

import random

import pytest

from slipstream.lab.looping import distinct_bigram_ratio, is_looping, periodic_tail, sample_loops
from slipstream.lab.samples import Sample
from slipstream.types import Timings


@pytest.mark.parametrize(
    ("tokens", "loops"),
    [
        ([1, 2] * 30, True),  # the two-token loop of tokenspeed #1305
        ([1] * 40, True),
        (list(range(60)) + [7, 8, 9] * 15, True),  # ends in a loop
        (list(range(60)) + list(range(30)) * 3, True),
        (list(range(60)) + [7, 8, 9] * 5, False),  # 15 tokens: a refrain
        (list(range(100)), False),
        ([1, 2] * 15, False),  # under 32 tokens
        ([], False),
    ],
)
def test_is_looping(tokens: list[int], loops: bool) -> None:
    assert is_looping(tokens) is loops


def test_period_is_the_shortest() -> None:
    assert periodic_tail([5, 6] * 20) == 2
    assert periodic_tail([9] * 32) == 1
    assert periodic_tail(list(range(40))) is None


def test_ratio_counts_pairs() -> None:
    assert distinct_bigram_ratio("abab") == pytest.approx(2 / 3)
    assert distinct_bigram_ratio("a") == 1.0


def test_random_text_never_loops() -> None:
    rng = random.Random(1)
    assert not any(is_looping([rng.randrange(200) for _ in range(128)]) for _ in range(50))


def test_samples_without_ids_are_judged_by_words() -> None:
    timings = Timings(0.0, (1.0,), (1,))
    loop = Sample(id="a", text="go on " * 40, finish="length", timings=timings)
    assert sample_loops(loop)
    ids = Sample(id="a", text="go on " * 40, finish="length", timings=timings, token_ids=(1, 2))
    assert not sample_loops(ids)
