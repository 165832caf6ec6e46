"""Where numbers come from, and what a watcher sees."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from slipstream import provenance
from slipstream.lab.events import Event, Kind, duration
from slipstream.lab.progress import watch


def test_provenance_is_complete() -> None:
    found = provenance.collect(dtype="bfloat16", threads=2, fingerprint="abc")
    assert found["machine"]["cores"] >= 1
    assert found["machine"]["cpu"]
    assert found["versions"]["slipstream"]
    assert found["time"].endswith("Z")
    assert (found["dtype"], found["threads"], found["model"]) == ("bfloat16", 2, "abc")
    key = provenance.machine_key(found["machine"])
    assert key == provenance.machine_key(provenance.machine())


def test_the_lab_imports_no_torch() -> None:
    modules = [
        "runner",
        "analyze",
        "gates",
        "report",
        "ledger",
        "stats",
        "grid",
        "progress",
        "backends.simulated",
    ]
    lines = "; ".join(f"import slipstream.lab.{m}" for m in modules)
    code = f"import sys, slipstream.provenance; {lines}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (89, "89 s"), (100, "2 min"), (700, "12 min"), (5460, "1 h 31 min")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


EVENTS = (
    Event(Kind.PROGRESS, "warm-up: none", 0, 4),
    Event(Kind.PLAN, "2 blocks to measure, about 3 min.", 0, 4, 180.0),
    Event(Kind.PROGRESS, "chat x 1, repeat 1: none", 0, 4, 180.0),
    Event(Kind.PROGRESS, "chat x 1, repeat 1: ngram:3", 1, 4, 170.0),
    Event(Kind.PROGRESS, "chat x 1, repeat 2: none", 2, 4, 90.0),
    Event(Kind.DONE, "runs/x", 4, 4, 0.0),
)


@pytest.mark.parametrize("terminal", [False, True])
def test_watching_with_and_without_a_terminal(terminal: bool) -> None:
    out = io.StringIO()
    with watch(Console(file=out, force_terminal=terminal, width=100)) as on_event:
        for event in EVENTS:
            on_event(event)
    text = out.getvalue()
    assert "2 blocks to measure, about 3 min." in text
    if not terminal:
        assert text.splitlines() == [
            "0/4 warm-up",
            "2 blocks to measure, about 3 min.",
            "0/4 chat x 1, repeat 1 about 3 min left",
            "2/4 chat x 1, repeat 2 about 2 min left",
            "runs/x",
        ]


def test_gpus_are_part_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*_: object, **__: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess((), 0, stdout="NVIDIA H200\nNVIDIA H200\n")

    bare = provenance.machine_key(provenance.machine() | {"gpu": None})
    monkeypatch.setattr(provenance.subprocess, "run", found)
    machine = provenance.machine()
    assert machine["gpu"] == "NVIDIA H200, NVIDIA H200"
    assert provenance.machine_key(machine) == f"NVIDIA H200, NVIDIA H200 / {bare}"

    def nothing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(provenance.subprocess, "run", nothing)
    assert provenance.machine()["gpu"] is None
