"""The commands as a user types them: help that fits a screen, answers, and one-sentence errors."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.lab.reference import load_reference
from slipstream.models.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ["generate", "grid", "report", "export", "doctor"]


def cli(*args, **kwargs):
    return CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "80"}, **kwargs)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny(folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_and_shows_an_example(command):
    done = cli(command, "--help")
    assert done.exit_code == 0
    assert "Example: slipstream " + command in done.output
    assert len(done.output.strip().splitlines()) <= 36


def test_help_lists_the_commands():
    done = cli("--help")
    assert all(c in done.output for c in COMMANDS)


def test_generate_streams_an_answer_and_prints_what_the_steps_did(tiny):
    args = ["generate", "hello", "--model", tiny, "--max-tokens", 8, "--drafter", "ngram:2"]
    done = cli(*args, "--dtype", "float32", "--stats")
    assert done.exit_code == 0, done.output
    assert "tokens per step" in done.output
    assert "ngram:2,min=" in done.output
    plain = cli(*args, "--dtype", "float32", "--drafter", "none")
    assert plain.stdout.strip() == done.stdout.split("\n\n")[0].strip()


def test_generate_reads_standard_input(tiny):
    done = cli("generate", "-", "--model", tiny, "--max-tokens", 2, "--raw", input="hello")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (["generate", " "], 2, "empty"),
        (["generate", "x", "--drafter", "ngrm:3"], 2, "none, ngram"),
        (["generate", "x", "--drafter", "ngram:3,depth=2"], 2, "depth"),
        (["generate", "x", "--model", "/nope"], 3, "/nope"),
        (["generate", "x", "--max-tokens", "0"], 2, "max_tokens is 0"),
        (["generate", "x", "--temperature", "-1"], 2, "temperature is -1"),
        (["generate", "x", "--dtype", "int3"], 2, "int3"),
        (["grid", "nope"], 2, "spec_quick"),
        (["grid", "spec_tiny", "--prompts", "/nope.jsonl"], 2, "/nope.jsonl"),
        (["generate", "x", "--drafter", "dspark:0"], 2, "draft_len is '0'"),
        (["export", "ngram:3", "--out", "x"], 2, "those with: mtp, eagle3"),
        (["export", "mtp:/nope:2", "--out", "x"], 3, "/nope has no config.json"),
        (["report", "/nope"], 5, "ledger"),
        (["report", "--runs", "/nope"], 2, "no run"),
        (["report", "/nope/result.json"], 5, "/nope/result.json"),
    ],
    ids=lambda a: " ".join(a) if isinstance(a, list) else None,
)
def test_mistakes_are_one_sentence_with_the_right_exit_code(args, code, says):
    done = cli(*args)
    assert done.exit_code == code, done.output
    assert says in done.output
    assert "Traceback" not in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_corrupt_weights_are_one_sentence(tiny, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny.iterdir():
        body = file.read_bytes()
        (broken / file.name).write_bytes(body[: len(body) // 2] if "safe" in file.name else body)
    done = cli("generate", "x", "--model", broken)
    assert done.exit_code == 3
    assert len(done.output.strip().splitlines()) == 1


def test_grid_writes_ledger_samples_and_both_reports(tmp_path):
    done = cli("grid", "spec_tiny", "--quick", "--runs", tmp_path)
    assert done.exit_code == 0, done.output
    (run,) = tmp_path.iterdir()
    assert {"ledger.jsonl", "samples", "report.md", "report.html", "result.json"} <= {
        p.name for p in run.iterdir()
    }
    again = cli("report", "latest", "--runs", tmp_path)
    assert again.exit_code == 0
    assert str(run.name) in again.output.replace("\n", "")


def test_a_users_own_traffic_is_measured(tmp_path):
    own = tmp_path / "mine.jsonl"
    own.write_text("".join(json.dumps({"prompt": f"line {i} line {i}"}) + "\n" for i in range(8)))
    done = cli("grid", "spec_tiny", "--quick", "--runs", tmp_path / "runs", "--prompts", own)
    assert done.exit_code == 0, done.output


def test_the_articles_table_comes_out_of_the_same_report(tmp_path):
    done = cli("report", "article", "--out", tmp_path)
    assert done.exit_code == 0
    text = (tmp_path / "report.md").read_text()
    printed = {f"{c.published_ratio:.2f}×" for c in load_reference().cells if c.published_ratio}
    assert all(p in text for p in printed)
    assert "gpt-oss-120b" in text


def test_doctor_finds_nothing_broken():
    done = cli("doctor")
    assert done.exit_code == 0, done.output
    assert "All good." in done.output
    for name in ("none", "ngram", "suffix", "draft_model"):
        assert f"drafter {name}" in done.output


def test_python_m_slipstream_is_the_same_command():
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0
    assert re.search(r"\bdoctor\b", done.stdout)
