"""The report says everything it should, in every form, and never says zero for absent."""

import io
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from report_samples import CELLS, cell, drafted, grid
from rich.console import Console

from slipstream.errors import LedgerError
from slipstream.lab.formats import measured, number, ratio, speedup_text
from slipstream.lab.reference import load_reference
from slipstream.lab.report import absent_line, render_markdown, render_terminal, split_columns
from slipstream.lab.report_details import details
from slipstream.lab.report_html import render_html
from slipstream.lab.report_tables import flatten, headline, held_back
from slipstream.lab.results import GridResult, Interval
from slipstream.lab.results_json import load_result, save_result
from slipstream.types import StageTimes


def result_of(*cells, **changes):
    return replace(GridResult("run-1", "A title", {}, tuple(cells), (), ()), **changes)


@pytest.fixture(scope="module")
def result():
    return grid()


@pytest.fixture(scope="module")
def markdown(result):
    return render_markdown(result)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (0.0, "0.0"), (4.7, "4.7"), (4.71, "4.71"), (14.0, "14.0"), (1051.2, "1,051")],
)
def test_number(value, text):
    assert number(value) == text


def test_ratio_does_not_round_a_resolved_bound_to_one():
    assert speedup_text(Interval(1.02, 1.003, 1.04)) == "1.02× [1.003, 1.04]"
    assert ratio(1.0) == "1.00×"
    assert speedup_text(Interval(2.42)) == "2.42×"
    assert measured(Interval(22.4, 21.9, 23.0)) == "22.4 [21.9, 23.0]"


def test_sections_come_in_order_and_the_verdict_ends_the_report(markdown):
    heads = re.findall(r"^## (.*)$", markdown, re.MULTILINE)
    assert heads == [
        "Speedup over the baseline",
        "By cell",
        "Gates",
        "Kept out of the headline table",
        "Warnings",
        "How it was measured",
        "Verdict",
    ]


def test_headline_has_the_articles_columns_and_a_verdict_row(result, markdown):
    table = headline(result)
    assert table.columns[:3] == ("Model", "Drafter", "Chat, 1 user, sampled: ms/token")
    assert "Code, 16 users, greedy: tok/s" in table.columns
    assert table.columns[-2:] == ("Tokens/step (code, 16 users, greedy)", "Run")
    assert len(table.columns) == 2 + len(CELLS) + 2
    assert {len(row.entries) for row in table.rows} == {len(table.columns)}
    assert "411 (1.31× [1.25, 1.37])" in markdown
    last = table.rows[-1].entries
    assert [e.main for e in last[1:4]] == ["Verdict", "not resolved", "not resolved"]
    assert last[4].main == "faster"
    assert last[4].detail == "run suffix"


def test_a_cell_held_back_is_out_of_the_headline_and_explained(result, markdown):
    suffix = next(r for r in headline(result).rows if r.entries[1].main == "suffix")
    assert suffix.entries[6].main == "held back"
    kept = markdown[markdown.index("## Kept out") : markdown.index("## Warnings")]
    assert "needle gate failed: 0.50 under the bar of 0.67" in kept
    assert "20.6 ms/token" in kept, "the measurement stays"


def test_a_row_without_any_publishable_cell_leaves_the_headline():
    bad = drafted("mtp:3", (1.2, 1.4), publishable=False, reasons=("json gate missing",))
    result = result_of(cell(), bad)
    assert [r.entries[1].main for r in headline(result).rows] == ["none (baseline)", "Verdict"]
    assert held_back(result).rows[0].entries[3].main == "json gate missing"


def test_absent_is_a_dash_never_zero():
    bare = drafted("http:3", (1.1, 1.2), ttft_ms=None, stage_ms=None, by_position=(0.5, None))
    bare = replace(bare, tokens_per_step=None, acceptance_length=None, efficiency=None)
    (table,) = details(result_of(cell(), bare))
    lines = {row.entries[0].main: [e.main for e in row.entries[1:]] for row in table.rows}
    assert lines["TTFT (ms)"] == ["88.0 [81.0, 97.0]", "-"]
    assert lines["verify (ms a step)"] == ["20.1", "-"]
    assert lines["draft (ms a step)"] == ["0.0", "-"], "a measured zero is a zero"
    assert lines["acceptance by position"] == ["-", "0.50 -"]
    assert "efficiency" not in lines
    assert "efficiency" in absent_line(result_of(cell(), bare))
    both = result_of(cell(), bare, drafted("ngram:3", (1.1, 1.2), users=16))
    assert "efficiency" in details(both)[0].note


def test_detail_shows_every_number_of_the_issue(result):
    table = next(t for t in details(result) if t.title == "Code, 16 users, greedy")
    names = {row.entries[0].main for row in table.rows}
    assert names == {
        "ms/token",
        "tok/s per user",
        "tok/s total",
        "TTFT (ms)",
        "speedup",
        "efficiency",
        "tokens per step",
        "acceptance length",
        "acceptance rate",
        "acceptance by position",
        "draft (ms a step)",
        "verify (ms a step)",
        "sample (ms a step)",
        "host (ms a step)",
        "step against a plain step",
        "verify against a plain step",
        "output length against baseline",
        "looping answers",
        "repeats",
        "prompts",
        "tokens",
    }


