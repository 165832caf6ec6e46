"""What an analyzed ledger says: plain values between the statistics and the report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from slipstream.types import StageTimes


class GateStatus(Enum):
    """Outcome of a gate; `MISSING` is never written by a gate, only found by the analysis."""

    PASS = "pass"
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"
    MISSING = "missing"


class Resolution(Enum):
    """Whether the interval of a speedup says anything."""

    FASTER = "faster"
    SLOWER = "slower"
    NOT_RESOLVED = "not resolved"


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % interval; `low` and `high` are None where none was measured."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate on one arm, run on that arm itself in this run. `evidence` is a sentence."""

    arm: str
    gate: str
    status: GateStatus
    value: float | None
    low: float | None
    high: float | None
    bar: float | None
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """One arm on one cell (traffic class x users x sampling). Absent is None, never zero.

    `speedup` compares the headline metric of the cell with the baseline of the same batch of runs:
    ms/token where `users` is 1, total tok/s otherwise. `stage_ms` is milliseconds a step.
    `decode_speedup` is the same ratio of ms/token alone, where the headline is tok/s: the two can
    move apart. `copied`: mean share of the answers' words copied from the text to be edited.
    `looping` of `judged_for_loops` answers go in circles; shorter ones are not judged.
    `published_ratio` is only set by reference ledgers: the ratio as its source printed it.
    `run` names the arm's own run where it differs from its batch; empty means `batch`.
    """

    target: str
    arm: str
    traffic: str
    users: int
    sampling: str
    baseline: bool
    batch: str
    ms_per_token: Interval | None
    user_tok_s: Interval | None
    total_tok_s: Interval | None
    ttft_ms: Interval | None
    tokens_per_step: float | None
    acceptance_length: float | None
    acceptance_rate: float | None
    by_position: tuple[float | None, ...]
    speedup: Interval | None
    efficiency: float | None
    stage_ms: StageTimes | None
    repeats: int
    prompts: int
    tokens: int
    looping: int
    judged_for_loops: int
    output_length_ratio: float | None
    publishable: bool
    reasons: tuple[str, ...]
    label: str = ""
    decode_speedup: Interval | None = None
    copied: float | None = None
    published_ratio: float | None = None
    run: str = ""

    @property
    def cell(self) -> str:
        """Name of the cell, e.g. `code x 16 greedy`."""
        return f"{self.traffic} x {self.users} {self.sampling}".rstrip()


@dataclass(frozen=True, slots=True)
class GridResult:
    """A whole run, ready to be printed."""

    run: str
    title: str
    meta: dict[str, Any]
    cells: tuple[CellResult, ...]
    gates: tuple[GateResult, ...]
    warnings: tuple[str, ...]
