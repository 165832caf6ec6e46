"""Generated tables: made from results, checked, and clear about what is missing."""

import pytest
from report_samples import grid

from slipstream.errors import InvalidConfig
from slipstream.lab import readme_table
from slipstream.lab.readme_table import main, render_part, stale, table, update
from slipstream.lab.results_json import save_result

TEXT = "before\n<!-- table: quick -->\nold\n<!-- /table -->\nafter <!-- /table -->\n"


@pytest.fixture
def results(tmp_path):
    save_result(grid(), tmp_path / "results" / "quick" / "result.json")
    return tmp_path / "results"


def test_update_replaces_only_what_is_between_the_markers(results):
    text = update(TEXT, results)
    assert text.startswith("before\n<!-- table: quick -->\n| Model | Drafter |")
    assert text.endswith("<!-- /table -->\nafter <!-- /table -->\n")
    assert "\nold\n" not in text
    assert update(text, results) == text


def test_text_without_markers_is_left_alone(results):
    assert update("plain <!-- note -->", results) == "plain <!-- note -->"


def test_stale_sees_a_changed_number(results, tmp_path):
    path = tmp_path / "README.md"
    path.write_text(update(TEXT, results))
    assert stale([path], results) == []
    path.write_text(path.read_text().replace("411", "999"))
    assert stale([path], results) == [path]


def test_parts():
    assert "- Chat, 1 user, sampled" in render_part(grid(), "verdict")
    assert "needle" in render_part(grid(), "gates")
    assert "held" not in render_part(grid(), "kept-out").split("\n")[0]
    with pytest.raises(InvalidConfig, match="headline, verdict, gates, kept-out"):
        render_part(grid(), "nothing")


def test_a_missing_result_says_what_to_do(results):
    with pytest.raises(InvalidConfig, match="Run the grid"):
        table("nowhere", results)


@pytest.mark.parametrize("text", ["<!-- table: quick -->", f"<!-- table: quick -->{TEXT}"])
def test_an_open_marker_is_an_error(results, text):
    with pytest.raises(InvalidConfig, match="never closed"):
        update(text, results)


def test_main_checks_and_rewrites_the_article_table(tmp_path, capsys):
    path = tmp_path / "doc.md"
    path.write_text("<!-- table: article-reference -->\n<!-- /table -->\n")
    assert main(["--check", str(path)]) == 1
    assert "out of date" in capsys.readouterr().out
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
    assert "2,651 (3.00×)" in path.read_text()


def test_main_reports_errors_with_the_right_exit_code(tmp_path, capsys):
    path = tmp_path / "doc.md"
    path.write_text("<!-- table: nowhere -->\n<!-- /table -->\n")
    assert main([str(path)]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main([str(tmp_path / "absent.md")]) == 2


def test_results_folder_is_the_repositorys():
    assert readme_table.RESULTS.name == "results"
    assert (readme_table.RESULTS / "article-reference.jsonl").is_file()