def test_verify_cost_compares_with_the_baseline_of_the_same_cell_and_batch():
    plain = cell(stage_ms=StageTimes(0.0, 10.0, 0.0, 0.0))
    other = cell(stage_ms=StageTimes(0.0, 5.0, 0.0, 0.0), batch="other")
    arm = drafted("mtp:4", (0.7, 0.8), stage_ms=StageTimes(0.0, 26.0, 0.0, 0.0))
    (table,) = details(result_of(plain, arm, other))
    line = next(r for r in table.rows if r.entries[0].main == "verify against a plain step")
    assert [e.main for e in line.entries[1:]] == ["-", "2.60×", "-"]


def test_labels_travel_with_their_rows(result, markdown):
    assert "Rows marked synthetic were not measured by this lab." in markdown
    for row in headline(result).rows:
        if row.entries[1].main != "Verdict":
            assert row.entries[1].detail == "synthetic"
    for table in details(result):
        assert all("[synthetic]" in head for head in table.columns[1:])
    verdict = markdown[markdown.index("## Verdict") :]
    assert verdict.count("[synthetic]") >= len(CELLS)


def test_measured_rows_carry_no_label():
    text = render_markdown(result_of(cell(), drafted("ngram:3", (1.1, 1.2))))
    assert "not measured by this lab" not in text
    assert "[" not in next(li for li in text.splitlines() if "none (baseline)" in li)


def test_evidence_cannot_break_out_of_markdown(markdown):
    assert "No fork \\| 24 same." in markdown
    assert "<script>" not in markdown


def test_meta_is_flattened():
    meta = {"a": {"b": 1, "c": None}, "d": [1, 2], "e": [{"x": 1}, {"x": 2}], "f": []}
    expected = [("a.b", "1"), ("a.c", "-"), ("d", "1, 2"), ("e", "x 1; x 2"), ("f", "-")]
    assert flatten(meta) == expected


@pytest.mark.parametrize("make", [grid, load_reference])
def test_terminal_fits_100_columns_and_ends_with_the_verdict(make):
    out = io.StringIO()
    Console(file=out, width=100).print(render_terminal(make()))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 100
    text = out.getvalue()
    assert "…" not in text, "nothing is cut off"
    assert text.rindex("Verdict") > text.rindex("Warnings")
    for ratio_text in ("1.31×", "2.52×") if make is grid else ("3.00×", "0.47×"):
        assert ratio_text in text


def test_terminal_names_the_gates_that_did_not_pass_and_the_one_run_once(result):
    out = io.StringIO()
    Console(file=out, width=100).print(render_terminal(result))
    text = out.getvalue()
    assert "Gates: 3 of 5 passed or not applicable" in text
    assert "6 of 12 found." in text
    assert "12 of 12 found." not in text
    assert text.count(result.run) == 1


@pytest.mark.parametrize("count", range(1, 12))
def test_split_columns_keeps_order_and_room_for_the_last_two(count):
    columns = [("chat", n, "") for n in range(count)]
    chunks = split_columns(columns)
    assert [c for chunk in chunks for c in chunk] == columns
    assert all(len(chunk) <= 4 for chunk in chunks)
    assert len(chunks[-1]) <= 3


def test_a_run_without_publishable_rows_says_so_everywhere():
    result = result_of(cell(publishable=False, reasons=("a quick run",)))
    out = io.StringIO()
    Console(file=out, width=100).print(render_terminal(result))
    for text in (render_markdown(result), render_html(result), out.getvalue()):
        assert "No row is publishable" in text
        assert "a quick run" in text


def test_empty_results_render():
    empty = result_of()
    assert "Nothing was measured." in render_markdown(empty)
    assert "</html>" in render_html(empty)
    Console(file=io.StringIO(), width=100).print(render_terminal(empty))


# --- HTML -----------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Collects tags and checks that they nest."""

    VOID = frozenset({"meta", "br", "path", "use", "link", "img"})

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.ids = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module", params=[grid, load_reference])
def html(request):
    return render_html(request.param())


def test_html_is_well_formed_and_fetches_nothing(html):
    page = Page()
    page.feed(html)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    for name, value in page.attributes:
        if name in ("href", "src", "xlink:href"):
            assert value.startswith("#"), value
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_html_ids_are_unique_and_every_anchor_lands(html):
    page = Page()
    page.feed(html)
    assert len(page.ids) == len(set(page.ids))
    anchors = {value[1:] for name, value in page.attributes if name.endswith("href")}
    assert anchors <= set(re.findall(r'id="([^"]*)"', html))


def test_html_escapes_what_models_wrote(result):
    html = render_html(result)
    assert "<script>" not in html
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; other" in html


def test_html_suits_dark_phone_and_print(html):
    assert "prefers-color-scheme: dark" in html
    assert "width=device-width" in html
    assert "@media print" in html


def test_html_ends_with_the_verdict(html):
    sections = re.findall(r'<section id="([^"]*)"', html)
    assert sections[0] == "speedup"
    assert sections[-1] == "verdict"


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [grid, load_reference])
def test_results_survive_json(make, tmp_path):
    result = make()
    save_result(result, tmp_path / "deep" / "result.json")
    again = load_result(tmp_path / "deep" / "result.json")
    assert again.cells == result.cells
    assert again.gates == result.gates
    assert render_markdown(again) == render_markdown(result)


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "result.json"
    save_result(result_of(cell()), path)
    before = path.read_text()
    with pytest.raises(LedgerError, match="could not be written"):
        save_result(result_of(cell(), meta={"nan": float("nan")}), path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 99}', '{"format": 1}'])
def test_unreadable_results_are_named(tmp_path, text):
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(LedgerError, match="holds no readable result"):
        load_result(path)
