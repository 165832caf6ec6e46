"""What is found to quote, in Python's library and in folders that a user names."""

import json
import random

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.errors import InvalidConfig
from slipstream.train import pieces
from slipstream.train.quotes import FENCES, shelf, snippets

GO = """package main

import "fmt"

// Copyright of nobody, and a license that is not quoted.

func Larger(left int, right int) int {
	if left > right {
		return left
	}
	fmt.Println("the right one is larger or the same as the left")
	return right
}
"""
PARAGRAPH = "The ferry leaves at noon, and whoever is late waits for the evening one. " * 6


def folder(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / name.replace("_", ".")
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return tmp_path


def test_a_folder_adds_languages_data_and_prose(tmp_path):
    config = {"name": "ferry", "stops": [{"place": f"pier {i}", "minutes": i} for i in range(9)]}
    named = folder(tmp_path, a_go=GO, b_json=json.dumps(config), c_md=PARAGRAPH, d_js=b"\xff" * 400)
    held = shelf([named])
    assert [p.name for p in held.files["go"]] == ["a.go"]
    assert held.prose[-1] == named / "c.md"
    rng = random.Random(0)
    code = [held.code(rng) for _ in range(4000)]
    found = next(q for q in code if "Larger" in q.text)
    assert (found.fence, found.name, found.sort) == ("go", "Larger", "code")
    assert "license" not in found.text
    assert "\t" not in found.text
    data = [held.data(rng) for _ in range(60)]
    assert any('"pier 3"' in q.text for q in data)
    assert all(q.sort == "data" for q in data)
    assert held.digest != shelf().digest
    assert held.digest == shelf([named]).digest


def test_every_snippet_is_complete():
    rng, held = random.Random(0), shelf()
    quotes = [held.data(rng) for _ in range(400)]
    quotes += [q for q in (held.code(rng) for _ in range(3000)) if q.fence != "python"]
    assert not [q.text for q in quotes if "@n@" in q.text or "@k@" in q.text or "@Fc@" in q.text]
    assert {q.fence for q in quotes} == {s["fence"] for s in snippets()["snippets"]}
    json.loads(next(q.text for q in quotes if q.fence == "json"))


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a_txt": "too short"}, "holds nothing to quote"),
        ({"a_py": b"\xff\xfe" * 300}, "holds nothing to quote"),
        ({"a_png": "x" * 400}, "holds nothing to quote"),
    ],
)
def test_a_folder_without_anything_is_one_sentence(files, said, tmp_path):
    with pytest.raises(InvalidConfig, match=said):
        shelf([folder(tmp_path, **files)])
    told = ["texts", "--out", str(tmp_path / "out"), "--quote", str(tmp_path)]
    done = CliRunner().invoke(app, told)
    assert done.exit_code == 2
    assert said in done.output
    assert not (tmp_path / "out").exists()
    with pytest.raises(InvalidConfig, match="is no folder to quote from"):
        shelf([tmp_path / "missing"])


@pytest.mark.parametrize("option", ["--code", "--greedy"])
def test_a_share_is_one(option, tmp_path):
    done = CliRunner().invoke(app, ["texts", "--out", str(tmp_path / "out"), option, "1.5"])
    assert done.exit_code == 2
    assert f"{option[2:]} is 1.5; allowed: 0 to 1, a share." in done.output


def test_python_is_cut_at_heads():
    text = """import os


@first
@second(
    1)
class One:
    def method(self, value: int) -> int:
        \"\"\"Doc with words that make it long enough to be a piece of its own, and more.\"\"\"
        if value > 3:
            return value
        return 2


def other(
    left: int,
    right: int,
) -> int:
    print("this is a function with a head over several lines, as formatters write it")
    total = left + right
    return total


x = 3
"""
    found = {name: piece for piece, name in pieces.cut(text, "python")}
    assert found["method"].startswith("def method(self")
    assert found["method"].endswith("return 2")
    assert found["other"].endswith("return total")
    assert "One" in found
    assert '"""' not in pieces.without_docstring(found["method"])
    assert pieces.without_docstring("x = 1") == "x = 1"
    assert FENCES[".py"] == "python"


def test_prose_is_prose():
    rng = random.Random(0)
    rows = "\n".join(f"{i} | {i * 7} | {i * 11}" for i in range(90))
    assert pieces.paragraphs(rows, rng, size=900) is None
    assert pieces.paragraphs("", rng, size=900) is None
    text = "\n\n".join(f"{i}. {PARAGRAPH}" for i in range(9))
    for _ in range(30):
        found = pieces.paragraphs(text, rng, size=1200)
        assert found is None or 240 <= len(found) <= 1200
