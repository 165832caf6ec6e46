"""A `GridResult` as one HTML file: no scripts, no external resources, readable on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape

from slipstream.lab.plots import (
    Plot,
    acceptance_plots,
    speedup_plots,
    stage_plots,
)
from slipstream.lab.report import NOTHING_PUBLISHABLE, absent_line, label_line, many_targets
from slipstream.lab.report_details import details
from slipstream.lab.report_style import CSS
from slipstream.lab.report_tables import (
    Entry,
    RowKind,
    Table,
    TableRow,
    gates,
    headline,
    held_back,
    how_measured,
)
from slipstream.lab.results import GateStatus, GridResult, Resolution
from slipstream.lab.verdict import CellVerdict, crossovers, verdicts

_CLASSES = {
    Resolution.FASTER: "good",
    Resolution.SLOWER: "bad",
    Resolution.NOT_RESOLVED: "open",
    GateStatus.PASS: "good",
    GateStatus.FAIL: "bad",
    GateStatus.MISSING: "open",
    GateStatus.NOT_APPLICABLE: "quiet",
}


def render_html(result: GridResult) -> str:
    """The whole report; every text from the run is escaped."""
    bars = (*speedup_plots(result), *stage_plots(result))
    sections = [
        ("speedup", "Speedup over the baseline", _headline(result)),
        ("plots", "Speedup and time per step", _figures(bars)),
        ("acceptance", "Acceptance by position", _figures(acceptance_plots(result))),
        ("cells", "By cell", _details(result)),
        ("gates", "Gates", _table(gates(result), wraps=True)),
        ("kept-out", "Kept out of the headline table", _table(held_back(result), wraps=True)),
        ("warnings", "Warnings", _list(result.warnings) or "<p>None.</p>"),
        ("measured", "How it was measured", _table(how_measured(result), wraps=True)),
        ("verdict", "Verdict", _verdicts(result)),
    ]
    shown = [(name, title, body) for name, title, body in sections if body]
    links = "".join(f'<a href="#{name}">{escape(title)}</a>' for name, title, _ in shown)
    label = label_line(result)
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(result.title)}</title>\n<style>{CSS}</style>\n</head>\n<body>",
            f"<header><h1>{escape(result.title)}</h1>",
            f'<p class="quiet">Run <code>{escape(result.run)}</code></p>',
            f'<p class="label">{escape(label)}</p>' if label else "",
            f"<nav>{links}</nav></header>\n<main>",
            *(_section(*section) for section in shown),
            "</main>\n</body>\n</html>\n",
        ]
    )


def _section(name: str, title: str, body: str) -> str:
    return f'<section id="{name}">\n<h2>{escape(title)}</h2>\n{body}\n</section>'


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


# --- tables ---------------------------------------------------------------------------------------


def _headline(result: GridResult) -> str:
    table = headline(result)
    return _table(table, frozen=2) if table.rows else f"<p>{NOTHING_PUBLISHABLE}</p>"


def _table(table: Table, *, frozen: int = 1, wraps: bool = False) -> str:
    """`frozen`: leading columns that head a row. `wraps`: text columns break instead of scroll."""
    if not table.rows:
        return "<p>None.</p>"
    heads = "".join(
        f'<th scope="col"{_classes(["number"] if i in table.numeric else [])}>{_head(text)}</th>'
        for i, text in enumerate(table.columns)
    )
    blocked = table.columns[0] == "Model" and frozen == 2
    rows = _blocks(table) if blocked else "".join(_row(r, table, 0) for r in table.rows)
    if blocked:
        heads = heads.split("</th>", 1)[1]
    kind = "wraps" if wraps else "headline" if blocked else "dense"
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table class="{kind}">'
        f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _head(text: str) -> str:
    """A heading with its unit below."""
    name, colon, unit = text.partition(": ")
    name = escape(re.sub(r"(\d) user", "\\1\u00a0user", name))
    return f"{name}<small>{escape(unit)}</small>" if colon else name


def _blocks(table: Table) -> str:
    """Rows under a line with the model's name instead of a column that repeats it."""
    rows, model = [], ""
    for row in table.rows:
        if row.entries[0].main != model:
            model = row.entries[0].main
            rows.append(
                f'<tr class="block"><th scope="rowgroup" colspan="{len(table.columns) - 1}">'
                f"<span>{escape(model)}</span></th></tr>"
            )
        rows.append(_row(row, table, 1))
    return "".join(rows)


def _row(row: TableRow, table: Table, first: int) -> str:
    cells = [f'<th scope="row">{_value(row.entries[first])}</th>']
    for index, entry in enumerate(row.entries[first + 1 :], start=first + 1):
        classes = ["number"] if index in table.numeric else []
        cells.append(f"<td{_classes([*classes, *_tone(entry)])}>{_value(entry)}</td>")
    kind = "" if row.kind is RowKind.ARM else f' class="{row.kind.value}"'
    return f"<tr{kind}>{''.join(cells)}</tr>"


def _value(entry: Entry) -> str:
    lines = escape(entry.detail).replace("× [", "×<br>[")
    detail = f"<small>{lines}</small>" if entry.detail else ""
    # An interval stays on one line where a narrow column breaks.
    main = re.sub(r"\[[^]]*\]", lambda m: m[0].replace(" ", "\u00a0"), escape(entry.main))
    return f"<span>{main}</span>{detail}"


def _tone(entry: Entry) -> list[str]:
    return [_CLASSES[entry.tone]] if entry.tone else []


def _classes(names: Sequence[str]) -> str:
    return f' class="{" ".join(names)}"' if names else ""


def _details(result: GridResult) -> str:
    parts = [f"<p>{escape(absent_line(result))}</p>"] if absent_line(result) else []
    for table in details(result):
        parts.append(f"<details open><summary>{escape(table.title)}</summary>{_table(table)}")
        parts.append("</details>")
    return "".join(parts)


# --- plots and verdicts ---------------------------------------------------------------------------


def _figures(plots: Sequence[Plot]) -> str:
    drawn = "".join(
        f'<figure><figcaption>{escape(p.title)}</figcaption>{_keys(p)}<div role="img"'
        f' aria-label="{escape(p.alt)}">{p.svg}</div></figure>'
        for p in plots
    )
    return f'<div class="figures">{drawn}</div>' if drawn else ""


def _keys(plot: Plot) -> str:
    keys = "".join(f'<span style="--key:{c}">{escape(k)}</span>' for k, c in plot.keys.items())
    return f'<p class="keys">{keys}</p>' if keys else ""


def _verdicts(result: GridResult) -> str:
    named = many_targets(result)
    cards = "".join(_card(verdict, with_target=named) for verdict in verdicts(result))
    return f'<div class="cards">{cards}</div>{_list(crossovers(result))}'


def _card(verdict: CellVerdict, *, with_target: bool) -> str:
    tone = _CLASSES[verdict.resolution]
    target = f'<p class="quiet">{escape(verdict.target)}</p>' if with_target else ""
    label = f' <span class="label">{escape(verdict.label)}</span>' if verdict.label else ""
    return (
        f'<article class="{tone}"><h3>{escape(verdict.title)}{label}</h3>{target}'
        f'<p><b class="{tone}">{verdict.resolution.value}</b>. {escape(verdict.sentence)}</p>'
        f"{_list(verdict.advice)}</article>"
    )
