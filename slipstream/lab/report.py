"""A `GridResult` as markdown and as a terminal table. Both end with what to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from slipstream.lab.report_details import details, reported_metrics
from slipstream.lab.report_tables import (
    Column,
    Entry,
    RowKind,
    Table,
    columns_of,
    gates,
    headline,
    held_back,
    how_measured,
)
from slipstream.lab.results import GateStatus, GridResult, Resolution
from slipstream.lab.verdict import CellVerdict, crossovers, verdicts

NOTHING_PUBLISHABLE = "No row is publishable; the table of rows kept out says why."
_CELLS_ACROSS = 4  # what fits beside the drafter's name in 100 columns

_COLORS = {
    Resolution.FASTER: "green",
    Resolution.SLOWER: "red",
    Resolution.NOT_RESOLVED: "yellow",
    GateStatus.PASS: "green",
    GateStatus.FAIL: "red",
    GateStatus.MISSING: "yellow",
    GateStatus.NOT_APPLICABLE: "dim",
}


def labels_of(result: GridResult) -> tuple[str, ...]:
    """Words such as `simulated` or `reference` that rows of this run carry."""
    return tuple(dict.fromkeys(c.label for c in result.cells if c.label))


def label_line(result: GridResult) -> str:
    """A sentence for the top of a report with labeled rows; empty where all rows are measured."""
    words = labels_of(result)
    return f"Rows marked {', '.join(words)} were not measured by this lab." if words else ""


def absent_line(result: GridResult) -> str:
    """Names the metrics no row of this run reports; empty where all are there."""
    _, absent = reported_metrics(result.cells)
    return f"Not reported by this run: {', '.join(absent)}." if absent else ""


def verdict_line(verdict: CellVerdict, *, with_target: bool) -> str:
    """`Code, 16 users, greedy: faster. Run ngram:3 at 1.21× [1.15, 1.27].`"""
    target = f"{verdict.target}, " if with_target else ""
    title = verdict.title if not target else verdict.title[0].lower() + verdict.title[1:]
    label = f" [{verdict.label}]" if verdict.label else ""
    return f"{target}{title}{label}: {verdict.resolution.value}. {verdict.sentence}"


def many_targets(result: GridResult) -> bool:
    """Whether sentences must name the target."""
    return len({c.target for c in result.cells}) > 1


# --- markdown -------------------------------------------------------------------------------------


def render_markdown(result: GridResult) -> str:
    """The whole report as GitHub-flavored markdown, ending with the verdict per cell."""
    parts = [f"# {result.title}", f"Run `{result.run}`.", label_line(result)]
    parts += ["## Speedup over the baseline", headline_markdown(result)]
    parts += ["## By cell", absent_line(result)]
    for table in details(result):
        parts += [f"### {table.title}", markdown_table(table)]
    for table in (gates(result), held_back(result)):
        parts += [f"## {table.title}", markdown_table(table)]
    parts += ["## Warnings", _bullets(result.warnings) or "None."]
    parts += ["## How it was measured", markdown_table(how_measured(result))]
    parts += ["## Verdict", markdown_verdicts(result)]
    return "\n\n".join(part for part in parts if part) + "\n"


def headline_markdown(result: GridResult) -> str:
    """The headline table, or the sentence that stands for an empty one."""
    table = headline(result)
    return markdown_table(table) if table.rows else NOTHING_PUBLISHABLE


def markdown_table(table: Table) -> str:
    """One table with its note below; a sentence where it has no rows."""
    if not table.rows:
        return "None."
    aligns = ["--:" if i in table.numeric else ":--" for i in range(len(table.columns))]
    lines = [_pipes(table.columns), _pipes(aligns, escaped=False)]
    previous = ""
    for row in table.rows:
        texts = [_entry_text(e) for e in row.entries]
        # A model's name heads its block only, as in the article.
        if table.columns[0] == "Model":
            shown = texts[0] if row.kind is RowKind.BASELINE or texts[0] != previous else ""
            previous, texts[0] = texts[0], shown
        if row.kind is RowKind.VERDICT:
            texts = [f"**{t}**" if t else "" for t in texts]
        lines.append(_pipes(texts))
    text = "\n".join(lines)
    return f"{text}\n\n{table.note}" if table.note else text


def markdown_verdicts(result: GridResult) -> str:
    """Verdict per cell as a list, advice indented below, crossovers last."""
    named = many_targets(result)
    lines = []
    for verdict in verdicts(result):
        lines.append(f"- {_escape(verdict_line(verdict, with_target=named))}")
        lines += [f"  - {_escape(text)}" for text in verdict.advice]
    lines += [f"- {_escape(text)}" for text in crossovers(result)]
    return "\n".join(lines) or "Nothing was measured."


def _entry_text(entry: Entry) -> str:
    return f"{entry.main} ({entry.detail})" if entry.detail else entry.main


def _pipes(texts: Sequence[str], *, escaped: bool = True) -> str:
    return f"| {' | '.join(_escape(t) if escaped else t for t in texts)} |"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {_escape(line)}" for line in lines)


def _escape(text: str) -> str:
    """Keep evidence (which may quote model output) from becoming table or HTML structure."""
    one_line = " ".join(text.split())
    return one_line.replace("|", "\\|").replace("<", "&lt;")


# --- terminal -------------------------------------------------------------------------------------


def render_terminal(result: GridResult) -> RenderableType:
    """Headline tables, what is kept out, warnings and verdicts, for a console of 100 columns."""
    parts: list[RenderableType] = [Text(result.title, style="bold")]
    parts.append(Text(f"Run {result.run}", style="dim"))
    parts += [Text(t, style="yellow") for t in [label_line(result)] if t]
    for target in dict.fromkeys(c.target for c in result.cells):
        parts += _target_tables(result, target)
    if not any(c.publishable for c in result.cells):
        parts.append(Text(NOTHING_PUBLISHABLE))
    parts += _gate_parts(result)
    kept = held_back(result)
    if kept.rows:
        parts.append(_rich_table(kept, with_run=many_runs(result)))
    if result.warnings:
        parts += [Text("\nWarnings", style="bold"), *map(_line, result.warnings)]
    parts.append(Text("\nVerdict", style="bold"))
    named = many_targets(result)
    for verdict in verdicts(result):
        parts.append(_verdict_text(verdict, with_target=named))
        parts += [Padding(Text(text, style="dim"), (0, 0, 0, 4)) for text in verdict.advice]
    parts += [_line(text) for text in crossovers(result)]
    return Group(*parts)


def _gate_parts(result: GridResult) -> list[RenderableType]:
    """Gates that did not pass; the written report has the evidence of them all."""
    if not result.gates:
        return []
    fine = (GateStatus.PASS, GateStatus.NOT_APPLICABLE)
    bad = tuple(g for g in result.gates if g.status not in fine)
    passed = len(result.gates) - len(bad)
    line = Text(f"\nGates: {passed} of {len(result.gates)} passed or not applicable")
    return [line, *([_rich_table(gates(replace(result, gates=bad)))] if bad else [])]


def many_runs(result: GridResult) -> bool:
    """Whether rows must name their run."""
    return len({c.run or c.batch for c in result.cells}) > 1


def _target_tables(result: GridResult, target: str) -> list[RenderableType]:
    cells = tuple(c for c in result.cells if c.target == target)
    if not any(c.publishable for c in cells):
        return []
    one, with_run = replace(result, cells=cells), many_runs(result)
    tables = [headline(one, columns=chunk) for chunk in split_columns(columns_of(cells))]
    return [_rich_table(table, model=target, with_run=with_run) for table in tables]


def split_columns(columns: Sequence[Column]) -> list[tuple[Column, ...]]:
    """Chunks of nearly equal size that fit the width; the last leaves room for tokens and run."""
    if not columns:
        return []
    chunks = ceil((len(columns) + 1) / _CELLS_ACROSS)
    size = ceil((len(columns) + 1) / chunks)
    return [tuple(columns[i : i + size]) for i in range(0, len(columns), size)]


def _rich_table(table: Table, *, model: str | None = None, with_run: bool = True) -> RenderableType:
    """`model` set: the first column is the same everywhere and moves into the title.

    `with_run` false: every row is of the run already named above, so that column goes.
    """
    skip = model is not None
    end = len(table.columns) - (not with_run and table.columns[-1] == "Run")
    drawn = RichTable(title=escape(model or table.title), title_justify="left")
    for index, head in enumerate(table.columns[:end]):
        if index >= skip:
            drawn.add_column(
                escape(head.replace(": ", "\n")),
                justify="right" if index in table.numeric else "left",
                overflow="fold",
            )
    for row in table.rows:
        style = {RowKind.BASELINE: "dim", RowKind.VERDICT: "bold"}.get(row.kind, "")
        if row.kind is RowKind.VERDICT:
            drawn.add_section()
        drawn.add_row(*map(_rich_entry, row.entries[skip:end]), style=style)
    return Padding(drawn, (1, 0, 0, 0))


def _rich_entry(entry: Entry) -> Text:
    color = _COLORS[entry.tone] if entry.tone else ""
    text = Text(entry.main, style="" if entry.detail else color)
    if entry.detail:
        interval_below = entry.detail.replace("× [", "×\n[")
        text.append(f"\n{interval_below}", style=color)
    return text


def _verdict_text(verdict: CellVerdict, *, with_target: bool) -> RenderableType:
    text = Text(verdict_line(verdict, with_target=with_target))
    text.highlight_words([f": {verdict.resolution.value}."], style=_COLORS[verdict.resolution])
    return Padding(text, (0, 0, 0, 2))


def _line(text: str) -> RenderableType:
    return Padding(Text(text), (0, 0, 0, 2))
