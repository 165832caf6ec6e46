"""Plots are deterministic, theme-neutral, self-contained SVG that shows every row."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from report_samples import ARMS, CELLS, cell, drafted, grid

from slipstream.lab.plots import STAGES, acceptance_plots, arm_colors, speedup_plots, stage_plots
from slipstream.lab.reference import load_reference
from slipstream.lab.results import GridResult, Interval


def result_of(*cells):
    return GridResult("run", "title", {}, tuple(cells), (), ())


def texts(plot):
    return [e.text for e in ET.fromstring(plot.svg).iter() if e.tag.endswith("text")]


ALL = (speedup_plots, acceptance_plots, stage_plots)


@pytest.fixture(scope="module")
def drawn():
    return {make: make(grid()) for make in ALL}


@pytest.mark.parametrize("make", ALL)
def test_same_input_same_bytes(make, drawn):
    assert make(grid()) == drawn[make]


@pytest.mark.parametrize("make", ALL)
def test_svg_has_no_dates_resources_or_fixed_ink(make, drawn):
    for plot in drawn[make]:
        assert plot.svg.startswith("<svg")
        assert not re.search(r"<metadata|<style|<image|date|font-family|#010203|#040506", plot.svg)
        assert not re.search(r'href="(?!#)', plot.svg)
        assert "var(--ink" in plot.svg
        assert "[synthetic]" in plot.title
        assert plot.alt


def test_speedup_plot_shows_every_interval(drawn):
    (plot,) = drawn[speedup_plots]
    shown = texts(plot)
    assert "1.31× [1.25, 1.37]" in shown
    assert shown.count("ngram:3") == len(CELLS)
    assert "suffix (held back)" in shown
    assert sum("×" in t and "[" in t for t in shown) == len(CELLS) * len(ARMS)


def test_stage_plot_shows_totals_and_the_baseline(drawn):
    (plot,) = drawn[stage_plots]
    shown = texts(plot)
    assert shown.count("none") == len(CELLS)
    assert "22.4 ms" in shown
    assert plot.keys == STAGES


def test_acceptance_plot_labels_each_line(drawn):
    plots = drawn[acceptance_plots]
    assert len(plots) == len(CELLS)
    assert {"ngram:3", "ngram:8"} <= set(texts(plots[0]))


def test_absent_numbers_draw_nothing():
    bare = result_of(cell(stage_ms=None), drafted("x", None, stage_ms=None, by_position=(None,)))
    assert [make(bare) for make in ALL] == [(), (), ()]


def test_a_hole_in_the_positions_is_no_zero():
    holed = drafted("x", (1.0, 1.2), by_position=(0.9, None, 0.7))
    (plot,) = acceptance_plots(result_of(cell(), holed))
    assert "0.90, -, 0.70" in plot.alt


def test_medians_without_intervals_are_points():
    point = replace(drafted("x", (2.3, 2.5)), speedup=Interval(2.42))
    (plot,) = speedup_plots(result_of(cell(), point))
    assert "2.42×" in texts(plot)


def test_reference_draws_one_speedup_plot_a_target_and_nothing_it_did_not_measure():
    reference = load_reference()
    assert len(speedup_plots(reference)) == 3
    assert acceptance_plots(reference) == ()
    assert stage_plots(reference) == ()


def test_arms_keep_their_color():
    colors = arm_colors(grid())
    assert len({colors[a] for a in ("ngram:3", "ngram:8", "suffix", "none")}) == 4
