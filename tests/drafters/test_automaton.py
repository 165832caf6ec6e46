"""The suffix automaton against counting by hand."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.drafters.automaton import ROOT, SuffixAutomaton

TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=1, max_size=4)


def occurrences(texts: list[list[int]], part: list[int]) -> int:
    return sum(
        text[i : i + len(part)] == part for text in texts for i in range(len(text) - len(part) + 1)
    )


def followers(texts: list[list[int]], part: list[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for text in texts:
        for i in range(len(text) - len(part)):
            if text[i : i + len(part)] == part:
                token = text[i + len(part)]
                counts[token] = counts.get(token, 0) + 1
    return counts


def build(texts: list[list[int]], reach: int) -> SuffixAutomaton:
    automaton = SuffixAutomaton(reach)
    for text in texts:
        automaton.restart()
        for token in text:  # one at a time, as a decoder does
            automaton.extend([token])
    return automaton


def state_of(automaton: SuffixAutomaton, part: list[int]) -> int:
    state = ROOT
    for token in part:
        state = automaton.follow[state][token]
    return state


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.integers(2, 6))
def test_counts_and_best_followers_are_exact_within_reach(
    texts: list[list[int]], reach: int
) -> None:
    automaton = build(texts, reach)
    parts = {
        tuple(t[i : i + n])
        for t in texts
        for n in range(1, reach + 1)
        for i in range(len(t) - n + 1)
    }
    for part in map(list, parts):
        state = state_of(automaton, part)
        assert automaton.count[state] == occurrences(texts, part)
        after = followers(texts, part)
        assert set(automaton.follow[state]) == set(after)
        if len(part) < reach:
            best = automaton.best[state]
            assert (best < 0) == (not after)
            assert best < 0 or after[best] == max(after.values())


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 3), max_size=8))
def test_locate_finds_the_longest_suffix(texts: list[list[int]], query: list[int]) -> None:
    automaton = build(texts, 6)
    state, matched = automaton.locate(query)
    assert matched == max(
        (n for n in range(1, len(query) + 1) if occurrences(texts, query[-n:])), default=0
    )
    assert state == state_of(automaton, query[len(query) - matched :])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=40))
def test_current_is_the_ending(text: list[int]) -> None:
    automaton = build([text], 5)
    state, length = automaton.current
    assert length == min(5, len(text))
    assert state == state_of(automaton, text[-length:])


def test_best_follower_is_the_most_recent_among_equals() -> None:
    automaton = build([[1, 2, 1, 3]], 4)
    assert automaton.best[state_of(automaton, [1])] == 3


def test_memory_is_linear_and_a_loop_is_cheap() -> None:
    automaton = build([[7] * 5000], 24)
    assert len(automaton.length) <= 2 * 5000
    assert sum(map(len, automaton.follow)) <= 3 * 5000
    # Counting touches at most `reach` states a token, also where every ending repeats.
    chain, state = 0, automaton.current[0]
    while state != ROOT:
        chain, state = chain + 1, automaton.link[state]
    assert chain <= 24
