"""Tables in README and docs are what the ledgers in bench/results say."""

import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.lab.readme_table import stale

ROOT = Path(__file__).resolve().parents[2]


def test_tables_are_generated_from_ledgers():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert not stale(pages), "run: python -m slipstream.lab.readme_table README.md docs/*.md"


@pytest.mark.parametrize("bench", ["speed_table", "gpu_table"])
def test_pages_are_generated_from_bench_results(bench):
    done = subprocess.run([sys.executable, ROOT / "bench" / f"{bench}.py", "--check"])
    assert done.returncode == 0, f"run: python bench/{bench}.py"
