"""The tables of a report as plain text values; markdown, terminal and HTML only dress them.

`Entry.detail` belongs beside `Entry.main` and is smaller or in parentheses; `Entry.tone` colors it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slipstream.lab.formats import (
    DASH,
    arm_name,
    cell_title,
    fixed,
    headline_unit,
    headline_value,
    measured,
    number,
    plain_arm_name,
    ratio,
    speedup_text,
    users_text,
)
from slipstream.lab.results import CellResult, GateStatus, GridResult, Interval, Resolution
from slipstream.lab.verdict import (
    CellVerdict,
    cell_key,
    has_numbers,
    resolve,
    step_cost,
    verdicts,
)

Column = tuple[str, int, str]  # traffic, users, sampling
RowKey = tuple[str, str, str]  # target, batch, arm


class RowKind(Enum):
    """How a row is dressed."""

    BASELINE = "baseline"
    ARM = "arm"
    VERDICT = "verdict"


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of a table."""

    main: str
    detail: str = ""
    tone: Resolution | GateStatus | None = None


@dataclass(frozen=True, slots=True)
class TableRow:
    """Entries in the order of the table's columns."""

    entries: tuple[Entry, ...]
    kind: RowKind = RowKind.ARM


@dataclass(frozen=True, slots=True)
class Table:
    """`numeric` holds the indices of columns that are aligned right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""
    numeric: frozenset[int] = frozenset()


# --- the headline table ---------------------------------------------------------------------------


def columns_of(cells: Iterable[CellResult]) -> tuple[Column, ...]:
    """Cells present, in order of first appearance."""
    return tuple(dict.fromkeys((c.traffic, c.users, c.sampling) for c in cells))


def column_head(cells: Iterable[CellResult], column: Column) -> str:
    """`Code, 16 users, greedy: tok/s`."""
    cell = next(c for c in cells if (c.traffic, c.users, c.sampling) == column)
    return f"{cell_title(cell)}: {headline_unit(cell)}"


def tokens_column(columns: Sequence[Column]) -> Column | None:
    """Which cell the tokens/step column shows: code with the most users, else the last one."""
    code = [c for c in columns if c[0] == "code"]
    if code:
        return max(code, key=lambda c: (c[1], c[2] == "greedy"))
    return columns[-1] if columns else None


def publishable_rows(cells: Sequence[CellResult]) -> dict[RowKey, dict[Column, CellResult]]:
    """Rows with at least one publishable cell, all their cells, in order of appearance."""
    rows: dict[RowKey, dict[Column, CellResult]] = defaultdict(dict)
    for cell in cells:
        rows[cell.target, cell.batch, cell.arm][cell.traffic, cell.users, cell.sampling] = cell
    return {key: row for key, row in rows.items() if any(c.publishable for c in row.values())}


def headline(result: GridResult, *, columns: Sequence[Column] | None = None) -> Table:
    """The article's table over the cells present, each block of a target ending in its verdicts.

    `columns` picks the cells to show; tokens/step and Run come with the last of them.
    """
    everything = columns_of(result.cells)
    shown = tuple(columns) if columns is not None else everything
    closing = bool(shown) and shown[-1] == everything[-1]
    rows: list[TableRow] = []
    keyed = publishable_rows(result.cells)
    judged = verdicts(result)
    for target in dict.fromkeys(key[0] for key in keyed):
        mine = {key: row for key, row in keyed.items() if key[0] == target}
        rows += [_headline_row(key, row, shown, everything, closing) for key, row in mine.items()]
        rows.append(_verdict_row([v for v in judged if v.target == target], shown, closing))
    heads = ["Model", "Drafter", *(column_head(result.cells, c) for c in shown)]
    if closing:
        heads += [_tokens_head(everything), "Run"]
    numeric = frozenset(range(2, 2 + len(shown) + closing))
    return Table("Speedup over the baseline", tuple(heads), tuple(rows), _NOTE, numeric)


_NOTE = (
    "Each ratio compares with the baseline row directly above it, from the same batch of runs on"
    " the same prompts; brackets hold its 95 % interval. Tokens/step counts the verified token"
    " too, so 1.0 means no draft token was kept. A dash means not measured."
)


def _tokens_head(columns: Sequence[Column]) -> str:
    column = tokens_column(columns)
    if column is None:
        return "Tokens/step"
    traffic, users, sampling = column
    alone = sum(c[0] == traffic for c in columns) == 1
    return f"Tokens/step ({traffic if alone else _short(traffic, users, sampling)})"


def _short(traffic: str, users: int, sampling: str) -> str:
    return ", ".join(part for part in (traffic, users_text(users), sampling) if part)


def _headline_row(
    key: RowKey,
    row: Mapping[Column, CellResult],
    shown: Sequence[Column],
    everything: Sequence[Column],
    closing: bool,
) -> TableRow:
    any_cell = next(iter(row.values()))
    entries = [Entry(key[0]), Entry(plain_arm_name(any_cell), any_cell.label)]
    entries += [_headline_entry(row.get(column)) for column in shown]
    if closing:
        column = tokens_column(everything)
        cell = row.get(column) if column else None
        hidden = cell is None or cell.baseline or not cell.publishable
        entries.append(Entry(DASH if hidden or cell is None else fixed(cell.tokens_per_step)))
        entries.append(Entry(any_cell.run or any_cell.batch))
    return TableRow(tuple(entries), RowKind.BASELINE if any_cell.baseline else RowKind.ARM)


def _headline_entry(cell: CellResult | None) -> Entry:
    if cell is None:
        return Entry(DASH)
    if not cell.publishable:
        return Entry("held back")
    value = headline_value(cell)
    if cell.baseline or value is None:
        return Entry(number(value.value if value else None))
    if cell.published_ratio is not None:
        return Entry(number(value.value), ratio(cell.published_ratio))
    if cell.speedup is None:
        return Entry(number(value.value), "no ratio")
    return Entry(number(value.value), speedup_text(cell.speedup), resolve(cell.speedup))


def _verdict_row(judged: Sequence[CellVerdict], shown: Sequence[Column], closing: bool) -> TableRow:
    by_column = {(v.traffic, v.users, v.sampling): v for v in judged}
    entries = [Entry(judged[0].target if judged else ""), Entry("Verdict")]
    for column in shown:
        verdict = by_column.get(column)
        if verdict is None:
            entries.append(Entry(DASH))
        else:
            entries.append(
                Entry(verdict.resolution.value, _verdict_detail(verdict), verdict.resolution)
            )
    return TableRow((*entries, *([Entry("")] * (2 * closing))), RowKind.VERDICT)


def _verdict_detail(verdict: CellVerdict) -> str:
    if verdict.best is None:
        return "nothing to compare"
    no_interval = verdict.best.speedup is None or verdict.best.speedup.low is None
    return "no interval" if no_interval else f"run {verdict.run}"


# --- detail by cell -------------------------------------------------------------------------------

Metric = tuple[str, Callable[[CellResult, CellResult | None], str]]


def _plain(read: Callable[[CellResult], float | None]) -> Callable[..., str]:
    return lambda cell, _baseline: number(read(cell))


def _with_interval(read: Callable[[CellResult], Interval | None]) -> Callable[..., str]:
    return lambda cell, _baseline: measured(read(cell))


def _fixed(read: Callable[[CellResult], float | None]) -> Callable[..., str]:
    return lambda cell, _baseline: fixed(read(cell))


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


def _counted(read: Callable[[CellResult], int]) -> Callable[[CellResult, CellResult | None], str]:
    """Counts that a source without repeats and prompts (all zero) did not report."""
    return lambda cell, _: f"{read(cell):,}" if cell.repeats or cell.tokens else DASH


METRICS: tuple[Metric, ...] = (
    ("ms/token", _with_interval(lambda c: c.ms_per_token)),
    ("tok/s per user", _with_interval(lambda c: c.user_tok_s)),
    ("tok/s total", _with_interval(lambda c: c.total_tok_s)),
    ("TTFT (ms)", _with_interval(lambda c: c.ttft_ms)),
    ("speedup", _speedup),
    ("efficiency", _fixed(lambda c: c.efficiency)),
    ("tokens per step", _plain(lambda c: c.tokens_per_step)),
    ("acceptance length", _fixed(lambda c: c.acceptance_length)),
    ("acceptance rate", _fixed(lambda c: c.acceptance_rate)),
    ("acceptance by position", _positions),
    ("draft (ms a step)", _stage("draft")),
    ("verify (ms a step)", _stage("verify")),
    ("sample (ms a step)", _stage("sample")),
    ("host (ms a step)", _stage("host")),
    ("verify against a plain step", _verify_cost),
    ("output length against baseline", _fixed(lambda c: c.output_length_ratio)),
    ("looping answers", _counted(lambda c: c.looping)),
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
    baselines = _baselines(result.cells)
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
        lines = [[_tinted(name, text, c, baselines) for c in cells] for name, text in metrics]
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
) -> Entry:
    found = text(cell, baselines.get((*cell_key(cell), cell.batch)))
    resolved = cell.speedup is not None and cell.speedup.low is not None
    tone = resolve(cell.speedup) if name == "speedup" and resolved else None
    return Entry(found, tone=tone)


# --- gates, held-back rows, how it was measured ---------------------------------------------------


def gates(result: GridResult) -> Table:
    """Every gate with its bar and evidence."""
    rows = [
        TableRow(
            (
                Entry(g.arm),
                Entry(g.gate),
                Entry(g.status.value, tone=g.status),
                Entry(measured(Interval(g.value, g.low, g.high)) if g.value is not None else DASH),
                Entry(number(g.bar)),
                Entry(g.evidence or DASH),
            )
        )
        for g in result.gates
    ]
    heads = ("Drafter", "Gate", "Result", "Value", "Bar", "Evidence")
    return Table("Gates", heads, tuple(rows), numeric=frozenset({3, 4}))


def held_back(result: GridResult) -> Table:
    """Rows kept out of the headline table, what they measured, and why they are out."""
    groups: dict[tuple[str, str, str, tuple[str, ...]], list[CellResult]] = defaultdict(list)
    for cell in result.cells:
        if not cell.publishable:
            groups[cell.target, cell.batch, arm_name(cell), cell.reasons].append(cell)
    rows = []
    for (target, _, name, reasons), cells in groups.items():
        seen = "; ".join(_held_value(c) for c in cells if has_numbers(c))
        why = "; ".join(reasons) or "no reason was recorded"
        run = cells[0].run or cells[0].batch
        rows.append(TableRow(tuple(map(Entry, (target, name, seen or DASH, why, run)))))
    heads = ("Model", "Drafter", "Measured", "Why it is kept out", "Run")
    return Table("Kept out of the headline table", heads, tuple(rows))


def _held_value(cell: CellResult) -> str:
    value = headline_value(cell)
    text = f"{cell_title(cell)}: {number(value.value if value else None)} {headline_unit(cell)}"
    if cell.tokens_per_step is not None:
        text += f", {number(cell.tokens_per_step)} tokens/step"
    return f"{text} ({speedup_text(cell.speedup)})" if cell.speedup else text


def how_measured(result: GridResult) -> Table:
    """`meta` as lines, nested keys joined by a dot."""
    rows = [TableRow((Entry(k), Entry(v))) for k, v in flatten(result.meta)]
    return Table("How it was measured", ("What", "Value"), tuple(rows))


def flatten(meta: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Leaves of nested mappings, lists on one line, None as a dash."""
    lines: list[tuple[str, str]] = []
    for key, value in meta.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            lines += flatten(value, f"{name}.")
        elif isinstance(value, list | tuple):
            lines.append((name, _listed(value)))
        else:
            lines.append((name, DASH if value is None else str(value)))
    return lines


def _listed(values: Sequence[Any]) -> str:
    if any(isinstance(v, Mapping) for v in values):
        return "; ".join(
            ", ".join(f"{k} {v}" for k, v in flatten(item))
            if isinstance(item, Mapping)
            else str(item)
            for item in values
        )
    return ", ".join(map(str, values)) or DASH
