"""Requests of a cell: salts, seeds, waves, order of arms, and traffic not worth measuring."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest

from slipstream.lab import traffic
from slipstream.lab.backends.base import TargetInfo
from slipstream.lab.grid import Cell, Grid
from slipstream.lab.prompts import Prompt, load

INFO = TargetInfo(target="t", fingerprint="f", dtype="d")


def count(text: str) -> int:
    return len(text.split())


def test_salts_and_seeds_differ_by_prompt_and_repeat(grid: Grid) -> None:
    seen: set[tuple[str, int | None]] = set()
    for cell in grid.cells:
        prompts = traffic.cell_prompts(grid, cell, count_tokens=count)
        for repeat in range(grid.repeats):
            for unit in traffic.cell_requests(grid, cell, repeat, prompts[repeat]):
                for request in unit:
                    seen.add((request.prompt.content().splitlines()[0], request.params.seed))
    assert len(seen) == grid.repeats * sum(c.prompts for c in grid.cells)


def test_requests_are_the_same_in_every_process(grid: Grid) -> None:
    cell = grid.cells[0]
    prompts = traffic.cell_prompts(grid, cell, count_tokens=count)[0]
    first = traffic.cell_requests(grid, cell, 0, prompts)
    assert first == traffic.cell_requests(grid, cell, 0, prompts)
    assert traffic.salt(7, "code-x4-greedy", 0, "code-001") == "f0d674cf"


def test_sampling_follows_the_cell(grid: Grid) -> None:
    for cell in grid.cells:
        prompts = traffic.cell_prompts(grid, cell, count_tokens=count)[0]
        for unit in traffic.cell_requests(grid, cell, 0, prompts):
            assert all(r.params.greedy == (cell.sampling == "greedy") for r in unit)
            assert not any(r.params.ignore_eos for r in unit)


def test_fresh_prompts_differ_between_repeats(grid: Grid) -> None:
    cell = Cell(traffic="chat", prompts=4, fresh_prompts=True)
    repeats = traffic.cell_prompts(grid, cell, count_tokens=count)
    ids = [p.id for one in repeats for p in one]
    assert len(set(ids)) == len(ids) == 4 * grid.repeats
    same = traffic.cell_prompts(grid, Cell(traffic="chat", prompts=4), count_tokens=count)
    assert same[0] == same[1] == same[2]


@pytest.mark.parametrize(
    ("users", "prompts", "sizes"), [(1, 3, [1, 1, 1]), (4, 8, [4, 4]), (4, 10, [4, 6]), (2, 2, [2])]
)
def test_every_wave_keeps_its_users_busy(
    grid: Grid, users: int, prompts: int, sizes: list[int]
) -> None:
    cell = Cell(traffic="chat", users=users, prompts=prompts)
    found = traffic.cell_prompts(grid, cell, count_tokens=count)[0]
    assert [len(u) for u in traffic.cell_requests(grid, cell, 0, found)] == sizes


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_order_of_arms_is_balanced(n: int) -> None:
    arms = [f"a{i}" for i in range(n)]
    orders = [traffic.arm_order(arms, turn) for turn in range(2 * n)]
    assert all(sorted(o) == arms for o in orders)
    places = Counter((arm, o.index(arm)) for o in orders for arm in arms)
    assert set(places.values()) == {2}
    before = Counter((a, b) for o in orders for i, a in enumerate(o) for b in o[i + 1 :])
    assert set(before.values()) == {n}


def test_random_tokens_are_refused_and_real_prompts_are_not(grid: Grid) -> None:
    rng = random.Random(0)
    noise = " ".join("".join(rng.choices("abcdefghijklmnop", k=6)) for _ in range(200))
    assert traffic.looks_random(noise)
    for name in ("chat", "code"):
        prompts = load(name, seed=0, count=12, count_tokens=count)
        assert traffic.lint(prompts, INFO) == []
    message = ({"role": "user", "content": noise},)
    assert "look like random tokens" in traffic.lint([Prompt("x", message)], INFO)[0]


def test_raw_looping_and_repeated_prompts_are_refused() -> None:
    raw = [Prompt("a", None, text="Complete this sentence."), Prompt("b", None, text="And this.")]
    assert traffic.lint(raw, INFO) == ["2 of 2 prompts were sent without the chat template"]
    assert traffic.lint(raw, dataclasses.replace(INFO, chat_template=False)) == []
    loop = Prompt("a", ({"role": "user", "content": "yes no " * 60},))
    assert traffic.lint([loop], INFO) == ["1 of 1 prompts repeat themselves"]
    assert "copies of others" in traffic.lint([loop, loop], INFO)[1]


def test_limits_lie_within_the_spread_and_differ() -> None:
    cell = Cell(traffic="chat", users=2, prompts=2, max_tokens=50, spread=0.6)
    limits = [traffic.limit(cell, draw=draw) for draw in range(0, 2**31, 2**25)]
    assert min(limits) >= 20
    assert max(limits) == 50
    assert len(set(limits)) > 20
    same = Cell(traffic="chat", users=2, prompts=2, max_tokens=50)
    assert {traffic.limit(same, draw=draw) for draw in (0, 2**30)} == {50}
