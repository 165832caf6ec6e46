"""The reference ledger against the article: every printed ratio, every row, every exception."""

import json
from pathlib import Path

import pytest

from slipstream.errors import LedgerError
from slipstream.lab.reference import REFERENCE_PATH, load_reference, ratio_range
from slipstream.lab.report import render_markdown
from slipstream.lab.report_html import render_html
from slipstream.lab.report_tables import headline
from slipstream.lab.results import GateStatus, Resolution
from slipstream.lab.verdict import crossovers, verdicts

ARTICLE = """\
none (baseline)|11.4|874|884|14.1|-|1011-022639
DFlash2 k7|4.7 (2.42×)|1,051 (1.20×)|2,651 (3.00×)|6.7 (2.09×)|5.47|1011-022639
MTP k1|7.3 (1.56×)|950 (1.09×)|1,412 (1.60×)|9.2 (1.53×)|1.91|1011-022639
none (baseline)|11.4|896|855|13.9|-|1010-033958
DSpark k7|5.8 (1.98×)|986 (1.10×)|2,228 (2.60×)|7.1 (1.96×)|4.75|1010-034830
MTP k2|6.1 (1.86×)|1,016 (1.13×)|1,856 (2.17×)|7.5 (1.85×)|2.71|1010-033958
none (baseline)|11.4|893|927|14.2|-|1011-023344
n-gram k3|14.0 (0.82×)|458 (0.51×)|435 (0.47×)|16.7 (0.86×)|2.49|1011-023344
none (baseline)|4.4|1,480|1,506|5.9|-|1011-024319
DFlash k7|2.6 (1.69×)|1,323 (0.89×)|3,545 (2.35×)|4.1 (1.43×)|5.02|1011-024319
MTP k1|2.9 (1.48×)|1,340 (0.91×)|2,263 (1.50×)|4.1 (1.44×)|1.91|1011-024319
MTP k2|2.7 (1.64×)|1,314 (0.89×)|2,714 (1.80×)|3.6 (1.63×)|2.69|1011-024319
none (baseline)|6.7|901|1,085|6.9|-|1011-043339
MTP k3|3.7 (1.83×)|1,062 (1.18×)|1,835 (1.69×)|3.5 (1.96×)|3.01|1011-044429
none (baseline)|6.7|889|1,125|6.8|-|1011-045400
MTP k3 · FA backend|3.7 (1.83×)|1,054 (1.18×)|1,813 (1.61×)|3.5 (1.96×)|2.98|1011-050314
MTP k5 · FA backend|4.0 (1.67×)|976 (1.10×)|1,644 (1.46×)|3.5 (1.95×)|3.58|1011-051215
"""


@pytest.fixture(scope="module")
def reference():
    return load_reference()


def test_headline_prints_the_article_row_by_row(reference):
    table = headline(reference)
    printed = []
    for row in table.rows:
        if row.entries[1].main == "Verdict":
            continue
        assert row.entries[1].detail == "reference"
        values = [f"{e.main} ({e.detail})" if e.detail else e.main for e in row.entries[2:]]
        printed.append("|".join([row.entries[1].main, *values]))
    assert printed == ARTICLE.splitlines()


def test_printed_ratios_agree_with_the_printed_numbers_within_rounding(reference):
    baselines = {(c.batch, c.traffic, c.users): c for c in reference.cells if c.baseline}
    checked = 0
    for cell in reference.cells:
        if cell.published_ratio is None:
            continue
        base = baselines[cell.batch, cell.traffic, cell.users]
        if cell.users == 1:
            over, under, unit = base.ms_per_token.value, cell.ms_per_token.value, 0.1
        else:
            over, under, unit = cell.total_tok_s.value, base.total_tok_s.value, 1.0
        span = ratio_range(over, under, over_unit=unit, under_unit=unit)
        name = f"{cell.target} {cell.arm} {cell.cell}: {cell.published_ratio} not in {span}"
        assert span.low - 0.005 <= cell.published_ratio <= span.high + 0.005, name
        assert cell.speedup.value == cell.published_ratio
        checked += 1
    assert checked == 44


def test_ratio_range_rejects_a_ratio_that_rounding_cannot_explain():
    span = ratio_range(11.4, 4.7, over_unit=0.1, under_unit=0.1)
    assert span.low < 2.42 < span.high
    assert not span.low <= 2.30 <= span.high


def test_gpt_oss_is_kept_out_with_the_articles_reason(reference):
    rows = {c.arm: c for c in reference.cells if c.target.startswith("gpt-oss")}
    assert set(rows) == {"none", "EAGLE-3 Eagle3-v3", "EAGLE-3 long-context"}
    for cell in rows.values():
        assert not cell.publishable
        assert "2/3 = 0.667, under the 0.67 bar" in cell.reasons[0]
        assert "not run on these one-GPU servers" in cell.reasons[0]
    (gate,) = (g for g in reference.gates if g.arm.startswith("gpt-oss"))
    assert gate.status is GateStatus.MISSING
    assert gate.value is None, "a gate result is never inherited"
    markdown = render_markdown(reference)
    kept = markdown[markdown.index("## Kept out") : markdown.index("## Warnings")]
    assert "EAGLE-3 Eagle3-v3 [reference]" in kept
    assert "gpt-oss" not in markdown[: markdown.index("## By cell")]


def test_a_model_without_baseline_has_no_ratio_and_says_so(reference):
    cells = [c for c in reference.cells if c.target.startswith("Qwen3.8-Flash-Next")]
    assert cells
    assert all(c.speedup is None and c.published_ratio is None for c in cells)
    assert all("no baseline" in c.reasons[0] for c in cells)


def test_medians_without_intervals_resolve_nothing(reference):
    judged = verdicts(reference)
    assert {v.resolution for v in judged} == {Resolution.NOT_RESOLVED}
    assert {v.run for v in judged} == {"none"}
    assert any("Qwen3.6" in line and "off at 16 users" in line for line in crossovers(reference))
    code = next(v for v in judged if "GLM" in v.target and v.traffic == "code")
    assert any("MTP k3 · FA backend by medians" in text for text in code.advice)


def test_reference_word_and_article_numbers_are_in_both_renderings(reference):
    for text in (render_markdown(reference), render_html(reference)):
        assert "reference" in text
        assert "3.00×" in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ('{"kind": "rows"}', "'rows'"),
        ('{"no": "kind"}', "line 2"),
        ('{"kind": "run", "run": "a", "title": "b", "meta": {}}', "exactly one"),
    ],
)
def test_broken_ledgers_are_named(tmp_path, line, words):
    path = tmp_path / "broken.jsonl"
    head = {"kind": "run", "run": "a", "title": "b", "meta": {}}
    path.write_text(f"{json.dumps(head)}\n{line}\n")
    with pytest.raises(LedgerError, match=words):
        load_reference(path)


def test_missing_ledger_is_an_error():
    with pytest.raises(LedgerError, match="could not be read"):
        load_reference(Path("/nowhere/ledger.jsonl"))


def test_the_ledger_is_in_the_repository():
    assert REFERENCE_PATH.is_file()
