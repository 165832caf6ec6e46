"""How much the answers copy, from the request to the report; ratios that can move apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.lab.analyze import analyze
from slipstream.lab.backends.simulated import Simulated, SimulatedArm
from slipstream.lab.grid import Grid, from_table
from slipstream.lab.report import render_markdown
from slipstream.lab.report_html import render_html
from slipstream.lab.results import CellResult, GridResult
from slipstream.lab.results_json import load_result, save_result
from slipstream.lab.runner import run_grid
from slipstream.lab.samples import Request, Sample, from_json, to_json
from slipstream.types import Timings

Make = Callable[..., Simulated]


def row(result: GridResult, arm: str, traffic: str) -> CellResult:
    (one,) = (c for c in result.cells if (c.arm, c.traffic) == (arm, traffic))
    return one


def backwards(_request: Request, words: Sequence[str], _users: int) -> list[str]:
    return list(words)[::-1]


@pytest.fixture
def edited(table: dict[str, Any], tmp_path: Path) -> GridResult:
    """`none` copies the text to be edited, `ngram:3` says it backwards."""
    table["cells"] = [
        {"traffic": "edit", "users": 1, "prompts": 3, "max_tokens": 24},
        {"traffic": "chat", "users": 1, "prompts": 3, "max_tokens": 24},
    ]
    plain = SimulatedArm(verify=lambda rows: 0.01)
    arms = {"none": plain, "ngram:3": dataclasses.replace(plain, alter=backwards)}
    backend = Simulated(arms, answer=lambda r: (r.prompt.source or "a b c d e f " * 9).split())
    return analyze(run_grid(from_table(table, name="edit"), root=tmp_path, backend=backend))


def test_copying_is_measured_per_arm(edited: GridResult) -> None:
    assert row(edited, "none", "edit").copied == 1.0
    assert row(edited, "ngram:3", "edit").copied == 0.0
    assert row(edited, "none", "chat").copied is None


def test_copying_is_in_every_report(edited: GridResult, tmp_path: Path) -> None:
    text = render_markdown(edited)
    assert "| copied from the source | 1.00 | 0.00 |" in text
    assert text.count("| copied from the source |") == 1  # not in the chat cell
    assert "copied from the source" in render_html(edited)
    save_result(edited, tmp_path / "result.json")
    assert load_result(tmp_path / "result.json") == edited


def test_samples_of_older_ledgers_have_no_share() -> None:
    sample = Sample(id="a", text="x", finish="stop", timings=Timings(0.0, (1.0,), (1,)), copied=0.5)
    line = to_json(sample)
    assert from_json(line) == sample
    del line["copied"]
    assert from_json(line).copied is None


def test_tok_s_is_diluted_by_prompts_and_ms_per_token_is_not(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    """Prompts cost both arms the same: they pull tok/s toward 1 and leave ms/token alone."""
    result = analyze(run_grid(grid, root=tmp_path, backend=simulated(prefill=0.0005)))
    plain, arm = row(result, "none", "code"), row(result, "ngram:3", "code")
    assert plain.decode_speedup is None
    assert row(result, "ngram:3", "chat").decode_speedup is None  # it is the headline there
    assert arm.speedup is not None
    assert arm.decode_speedup is not None
    assert plain.ms_per_token is not None
    assert arm.ms_per_token is not None
    ratio = plain.ms_per_token.value / arm.ms_per_token.value
    assert arm.decode_speedup.value == pytest.approx(ratio)
    assert 1 < arm.speedup.value < 0.95 * arm.decode_speedup.value
    assert "| step against a plain step | - | 1.20× |" in render_markdown(result)


class Broken(Simulated):
    """Some requests of one arm end in an error."""

    failing = "none"

    def run(self, arm: str, requests: Sequence[Request], *, users: int) -> list[Sample]:
        samples = super().run(arm, requests, users=users)
        if arm != self.failing or not samples[0].id.startswith(("chat", "code")):
            return samples
        return [dataclasses.replace(samples[0], error="Non-finite logits."), *samples[1:]]


def test_nothing_is_published_against_a_broken_baseline(
    grid: Grid, simulated: Make, tmp_path: Path
) -> None:
    result = analyze(run_grid(grid, root=tmp_path, backend=Broken(simulated().arms)))
    assert not any(c.publishable for c in result.cells)
    arm = row(result, "ngram:3", "chat")
    assert arm.reasons[0].startswith("the baseline cannot be compared with: ")
    assert "Non-finite logits." in arm.reasons[0]


def test_few_prompts_speak_for_themselves_only(
    table: dict[str, Any], simulated: Make, tmp_path: Path
) -> None:
    table["cells"][0]["prompts"] = 6
    plan = from_table(table, name="sim")
    (warning,) = analyze(run_grid(plan, root=tmp_path, backend=simulated())).warnings
    assert "code x 4 greedy: their intervals speak for these prompts" in warning
    assert "chat" not in warning
