"""Grid files: what is known, what is refused, what identifies a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import InvalidConfig
from slipstream.lab import grid as grids
from slipstream.lab.gate_specs import GATES
from slipstream.lab.grid import Grid, from_table
from slipstream.lab.looping import MIN_TOKENS


def test_shipped_grids_load_and_hold_what_the_issues_ask_for() -> None:
    quick = grids.load("spec_quick")
    trained = ("mtp:1", "mtp:2", "mtp:3", "eagle3:4", "dflash:7", "dflash2:7", "dspark:7")
    assert quick.arms == ("none", "ngram:3", "suffix", *trained)
    found = {(c.traffic, c.users) for c in quick.cells}
    assert found >= {(t, n) for t in ("chat", "code") for n in (1, 16)} | {("doc", 1), ("edit", 1)}
    lookup = grids.load("spec_lookup")
    assert lookup.arms == ("none", "ngram:3", "ngram:8", "suffix")
    for traffic in ("code", "edit"):  # run both ways; chat and doc loop when greedy
        assert {c.sampling for c in lookup.cells if c.traffic == traffic} == {"greedy", "sampled"}
    for grid, minutes in ((quick, 20), (lookup, 12)):
        assert all(c.sampling == "sampled" for c in grid.cells if c.traffic in ("chat", "doc"))
        assert grid.repeats >= 3
        assert all(getattr(grid.gates, gate) is not None for gate in GATES)
        assert grid.budget_minutes is not None
        assert grid.budget_minutes <= minutes
    assert quick.gates.lossless.measured
    assert all(c.max_tokens >= MIN_TOKENS for c in quick.cells if c.users == 1)
    assert grids.load("spec_tiny").target == "tiny"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (("arm",), [], "unknown key 'arm'; known: name, title, target"),
        (("cells", 0, "user"), 2, "unknown key 'user'; known: traffic, users"),
        (("gates", "needles"), {}, "unknown key 'needles'; known: needle, json"),
        (("gates", "needle", "depth"), [1], "unknown key 'depth'"),
        (("bars",), {"speed": 1}, "unknown key 'speed'"),
        (("sampling",), {"temperature": 0}, "above 0"),
        (("sampling",), 3, "expected a table"),
        (("arms",), ["ngram:3"], "holds the baseline 'none'"),
        (("arms",), "none", "is not of type tuple"),
        (("arms",), ["none", "none"], "each once"),
        (("repeats",), 2, ">= 3"),
        (("repeats",), "3", "is not of type int"),
        (("repeats",), True, "is not of type int"),
        (("cells", 0, "sampling"), "hot", "greedy or sampled"),
        (("cells", 1, "prompts"), 3, "at least as many as users (4)"),
        (("cells", 1, "traffic"), "chat", None),
        (("cells",), [], "one or more"),
        (("gates", "needle", "bar"), 67, "0 to 1"),
        (("gates", "lossless", "control_users"), 4, "another batch width"),
        (("budget_minutes",), 0, "above 0"),
    ],
)
def test_bad_values_are_one_sentence(
    table: dict[str, Any], path: tuple[Any, ...], value: Any, says: str | None
) -> None:
    changed: Any = copy.deepcopy(table)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    if says is None:
        from_table(changed, name="sim")
        return
    with pytest.raises(InvalidConfig) as caught:
        from_table(changed, name="sim")
    assert says in str(caught.value)
    assert str(caught.value).endswith(".")


def test_missing_keys_and_files_are_named(table: dict[str, Any], tmp_path: Path) -> None:
    del table["target"]
    with pytest.raises(InvalidConfig, match="missing 'target'"):
        from_table(table, name="sim")
    with pytest.raises(InvalidConfig, match=r"no grid 'nope'.*spec_quick"):
        grids.load("nope")
    broken = tmp_path / "broken.toml"
    broken.write_text("title = ")
    with pytest.raises(InvalidConfig, match="not valid TOML"):
        grids.load(broken)


def test_hash_covers_every_value_and_the_model(grid: Grid, table: dict[str, Any]) -> None:
    assert grid.hash("model") == from_table(table, name="sim").hash("model")
    assert grid.hash("model") != grid.hash("other model")
    table["sampling"] = {"temperature": 0.2}
    assert grid.hash("model") != from_table(table, name="sim").hash("model")


def test_resolved_grid_reads_back(grid: Grid) -> None:
    assert from_table(grid.resolved(), name=grid.name) == grid
    quick = grid.quickened()
    assert from_table(quick.resolved(), name=quick.name) == quick


def test_own_prompts_keep_users_and_sampling(grid: Grid) -> None:
    own, left_out = grid.with_own_prompts(10)
    assert [c.name for c in own.cells] == ["own x 1 sampled", "own x 4 greedy"]
    assert left_out == (
        "7 of the file's 10 prompts in own x 1 sampled, which runs 3",
        "2 of the file's 10 prompts in own x 4 greedy, which runs 8",
    )
    few, left_out = grid.with_own_prompts(2)
    assert [c.name for c in few.cells] == ["own x 1 sampled"]
    assert left_out == ("own x 4 greedy needs 4 prompts, the file has 2",)
