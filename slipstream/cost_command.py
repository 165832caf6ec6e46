"""`slipstream cost`: measures, prints the table, keeps the numbers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from slipstream import provenance
from slipstream.drafters.shaped import shape_of
from slipstream.engine.cost import Case, Cost, copy_bandwidth, measure, shape_model
from slipstream.engine.llm import DTYPES
from slipstream.errors import InvalidConfig
from slipstream.models.shapes import read_shape

COLUMNS = (
    "drafter", "users", "context", "floor", "step", "x floor", "draft", "verify", "accept", "host",
    "tokens/step", "ms/token", "tok/s",
)  # fmt: skip


def run_cost(
    config: Path,
    *,
    drafters: Sequence[str],
    users: Sequence[int],
    context: int,
    acceptance: float | None,
    dtype: str,
    out: Path | None,
) -> None:
    """Measure every drafter at every number of users. `out`: append one JSON line a case.

    On a GPU steps are captured graphs; without one they are the engine's own on the CPU. Raises
    `InvalidConfig` and `ModelError` for values and configs that make no sense, before measuring.
    """
    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    shape = read_shape(config)
    for drafter in drafters:
        shape_of(drafter, shape)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    loaded = shape_model(shape, device=device, dtype=DTYPES[dtype])
    bandwidth = copy_bandwidth(device)
    costs = []
    for drafter, count in itertools.product(drafters, users):
        given = acceptance if drafter != "none" else None
        cost = measure(loaded, Case(drafter, count, context, given), bandwidth=bandwidth)
        costs.append(cost)
        if out is not None:
            _append(out, cost, config=config, dtype=dtype, bandwidth=bandwidth)
    _print(costs, bandwidth)


def _append(out: Path, cost: Cost, *, config: Path, dtype: str, bandwidth: float) -> None:
    line = {
        "time": provenance.now(),
        "device": _device_name(),
        "versions": provenance.versions(),
        "commit": provenance.commit(),
        "model": str(config),
        "dtype": dtype,
        "bandwidth": bandwidth,
        **asdict(cost),
    }
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _device_name() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return str(provenance.machine()["cpu"])


def _print(costs: Sequence[Cost], bandwidth: float) -> None:
    table = Table(title=f"Milliseconds a step; copy bandwidth {bandwidth / 1e9:,.0f} GB/s")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for c in costs:
        table.add_row(
            c.drafter,
            str(c.users),
            f"{c.context:,}",
            *(f"{v:.2f}" for v in (c.floor, c.step, c.step / c.floor)),
            *(f"{v:.3f}" for v in (c.draft, c.verify, c.accept, c.host)),
            f"{c.tokens_per_step:.2f}{' (synthetic)' if c.synthetic else ''}",
            f"{c.ms_per_token:.3f}",
            f"{c.tok_s:,.0f}",
        )
    Console(width=max(150, Console().width)).print(table)
    if any(c.synthetic for c in costs):
        Console().print(
            "Synthetic acceptance was given, not measured: whatever was drafted counts as accepted."
        )
