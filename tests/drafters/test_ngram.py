"""Prompt lookup: the right match, an index that never rescans, requests kept apart."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.ngram import NgramDrafter, NgramIndex
from slipstream.drafters.none import NoneDrafter
from slipstream.types import OneHot
from tests.helpers import StubRow, lens, verdict

UNLIMITED = 32.0


def index(tokens, *, low=2, high=4) -> NgramIndex:
    return NgramIndex(tokens, min_match=low, max_match=high)


def drafter(draft_len=8, *, factor=UNLIMITED) -> NgramDrafter:
    return NgramDrafter(draft_len, min_match=2, max_match=4, factor=factor, name="ngram")


def rescan(tokens, *, low, high):
    """Where the longest, most recent earlier occurrence ends, found the slow way."""
    for n in range(high, low - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if n < len(tokens) and tokens[end - n : end] == tokens[len(tokens) - n :]:
                return end
    return 0


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=5),
    st.integers(1, 3),
    st.integers(0, 3),
)
def test_the_index_finds_what_a_rescan_finds(prompt, steps, low, extra):
    found = index(prompt, low=low, high=low + extra)
    tokens = list(prompt)
    assert found.match() == rescan(tokens, low=low, high=low + extra)
    for step in steps:
        found.extend(step)
        tokens += step
        assert found.match() == rescan(tokens, low=low, high=low + extra)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2], []),  # the ending must not match itself
        ([1, 2, 3, 4, 5], []),
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9, 1]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # the most recent of equal matches
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [3, 9, 8, 1]),  # longer beats more recent
        ([5, 5, 5], [5, 5, 5, 5]),  # a loop goes on, however short its period
        ([1, 2, 1, 2, 1], [2, 1, 2, 1]),
    ],
)
def test_proposals(tokens, expected):
    assert index(tokens).propose(4, UNLIMITED) == expected


def test_tokens_beyond_sixteen_bits_and_zeros_are_told_apart():
    big = 200_000
    assert index([0, big, 5, 0, big]).propose(1, UNLIMITED) == [5]
    assert index([0, 0, 5, big, 0]).propose(1, UNLIMITED) == []
    assert index([big, 256, 5, big, 1]).propose(1, UNLIMITED) == []


def test_a_draft_is_no_longer_than_factor_times_what_matched():
    text = list(range(100, 120))
    for matched in range(2, 12):
        found = index([*text, *text[:matched]])
        assert len(found.propose(8, 1.0)) == min(8, matched)
        assert len(found.propose(8, 0.5)) == max(1, min(8, matched // 2))
        assert len(found.propose(8, UNLIMITED)) == 8


class CountingDict(dict):
    """Counts look-ups and writes."""

    def __init__(self, content, log):
        super().__init__(content)
        self.log = log

    def get(self, key, default=None):
        self.log.append("get")
        return super().get(key, default)

    def __setitem__(self, key, value):
        self.log.append("set")
        super().__setitem__(key, value)


@pytest.mark.parametrize("history", [50, 8_000, 126_000])
def test_work_per_step_does_not_depend_on_the_history(history):
    tokens = np.random.default_rng(0).integers(0, 1000, history).tolist()
    found = index(tokens)
    log: list[str] = []
    found._ends = [CountingDict(d, log) for d in found._ends]
    found.propose(8, 1.0)
    assert log.count("get") <= 3  # one for each n from 4 down to 2
    found.extend([1, 2, 3, 4, 5])
    assert log.count("set") == 5 * 3
    assert sum(map(len, found._ends)) <= 3 * len(found.tokens)  # memory is linear


def test_sixteen_histories_are_kept_apart():
    rows = [StubRow([100 * i + t for t in (1, 2, 3, 4, 1, 2)], request_id=i) for i in range(16)]
    one = drafter(2)
    one.open(rows)
    for shuffled in (rows, rows[::-1], rows[5:9]):
        draft = one.draft(shuffled, lens(*[2] * len(shuffled)))
        for at, row in enumerate(shuffled):
            assert draft.row(at) == [100 * row.request_id + t for t in (3, 4)]


@pytest.mark.parametrize("same_id", [False, True])
def test_a_reused_slot_proposes_nothing_from_the_request_before(same_id):
    one = drafter()
    first = StubRow([1, 2, 3, 4, 1, 2], request_id=0)
    one.open([first])
    assert one.draft([first], lens(2)).row(0) == [3, 4]
    one.close([0])
    second = StubRow([9, 8, 1, 2], request_id=0 if same_id else 1)  # ends like the first
    one.open([second])
    assert one.draft([second], lens(8)).lens.tolist() == [0]


def test_draft_obeys_the_plan_row_by_row_and_is_one_hot():
    rows = [StubRow([1, 2, 3, 4, 5, 1, 2], request_id=i) for i in range(3)]
    rows.append(StubRow([1, 2, 3], request_id=3))
    one = drafter(4)
    one.open(rows)
    draft = one.draft(rows, lens(0, 2, 32, 4))
    assert draft.lens.tolist() == [0, 2, 4, 0]
    assert draft.tokens.tolist() == [[-1] * 4, [3, 4, -1, -1], [3, 4, 5, 1], [-1] * 4]
    assert draft.law == OneHot()
    assert one.draft(rows, lens(0, 0, 0, 0)).tokens.shape == (4, 0)


def test_advance_takes_in_what_was_committed_also_after_skipped_steps():
    row = StubRow([1, 2, 3, 4])
    one = drafter(2)
    one.open([row])
    row.tokens += [7, 1]
    one.advance([row], verdict(1))
    row.tokens += [2]
    one.advance([row], verdict(1))
    assert one.draft([row], lens(2)).row(0) == [3, 4]
    one.close([row.request_id, 99])
    one.reset()


def test_rows_are_never_written_to():
    tokens = [1, 2, 3, 1, 2]
    row = StubRow(list(tokens))
    one = drafter()
    one.open([row])
    one.draft([row], lens(8))
    one.advance([row], verdict(1))
    assert row.tokens == tokens


def test_none_is_free():
    none = NoneDrafter()
    rows = [StubRow([1]), StubRow([2])]
    none.open(rows)
    draft = none.draft(rows, lens(0, 0))
    assert draft.tokens.shape == (2, 0)
    assert draft.lens.tolist() == [0, 0]
