"""Ctrl-C in a real process: exit 130, one sentence, and a run that goes on where it stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from slipstream.lab import grid, ledger
from slipstream.lab.analyze import analyze
from slipstream.lab.runner import run_grid


def test_ctrl_c_leaves_a_resumable_ledger(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream", "grid", "spec_tiny", "--runs", str(tmp_path)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if "repeat 2" in line:
            process.send_signal(signal.SIGINT)
            break
    _, rest = process.communicate(timeout=60)
    assert process.returncode == 130, "".join(seen) + rest
    assert "interrupted" in rest
    assert "Traceback" not in rest
    (directory,) = tmp_path.iterdir()
    arms = grid.load("spec_tiny").arms
    kept = ledger.complete_blocks(ledger.read(directory), arms)
    assert len(kept) >= 2
    assert run_grid(grid.load("spec_tiny"), root=tmp_path) == directory
    records = ledger.read(directory)
    measured = [(r["cell"], r["repeat"], r["arm"]) for r in records if r["kind"] == "cell"]
    assert len(measured) == len(set(measured)) == 2 * 3 * len(arms)  # nothing measured twice
    assert all(c.repeats == 3 for c in analyze(directory).cells)
