"""The report's plots as SVG text: same input, same bytes; no dates, no random ids.

Text stays text and inherits the page's font. Ink is drawn in two sentinel colors that become CSS
variables, so one SVG suits light, dark and print. Sizes are in points of a phone's width: the page
may stretch a plot but never has to shrink its letters below legibility.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from slipstream.lab.formats import cell_title, number, speedup_text
from slipstream.lab.results import CellResult, GridResult, Interval
from slipstream.lab.verdict import cell_key, has_numbers

WIDTH = 5.0  # inches: 360 points, one phone
ROW = 0.25  # inches of one bar or interval
_INK, _FAINT, _PAPER = "#010203", "#040506", "#070809"  # replaced by CSS variables
# Okabe and Ito's order, in mid tones that hold on white and on near-black.
_HUES = ("#2f86c8", "#d9822b", "#1f9e78", "#b768b0", "#c8554e", "#8a8d3a", "#5aa7b8", "#8c8c8c")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
STAGES = {"verify": "#2f86c8", "draft": "#d9822b", "sample": "#1f9e78", "host": "#8c8c8c"}
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "xtick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.color": _FAINT,
    "ytick.labelcolor": _INK,
    "ytick.major.size": 0,
    "grid.color": _FAINT,
    "grid.linewidth": 0.4,
}


@dataclass(frozen=True, slots=True)
class Plot:
    """`svg` starts with `<svg`; `alt` says in words what it shows; `keys`: name -> color."""

    title: str
    alt: str
    svg: str
    keys: Mapping[str, str] = field(default_factory=dict)


def arm_colors(result: GridResult) -> dict[str, str]:
    """One color an arm, the same in every plot of a report; the baseline is gray."""
    arms = dict.fromkeys(c.arm for c in result.cells if not c.baseline)
    colors = {arm: _HUES[i % len(_HUES)] for i, arm in enumerate(arms)}
    return colors | {c.arm: "#8c8c8c" for c in result.cells if c.baseline}


def speedup_plots(result: GridResult) -> tuple[Plot, ...]:
    """Per target: every cell's arms with their 95 % intervals and a line at 1.0."""
    colors = arm_colors(result)
    plots = []
    for target, cells in _by_target(c for c in result.cells if c.speedup and not c.baseline):
        with mpl.rc_context(_STYLE | {"svg.hashsalt": f"speedup {target}"}):
            svg = _svg(_speedup_figure(_by_cell(cells), colors))
        alt = "; ".join(
            f"{cell_title(c)}, {_row_name(c)}: {speedup_text(c.speedup)}" for c in cells
        )
        plots.append(Plot(_caption(f"Speedup by cell, {target}", cells), alt, svg))
    return tuple(plots)


def acceptance_plots(result: GridResult) -> tuple[Plot, ...]:
    """Per cell with measured positions: share accepted at each draft position, one line an arm."""
    colors = arm_colors(result)
    marks = {arm: _MARKS[i % len(_MARKS)] for i, arm in enumerate(colors)}
    drawn = [c for c in result.cells if any(v is not None for v in c.by_position)]
    many = len({c.target for c in drawn}) > 1
    plots = []
    for title, cells in _by_cell(drawn):
        name = f"{cells[0].target}: {title}" if many else title
        with mpl.rc_context(_STYLE | {"svg.hashsalt": f"acceptance {name}"}):
            svg = _svg(_acceptance_figure(cells, colors, marks))
        alt = "; ".join(f"{_row_name(c)}: {_rates(c)}" for c in cells)
        plots.append(Plot(_caption(name, cells), alt, svg))
    return tuple(plots)


def stage_plots(result: GridResult) -> tuple[Plot, ...]:
    """Per target: milliseconds of one step of every arm and cell, stacked by stage."""
    plots = []
    for target, cells in _by_target(c for c in result.cells if c.stage_ms):
        with mpl.rc_context(_STYLE | {"svg.hashsalt": f"stages {target}"}):
            svg = _svg(_stage_figure(_by_cell(cells)))
        alt = "; ".join(
            f"{cell_title(c)}, {_row_name(c)}: {number(c.stage_ms.total)} ms"
            for c in cells
            if c.stage_ms
        )
        title = _caption(f"Time per step by stage, {target}", cells)
        plots.append(Plot(title, alt, svg, STAGES))
    return tuple(plots)


# --- grouping -------------------------------------------------------------------------------------


