"""Synthetic results shaped like a real grid, for the report's tests and for looking at it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.lab.results import CellResult, GateResult, GateStatus, GridResult, Interval
from slipstream.metrics import efficiency
from slipstream.types import StageTimes

TARGET = "smollm2-135m"
CELLS = (
    ("chat", 1, "sampled"),
    ("chat", 16, "sampled"),
    ("code", 16, "greedy"),
    ("code", 16, "sampled"),
    ("doc", 1, "sampled"),
    ("edit", 1, "greedy"),
    ("edit", 1, "sampled"),
)
# (value, half width), tokens per step: one pair per cell above.
ARMS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "ngram:3": (
        (1.04, 0.05, 1.22),
        (1.01, 0.03, 1.18),
        (1.31, 0.06, 1.92),
        (1.12, 0.05, 1.55),
        (1.08, 0.04, 1.35),
        (1.92, 0.09, 2.61),
        (1.71, 0.10, 2.38),
    ),
    "ngram:8": (
        (1.02, 0.06, 1.26),
        (0.88, 0.03, 1.21),
        (1.22, 0.07, 2.30),
        (1.03, 0.06, 1.71),
        (1.05, 0.05, 1.41),
        (2.41, 0.14, 3.92),
        (2.10, 0.13, 3.40),
    ),
    "suffix": (
        (1.03, 0.04, 1.19),
        (0.99, 0.02, 1.15),
        (1.33, 0.06, 2.05),
        (1.15, 0.05, 1.62),
        (1.09, 0.04, 1.38),
        (2.52, 0.15, 4.10),
        (2.20, 0.12, 3.51),
    ),
}


def cell(**changes: Any) -> CellResult:
    """One baseline cell with plausible numbers; `changes` replaces fields."""
    base = CellResult(
        target=TARGET,
        arm="none",
        traffic="chat",
        users=1,
        sampling="sampled",
        baseline=True,
        batch="20261130-034500-spec_quick",
        ms_per_token=Interval(22.4, 21.9, 23.0),
        user_tok_s=Interval(44.6, 43.5, 45.7),
        total_tok_s=Interval(43.1, 42.0, 44.3),
        ttft_ms=Interval(88.0, 81.0, 97.0),
        tokens_per_step=1.0,
        acceptance_length=None,
        acceptance_rate=None,
        by_position=(),
        speedup=None,
        efficiency=None,
        stage_ms=StageTimes(draft=0.0, verify=20.1, sample=1.3, host=0.9),
        repeats=3,
        prompts=16,
        tokens=5811,
        looping=1,
        judged_for_loops=40,
        output_length_ratio=None,
        publishable=True,
        reasons=(),
    )
    return replace(base, **changes)


def drafted(
    arm: str,
    speedup: tuple[float, float] | None,
    *,
    tokens_per_step: float = 2.0,
    value: float = 1.0,
    **changes: Any,
) -> CellResult:
    """An arm's cell whose speedup has the interval (low, high) around `value`."""
    interval = Interval(value, *speedup) if speedup else None
    defaults: dict[str, Any] = {
        "arm": arm,
        "baseline": False,
        "speedup": interval,
        "tokens_per_step": tokens_per_step,
        "acceptance_length": tokens_per_step + 0.3,
        "acceptance_rate": 0.41,
        "by_position": (0.71, 0.55, 0.43),
        "efficiency": efficiency(value, tokens_per_step) if speedup else None,
        "output_length_ratio": 1.01,
    }
    return cell(**(defaults | changes))


def grid(label: str = "synthetic") -> GridResult:
    """Seven cells by four arms, one arm failing its needle gate, one gate missing."""
    cells = []
    for index, (traffic, users, sampling) in enumerate(CELLS):
        where: dict[str, Any] = {
            "traffic": traffic,
            "users": users,
            "sampling": sampling,
            "label": label,
        }
        plain_ms = 22.4 if users == 1 else 51.0
        plain_stage = StageTimes(0.0, plain_ms * 0.9, plain_ms * 0.06, plain_ms * 0.04)
        total = 1000 / plain_ms * users
        cells.append(
            cell(
                **where,
                ms_per_token=Interval(plain_ms, plain_ms * 0.98, plain_ms * 1.03),
                total_tok_s=Interval(total, total * 0.97, total * 1.02),
                stage_ms=plain_stage,
            )
        )
        for arm, values in ARMS.items():
            value, half, tokens = values[index]
            step = plain_ms * tokens / value
            verify = step * 0.9
            low, high = plain_ms / (value + half), plain_ms / (value - half)
            depth = 8 if arm == "ngram:8" else 3
            failed = arm == "suffix" and traffic == "doc"
            cells.append(
                drafted(
                    arm,
                    (value - half, value + half),
                    value=value,
                    tokens_per_step=tokens,
                    **where,
                    ms_per_token=Interval(plain_ms / value, low, high),
                    user_tok_s=Interval(1000 * value / plain_ms),
                    total_tok_s=Interval(
                        total * value, total * (value - half), total * (value + half)
                    ),
                    stage_ms=StageTimes(0.05, verify, step * 0.06, step * 0.04 - 0.05),
                    by_position=tuple(0.45 + 0.09 * tokens - 0.06 * i for i in range(depth)),
                    publishable=not failed,
                    reasons=("needle gate failed: 0.50 under the bar of 0.67",) if failed else (),
                )
            )
    return GridResult(
        "20261130-034500-spec_quick", "spec_quick on smollm2-135m", META, tuple(cells), GATES, WARN
    )


META: dict[str, Any] = {
    "machine": {"cpu": "Intel Xeon (AMX)", "cores": 2, "memory_gib": 16},
    "versions": {"slipstream": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
    "model": {"name": TARGET, "dtype": "bfloat16", "fingerprint": "9f3c1ab2"},
    "grid": {"repeats": 3, "seed": 7, "arms": ["none", "ngram:3", "ngram:8", "suffix"]},
    "gpu": None,
}
GATES = (
    GateResult("none", "needle", GateStatus.PASS, 1.0, 0.7, 1.0, 0.67, "12 of 12 found."),
    GateResult("suffix", "needle", GateStatus.FAIL, 0.5, 0.21, 0.79, 0.67, "6 of 12 found."),
    GateResult("ngram:3", "lossless", GateStatus.PASS, 0.0, None, None, 0.0, "No fork | 24 same."),
    GateResult("ngram:8", "json", GateStatus.MISSING, None, None, None, 0.9, "Never ran."),
    GateResult("none", "lossless", GateStatus.NOT_APPLICABLE, None, None, None, None, ""),
)
WARN = (
    "code x 16 greedy got 2 of 3 repeats: the time budget ran out.",
    "<script>alert(1)</script> & other text from a model is shown as text.",
)
