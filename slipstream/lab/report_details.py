"""The detail tables of a report: every number of a cell, metrics down and arms across."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slipstream.lab.formats import (
    DASH,
    arm_name,
    cell_title,
    fixed,
    measured,
    number,
    ratio,
    speedup_text,
)
from slipstream.lab.report_tables import Entry, Table, TableRow
from slipstream.lab.results import CellResult, GridResult, Interval
from slipstream.lab.verdict import bar_of, cell_key, has_numbers, resolve, step_cost

Metric = tuple[str, Callable[[CellResult, CellResult | None], str]]


def _with_interval(read: Callable[[CellResult], Interval | None]) -> Callable[..., str]:
    return lambda cell, _baseline: measured(read(cell))


def _fixed(read: Callable[[CellResult], float | None]) -> Callable[..., str]:
    return lambda cell, _baseline: fixed(read(cell))


def _tokens(cell: CellResult, _baseline: CellResult | None) -> str:
    """A reference keeps the digits its source printed."""
    printed = cell.published_ratio is not None or not cell.tokens
    return number(cell.tokens_per_step) if printed else fixed(cell.tokens_per_step)


def _positions(cell: CellResult, _baseline: CellResult | None) -> str:
    return " ".join(map(fixed, cell.by_position)) or DASH


def _speedup(cell: CellResult, _baseline: CellResult | None) -> str:
    if cell.published_ratio is not None:
        return ratio(cell.published_ratio)
    return speedup_text(cell.speedup)


def _stage(name: str) -> Callable[[CellResult, CellResult | None], str]:
    return lambda cell, _: number(getattr(cell.stage_ms, name) if cell.stage_ms else None)


def _verify_cost(cell: CellResult, baseline: CellResult | None) -> str:
    cost = None if cell.baseline else step_cost(cell, baseline)
    return ratio(cost.verify) if cost else DASH


def _step_cost(cell: CellResult, baseline: CellResult | None) -> str:
    """Only where stages were measured: otherwise it would be efficiency in other words."""
    cost = None if cell.baseline or cell.stage_ms is None else step_cost(cell, baseline)
    return ratio(cost.ratio) if cost and cost.verify is not None else DASH


def _counted(read: Callable[[CellResult], int]) -> Callable[[CellResult, CellResult | None], str]:
    """Counts that a source without repeats and prompts (all zero) did not report."""
    return lambda cell, _: f"{read(cell):,}" if cell.repeats or cell.tokens else DASH


def _loops(cell: CellResult, _baseline: CellResult | None) -> str:
    return f"{cell.looping:,} of {cell.judged_for_loops:,} long" if cell.judged_for_loops else DASH


METRICS: tuple[Metric, ...] = (
    ("ms/token", _with_interval(lambda c: c.ms_per_token)),
    ("tok/s per user", _with_interval(lambda c: c.user_tok_s)),
    ("tok/s total", _with_interval(lambda c: c.total_tok_s)),
    ("TTFT (ms)", _with_interval(lambda c: c.ttft_ms)),
    ("speedup", _speedup),
    ("speedup of ms/token", lambda cell, _baseline: speedup_text(cell.decode_speedup)),
    ("efficiency", _fixed(lambda c: c.efficiency)),
    ("tokens per step", _tokens),
    ("acceptance length", _fixed(lambda c: c.acceptance_length)),
    ("acceptance rate", _fixed(lambda c: c.acceptance_rate)),
    ("acceptance by position", _positions),
    ("draft (ms a step)", _stage("draft")),
    ("verify (ms a step)", _stage("verify")),
    ("sample (ms a step)", _stage("sample")),
    ("host (ms a step)", _stage("host")),
    ("step against a plain step", _step_cost),
    ("verify against a plain step", _verify_cost),
    ("output length against baseline", _fixed(lambda c: c.output_length_ratio)),
    ("copied from the source", _fixed(lambda c: c.copied)),
    ("looping answers", _loops),
    ("repeats", _counted(lambda c: c.repeats)),
    ("prompts", _counted(lambda c: c.prompts)),
    ("tokens", _counted(lambda c: c.tokens)),
)


def reported_metrics(cells: Iterable[CellResult]) -> tuple[tuple[Metric, ...], tuple[str, ...]]:
    """Metrics that some cell of the run has, and the names of those that none has."""
    lines = list(cells)
    baselines = _baselines(lines)
    there, absent = [], []
    for name, text in METRICS:
        found = any(text(c, baselines.get((*cell_key(c), c.batch))) != DASH for c in lines)
        if found:
            there.append((name, text))
        else:
            absent.append(name)
    return tuple(there), tuple(absent)


def _baselines(cells: Iterable[CellResult]) -> dict[tuple[Any, ...], CellResult]:
    return {(*cell_key(c), c.batch): c for c in cells if c.baseline}


def details(result: GridResult) -> tuple[Table, ...]:
    """One table per target and cell: metrics down, arms across, rows held back marked.

    A metric that none of the cell's arms has is named in the note instead of a line of dashes.
    """
    metrics, _ = reported_metrics(result.cells)
    baselines, bar = _baselines(result.cells), bar_of(result)
    groups: dict[tuple[str, str, int, str], list[CellResult]] = defaultdict(list)
    for cell in result.cells:
        if has_numbers(cell):
            groups[cell_key(cell)].append(cell)
    targets = {c.target for c in result.cells}
    tables = []
    for cells in groups.values():
        title = cell_title(cells[0])
        if len(targets) > 1:
            title = f"{cells[0].target}: {title}"
        batches = len({c.batch for c in cells}) > 1
        heads = ("", *(_detail_head(c, with_run=batches) for c in cells))
        lines = [[_tinted(name, text, c, baselines, bar) for c in cells] for name, text in metrics]
        there = [any(e.main != DASH for e in line) for line in lines]
        rows = tuple(
            TableRow((Entry(name), *line))
            for (name, _), line, found in zip(metrics, lines, there, strict=True)
            if found
        )
        missing = [m[0] for m, found in zip(metrics, there, strict=True) if not found]
        note = f"Not reported for this cell: {', '.join(missing)}." if missing else ""
        numeric = frozenset(range(1, len(cells) + 1))
        tables.append(Table(title, heads, rows, note, numeric))
    return tuple(tables)


def _detail_head(cell: CellResult, *, with_run: bool) -> str:
    name = arm_name(cell)
    if with_run:
        name = f"{name} {cell.run or cell.batch}"
    return name if cell.publishable else f"{name} (held back)"


def _tinted(
    name: str,
    text: Callable[[CellResult, CellResult | None], str],
    cell: CellResult,
    baselines: Mapping[tuple[Any, ...], CellResult],
    bar: float,
) -> Entry:
    found = text(cell, baselines.get((*cell_key(cell), cell.batch)))
    resolved = cell.speedup is not None and cell.speedup.low is not None
    tone = resolve(cell.speedup, bar=bar) if name == "speedup" and resolved else None
    return Entry(found, tone=tone)
