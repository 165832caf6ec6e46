"""The tables of a report as plain text values; markdown, terminal and HTML only dress them.

`Entry.detail` belongs beside `Entry.main` and is smaller or in parentheses; `Entry.tone` colors it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
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
    bar_of,
    has_numbers,
    resolve,
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
        dress = partial(_headline_entry, bar=bar_of(result))
        rows += [
            _headline_row(key, row, shown, tokens_column(everything) if closing else None, dress)
            for key, row in mine.items()
        ]
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
    tokens: Column | None,
    dress: Callable[[CellResult | None], Entry],
) -> TableRow:
    """`tokens`: the cell of the tokens/step column, None where that column is not shown."""
    any_cell = next(iter(row.values()))
    entries = [Entry(key[0]), Entry(plain_arm_name(any_cell), any_cell.label)]
    entries += [dress(row.get(column)) for column in shown]
    if tokens is not None:
        cell = row.get(tokens)
        hidden = cell is None or cell.baseline or not cell.publishable
        entries.append(Entry(DASH if hidden or cell is None else fixed(cell.tokens_per_step)))
        entries.append(Entry(any_cell.run or any_cell.batch))
    return TableRow(tuple(entries), RowKind.BASELINE if any_cell.baseline else RowKind.ARM)


def _headline_entry(cell: CellResult | None, *, bar: float) -> Entry:
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
    return Entry(number(value.value), speedup_text(cell.speedup), resolve(cell.speedup, bar=bar))


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