def _by_target(cells: Iterable[CellResult]) -> list[tuple[str, list[CellResult]]]:
    groups: dict[str, list[CellResult]] = defaultdict(list)
    for cell in cells:
        if has_numbers(cell):
            groups[cell.target].append(cell)
    return list(groups.items())


def _by_cell(cells: Iterable[CellResult]) -> list[tuple[str, list[CellResult]]]:
    groups: dict[Any, list[CellResult]] = defaultdict(list)
    for cell in cells:
        groups[cell_key(cell)].append(cell)
    return [(cell_title(group[0]), group) for group in groups.values()]


def _row_name(cell: CellResult) -> str:
    return cell.arm if cell.publishable else f"{cell.arm} (held back)"


def _caption(text: str, cells: Sequence[CellResult]) -> str:
    """A plot whose rows were not measured by this lab says so above itself."""
    labels = dict.fromkeys(c.label or "measured" for c in cells)
    return text if list(labels) == ["measured"] else f"{text} [{', '.join(labels)}]"


def _rates(cell: CellResult) -> str:
    return ", ".join("-" if v is None else f"{v:.2f}" for v in cell.by_position)


# --- figures --------------------------------------------------------------------------------------


def _grouped_axes(
    groups: Sequence[tuple[str, list[CellResult]]], left: float, right: float
) -> tuple[Figure, Axes, list[tuple[float, CellResult]]]:
    """Axes with one line a cell result under its group's heading, top to bottom.

    `left`, `right`: inches kept for row names and values.
    """
    lines = sum(len(cells) + 1.25 for _, cells in groups)
    height = lines * ROW + 0.55
    figure = Figure(figsize=(WIDTH, height))
    box = (left / WIDTH, 0.5 / height, (WIDTH - left - right) / WIDTH, 1 - 0.55 / height)
    axes = figure.add_axes(box)
    axes.set_ylim(-lines, 0)
    axes.set_yticks([])
    rows: list[tuple[float, CellResult]] = []
    y = 0.0
    for title, cells in groups:
        y -= 0.75
        # Paper behind the heading keeps grid lines out of its letters.
        under = {"facecolor": _PAPER, "edgecolor": "none", "pad": 1.5}
        _beside(axes, 0.04 - left, y, title, weight="bold", ha="left", bbox=under, zorder=4)
        for cell in cells:
            y -= 1
            rows.append((y, cell))
            _beside(axes, -0.08, y, _row_name(cell), ha="right")
        y -= 0.5
    return figure, axes, rows


def _beside(axes: Axes, inches: float, y: float, text: str, **how: Any) -> None:
    """Text at row `y`, `inches` from the left edge of the axes (negative: outside)."""
    width = axes.get_position().width * WIDTH
    where = axes.get_yaxis_transform()
    axes.text(inches / width, y, text, transform=where, va="center", clip_on=False, **how)


_TICKS = (0.25, 0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)


