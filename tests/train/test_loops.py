"""Where an answer that goes round in circles is cut."""

import random

import pytest

from slipstream.train.loops import without_loop


@pytest.mark.parametrize("period", [1, 2, 7, 11, 30, 64])
def test_a_loop_ends_after_three_rounds_and_32_tokens(period):
    head = [1000, 1001, 1002, 1003]
    loop = [*head, *(list(range(period)) * 200)]
    assert without_loop(loop) == loop[: 4 + max(32, 3 * period)]


def test_what_does_not_loop_is_left():
    rng = random.Random(0)
    said = [rng.randrange(500) for _ in range(90)]
    assert without_loop(said) == said
    assert without_loop(said + said) == said + said  # a copy
    assert without_loop([5] * 31) == [5] * 31
    assert without_loop([]) == []
    assert without_loop([7]) == [7]


def test_the_first_loop_counts():
    inner, outer = [1, 2] * 40, list(range(100, 110)) * 9
    assert without_loop(inner + outer) == [1, 2] * 16
    assert without_loop([9, 9, 9, *outer, *inner]) == [9, 9, 9, *outer[:32]]
