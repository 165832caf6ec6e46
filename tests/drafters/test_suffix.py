"""Suffix decoding: the most frequent continuation, as far as its frequency carries."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.suffix import FinishedTexts, SuffixDrafter, SuffixRules
from slipstream.types import OneHot
from tests.helpers import StubRow, lens, verdict


def drafter(draft_len=8, *, min_prob=0.1, factor=8.0, depth=16, keep=None) -> SuffixDrafter:
    rules = SuffixRules(min_prob=min_prob, factor=factor, depth=depth)
    return SuffixDrafter(draft_len, rules=rules, keep=keep, name="suffix")


def propose(tokens, width=8, **options):
    row = StubRow(list(tokens))
    one = drafter(**options)
    one.open([row])
    return one.draft([row], lens(width)).row(0)


def test_cold_start_drafts_nothing():
    assert propose([1]) == []
    assert propose([1, 2, 3, 4]) == []


def test_the_more_frequent_continuation_wins():
    text = [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2]
    assert propose(text, 1) == [3]  # 2 of 3, though 4 is more recent
    assert propose(text, 1, min_prob=0.7) == []


def test_a_path_ends_where_it_was_seen_too_seldom():
    text = [1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 3, 6, 7, 1, 2]
    assert propose(text, min_prob=0.5) == [3]  # 3 is certain, what follows it is 1 of 3
    assert propose(text, min_prob=0.3, width=2) == [3, 6]


def test_length_is_limited_by_the_match():
    text = list(range(100, 120))
    for matched in range(1, 9):
        assert len(propose([*text, *text[:matched]], factor=1.0)) == matched
        assert len(propose([*text, *text[:matched]], factor=2.0)) == min(8, 2 * matched)


def test_depth_limits_the_match():
    text = list(range(100, 120))
    assert len(propose([*text, *text[:8]], factor=1.0, depth=3)) == 3


def test_loops_are_followed():
    assert propose([5] * 40) == [5] * 8
    assert propose([1, 2, 3] * 12) == [1, 2, 3, 1, 2, 3, 1, 2]


def slow_best_score(tokens, width, *, min_prob, factor, depth):
    """Best expected accepted tokens over every match length and every continuation seen."""
    best = 0.0
    for n in range(1, min(depth, len(tokens) - 1) + 1):
        ending = tokens[len(tokens) - n :]
        starts = [i + n for i in range(len(tokens) - n) if tokens[i : i + n] == ending]
        limit = min(width, max(1, int(factor * n)))
        for start in starts:
            score = 0.0
            for k in range(1, min(limit, len(tokens) - start) + 1):
                path = tokens[start : start + k]
                share = sum(tokens[s : s + k] == path for s in starts) / len(starts)
                if share < min_prob:
                    break
                score += share
            best = max(best, score)
    return best


def score_of(tokens, drafted, *, depth, factor):
    """Expected accepted tokens of a draft under the match length that rates it highest."""
    scores = [0.0]
    for n in range(1, min(depth, len(tokens) - 1) + 1):
        ending = tokens[len(tokens) - n :]
        starts = [i + n for i in range(len(tokens) - n) if tokens[i : i + n] == ending]
        if starts and len(drafted) <= max(1, int(factor * n)):
            counts = [
                sum(tokens[s : s + k] == drafted[:k] for s in starts)
                for k in range(1, len(drafted) + 1)
            ]
            if all(counts):
                scores.append(sum(counts) / len(starts))
    return max(scores)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4))
def test_every_draft_was_seen_and_is_close_to_the_best_there_is(tokens, width):
    options = {"min_prob": 0.25, "factor": 1.0, "depth": 6}
    drafted = propose(tokens, width, **options)
    best = slow_best_score(tokens, width, **options)
    assert bool(drafted) == (best > 0)
    got = score_of(tokens, drafted, depth=6, factor=1.0)
    assert got <= best + 1e-9
    # Walking greedily may miss the best path by what a later token would have made up for.
    assert got >= best / width - 1e-9
    if width == 1:
        assert got == pytest.approx(best)


def test_steps_equal_opening_with_the_whole_text():
    text = [1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2]
    row = StubRow(text[:2])
    one = drafter()
    one.open([row])
    for token in text[2:]:
        row.tokens.append(token)
        one.advance([row], verdict(1))
    assert one.draft([row], lens(8)).row(0) == propose(text)


def test_finished_requests_are_used_only_if_asked():
    first = StubRow([50, 1, 2, 3, 4, 5], request_id=0, prompt_len=1)
    second = StubRow([60, 1, 2], request_id=1, prompt_len=1)
    for keep, expected in ((None, []), (1000, [3, 4, 5])):
        one = drafter(keep=keep)
        one.open([first])
        one.close([0])
        one.open([second])
        assert one.draft([second], lens(8)).row(0) == expected
        one.reset()
        assert one.draft([second], lens(8)).row(0) == []


def test_prompts_of_finished_requests_are_not_kept_but_for_their_end():
    prompt = list(range(10, 60))
    first = StubRow([*prompt, 1, 2, 3], prompt_len=len(prompt))
    one = drafter(keep=1000, depth=4)
    one.open([first])
    one.close([0])
    asks = StubRow([70, *prompt[20:22]], request_id=1, prompt_len=3)
    one.open([asks])
    assert one.draft([asks], lens(8)).row(0) == []
    asks = StubRow([70, *prompt[-2:]], request_id=2, prompt_len=3)
    one.open([asks])
    assert one.draft([asks], lens(8)).row(0) == [1, 2, 3]


def test_a_second_request_sees_nothing_of_a_running_or_closed_first():
    one = drafter()
    first = StubRow([1, 2, 3, 4, 1, 2], request_id=0)
    second = StubRow([9, 1, 2], request_id=1)
    one.open([first, second])
    assert one.draft([first, second], lens(2, 2)).lens.tolist() == [2, 0]
    one.close([0])
    again = StubRow([8, 1, 2], request_id=0)
    one.open([again])
    assert one.draft([again, second], lens(2, 2)).lens.tolist() == [0, 0]


def test_finished_texts_are_bounded_and_the_oldest_go_first():
    texts = FinishedTexts(100, reach=8)
    for i in range(50):
        texts.add([1000 + i] * 2 + list(range(20)))
        assert sum(a.size for a in texts.generations) <= 100
        assert len(texts.generations) <= 2
    found = [any(a.locate([1000 + i])[1] for a in texts.generations) for i in range(50)]
    assert found[-1]
    assert not found[0]
    assert found == sorted(found)
    texts.add(list(range(5000, 6000)))  # longer than everything kept: its end is
    assert any(a.locate([5999])[1] for a in texts.generations)


def test_draft_obeys_the_plan_and_is_one_hot():
    rows = [StubRow([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], request_id=i) for i in range(3)]
    one = drafter(4)
    one.open(rows)
    draft = one.draft(rows, lens(0, 2, 32))
    assert draft.lens.tolist() == [0, 2, 4]
    assert draft.row(2) == [5, 6, 1, 2]
    assert draft.law == OneHot()
