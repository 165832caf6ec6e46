"""Page bookkeeping: counts, prefix reuse, eviction order, homes, and random histories."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cache.pages import PagePool, PageTable
from slipstream.errors import InvalidConfig


def table(pool: PagePool, tokens: int, expected: int | None = None) -> PageTable:
    made = PageTable(pool, expected_tokens=expected or tokens)
    assert made.reserve(tokens)
    return made


def filled(pool: PagePool, tokens: list[int]) -> PageTable:
    made = PageTable(pool, expected_tokens=len(tokens))
    made.match(tokens)
    assert made.reserve(len(tokens))
    made.publish(tokens, len(tokens))
    return made


def test_reserve_is_all_or_nothing() -> None:
    pool = PagePool(4, 4)
    first = table(pool, 9)
    assert len(first.pages) == 3
    assert pool.available == 1
    second = PageTable(pool, expected_tokens=100)
    assert not second.reserve(5)
    assert second.pages == []
    assert pool.available == 1
    assert second.reserve(4)
    assert pool.available == 0
    assert first.reserve(12)  # covered already
    assert not first.reserve(13)


def test_trim_and_release_give_pages_back() -> None:
    pool = PagePool(8, 4)
    row = table(pool, 30)
    row.trim(9)
    assert len(row.pages) == 3
    assert pool.available == 5
    row.release()
    row.release()
    assert pool.available == 8
    assert row.pages == []


def test_match_takes_full_pages_and_leaves_a_token() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(12))
    row = filled(pool, tokens)
    kept = list(row.pages)
    row.release()
    for length, reused in ((4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)):
        other = PageTable(pool, expected_tokens=20)
        assert other.match([*tokens, 99][:length]) == reused
        assert other.pages == kept[: reused // 4]
        other.release()


def test_a_different_token_anywhere_before_ends_the_match() -> None:
    pool = PagePool(8, 4)
    filled(pool, list(range(12))).release()
    other = PageTable(pool, expected_tokens=12)
    assert other.match([99, *range(1, 12)]) == 0
    assert other.match([0, 1, 2, 3, 99, 5, 6, 7, 8, 9]) == 4


def test_only_verified_tokens_are_published() -> None:
    pool = PagePool(8, 4)
    row = table(pool, 12)
    tokens = list(range(12))
    row.publish(tokens, 7)  # tokens 7.. are a draft
    other = PageTable(pool, expected_tokens=12)
    assert other.match(tokens) == 4
    row.publish(tokens, 8)
    third = PageTable(pool, expected_tokens=12)
    assert third.match(tokens) == 8


def test_shared_pages_are_counted_once_and_freed_last() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(9))
    first = filled(pool, tokens)
    second = filled(pool, tokens)
    assert second.pages[:2] == first.pages[:2]
    assert [pool.refs(p) for p in second.pages] == [2, 2, 1]
    assert pool.available == 4
    first.release()
    assert pool.available == 5
    second.release()
    assert (pool.available, pool.cached) == (8, 2)


def test_eviction_takes_the_oldest_and_children_before_parents() -> None:
    pool = PagePool(6, 4)
    old, new = list(range(12)), list(range(100, 112))
    filled(pool, old).release()
    filled(pool, new).release()
    assert pool.cached == 6
    taker = table(pool, 4)
    probe = PageTable(pool, expected_tokens=4)
    assert probe.match([*old, 0]) == 8  # its last page went, its first two did not
    probe.release()
    probe = PageTable(pool, expected_tokens=4)
    assert probe.match([*new, 0]) == 12
    probe.release()
    taker.release()


def test_reset_forgets_prefixes_but_not_running_rows() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(12))
    running = filled(pool, tokens)
    pool.reset_prefixes()
    other = PageTable(pool, expected_tokens=12)
    assert other.match([*tokens, 0]) == 0
    assert len(running.pages) == 3
    running.release()
    assert (pool.available, pool.cached) == (8, 0)


def test_two_pools_never_share_keys() -> None:
    assert PagePool(4, 4).chain(None, [1, 2, 3, 4]) != PagePool(4, 4).chain(None, [1, 2, 3, 4])


def test_rows_get_contiguous_homes_at_equal_strides() -> None:
    pool = PagePool(64, 4)
    rows = [table(pool, 6, expected=30) for _ in range(8)]
    for tokens in range(7, 31):
        for row in rows:
            assert row.reserve(tokens)
    for i, row in enumerate(rows):
        assert row.pages == list(range(8 * i, 8 * i + 8))


def test_homes_bend_before_requests_fail() -> None:
    pool = PagePool(8, 4)
    big = table(pool, 4, expected=32)  # claims everything
    other = table(pool, 16)
    assert len(other.pages) == 4
    assert big.reserve(16)
    assert pool.available == 0
    assert sorted(big.pages + other.pages) == list(range(8))


def test_a_home_is_found_among_cached_pages() -> None:
    pool = PagePool(16, 4)
    for start in range(0, 160, 40):
        filled(pool, list(range(start, start + 16))).release()
    assert pool.cached == 16
    row = table(pool, 16)
    assert row.pages == list(range(row.pages[0], row.pages[0] + 4))
    assert pool.cached == 12


def test_growth_goes_on_behind_an_adopted_prefix() -> None:
    pool = PagePool(32, 4)
    tokens = list(range(12))
    filled(pool, tokens).release()
    row = PageTable(pool, expected_tokens=24)
    assert row.match([*tokens, 7]) == 12
    assert row.reserve(24)
    assert row.pages == list(range(row.pages[0], row.pages[0] + 6))


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (-1, 4)])
def test_empty_pools_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(InvalidConfig, match="1 or more"):
        PagePool(*sizes)


ops = st.lists(
    st.tuples(
        st.sampled_from(["open", "grow", "publish", "trim", "release", "reset"]),
        st.integers(0, 5),
        st.integers(0, 60),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(ops)
def test_random_histories_keep_every_page_accounted_for(
    history: list[tuple[str, int, int]],
) -> None:
    pool = PagePool(12, 4)
    tables: dict[int, PageTable] = {}
    texts: dict[int, list[int]] = {}
    content: dict[int, tuple[int, ...]] = {}  # page -> the token prefix its content stands for
    for op, slot, n in history:
        if op == "open" and slot not in tables:
            texts[slot] = [(n % 3) * (i // 8) for i in range(64)]
            tables[slot] = PageTable(pool, expected_tokens=n)
            reused = tables[slot].match(texts[slot][: n + 1])
            assert reused <= n
            for i, page in enumerate(tables[slot].pages):
                assert content[page] == tuple(texts[slot][: 4 * (i + 1)])
        elif slot in tables:
            row = tables[slot]
            before = list(row.pages)
            if op == "grow":
                grown = row.reserve(n)
                assert row.pages[: len(before)] == before
                assert grown == (len(row.pages) * 4 >= n)
                for i in range(len(before), len(row.pages)):
                    content[row.pages[i]] = tuple(texts[slot][: 4 * (i + 1)])
            elif op == "publish":
                row.publish(texts[slot], min(n, len(row.pages) * 4))
            elif op == "trim":
                row.trim(n)
            elif op == "release":
                row.release()
                del tables[slot]
        if op == "reset":
            pool.reset_prefixes()
        held = [p for row in tables.values() for p in row.pages]
        assert pool.available == 12 - len(set(held))
        for page in range(12):
            assert pool.refs(page) == held.count(page)
        for row in tables.values():
            assert len(set(row.pages)) == len(row.pages)