def _speedup_figure(
    groups: Sequence[tuple[str, list[CellResult]]], colors: Mapping[str, str]
) -> Figure:
    bounded = any(c.speedup and c.speedup.low is not None for _, cells in groups for c in cells)
    figure, axes, rows = _grouped_axes(groups, *_margins(groups, 1.45 if bounded else 0.6))
    for y, cell in rows:
        _interval_mark(axes, y, cell, colors[cell.arm])
    spans = [_span(c.speedup) for _, c in rows if c.speedup]
    low, high = min([0.9, *(s[0] for s in spans)]), max([1.1, *(s[1] for s in spans)])
    room = (high / low) ** 0.05
    axes.set_xscale("log")  # twice as fast and half as fast are equally far from 1
    axes.set_xlim(low / room, high * room)
    axes.axvline(1.0, color=_INK, linewidth=1, zorder=1)
    axes.grid(axis="x", zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel("speedup over the baseline")
    coarse = high / low > 4
    ticks = [t for t in (_TICKS[::2] if coarse else _TICKS) if low / room <= t <= high * room]
    axes.xaxis.set_major_locator(mpl.ticker.FixedLocator(ticks))
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.xaxis.set_major_formatter("{x:g}×")
    return figure


def _interval_mark(axes: Axes, y: float, cell: CellResult, color: str) -> None:
    if cell.speedup is None:
        return
    low, high = _span(cell.speedup)
    axes.plot([low, high], [y, y], color=color, linewidth=2.2, solid_capstyle="butt", zorder=2)
    face = color if cell.publishable else "none"
    axes.plot([cell.speedup.value], [y], "o", color=color, markerfacecolor=face, ms=5, zorder=3)
    width = axes.get_position().width * WIDTH
    _beside(axes, width + 0.08, y, speedup_text(cell.speedup), ha="left", fontsize=9)


def _span(interval: Interval) -> tuple[float, float]:
    low = interval.value if interval.low is None else interval.low
    return low, interval.value if interval.high is None else interval.high


def _margins(groups: Sequence[tuple[str, list[CellResult]]], right: float) -> tuple[float, float]:
    longest = max((len(_row_name(c)) for _, cells in groups for c in cells), default=4)
    return min(2.3, 0.25 + 0.075 * longest), right


def _acceptance_figure(
    cells: Sequence[CellResult], colors: Mapping[str, str], marks: Mapping[str, str]
) -> Figure:
    figure = Figure(figsize=(WIDTH, 2.4))
    left, right = 0.45, _margins([("", list(cells))], 0)[0] + 0.15
    axes = figure.add_axes((left / WIDTH, 0.18, (WIDTH - left - right) / WIDTH, 0.76))
    width = max(len(c.by_position) for c in cells)
    ends = []
    for cell in cells:
        points = [(i + 1, v) for i, v in enumerate(cell.by_position) if v is not None]
        color, mark = colors[cell.arm], marks[cell.arm]
        axes.plot(*zip(*points, strict=True), color=color, marker=mark, markersize=4, linewidth=1.5)
        ends.append((points[-1][1], cell))
    axes.set_ylim(0, 1)
    axes.set_xlim(0.8, width + 0.2)
    axes.set_xticks(range(1, width + 1))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "", "0.5", "", "1"])
    axes.grid(axis="y")
    axes.set_xlabel("draft position")
    for y, cell in _spread(ends, gap=0.1):
        color, mark = colors[cell.arm], marks[cell.arm]
        inside = WIDTH - left - right
        where = axes.get_yaxis_transform()
        axes.plot([1 + 0.12 / inside], [y], mark, c=color, ms=4, transform=where, clip_on=False)
        _beside(axes, inside + 0.2, y, _row_name(cell), ha="left", color=color)
    return figure


def _spread(ends: Iterable[tuple[float, CellResult]], gap: float) -> list[tuple[float, CellResult]]:
    """Move labels apart vertically, keeping their order, so that none covers another."""
    placed: list[tuple[float, CellResult]] = []
    for y, cell in sorted(ends, key=lambda end: end[0]):
        placed.append((max(y, placed[-1][0] + gap if placed else 0.0), cell))
    over = max(0.0, placed[-1][0] - 0.97) if placed else 0.0
    return [(y - over, cell) for y, cell in placed]


def _stage_figure(groups: Sequence[tuple[str, list[CellResult]]]) -> Figure:
    figure, axes, rows = _grouped_axes(groups, *_margins(groups, 0.8))
    width = axes.get_position().width * WIDTH
    for y, cell in rows:
        if cell.stage_ms is None:
            continue
        start = 0.0
        for stage, color in STAGES.items():
            length = getattr(cell.stage_ms, stage)
            axes.barh(y, length, 0.72, left=start, color=color, zorder=2)
            start += length
        _beside(axes, width + 0.08, y, f"{number(start)} ms", ha="left", fontsize=9)
    axes.set_xlim(0, max(c.stage_ms.total for _, c in rows if c.stage_ms))
    axes.grid(axis="x", zorder=0)
    axes.set_axisbelow(True)
    axes.set_xlabel("milliseconds a step")
    return figure


# --- SVG ------------------------------------------------------------------------------------------


def _svg(figure: Figure) -> str:
    """Serialize without header, date or creator; sentinel colors become CSS variables."""
    FigureCanvasSVG(figure)
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(out, format="svg", transparent=True, metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<(metadata|style).*?</\1>", "", text, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # the same names in every plot of a page
    text = re.sub(r"font-family: [^;]*; ", "", text)
    text = text.replace(_INK, "var(--ink, #777)").replace(_FAINT, "var(--faint, #999)")
    text = text.replace(_PAPER, "var(--paper, #fff)")
    return text.replace("<svg ", '<svg role="img" stroke-linejoin="round" ', 1).strip()
