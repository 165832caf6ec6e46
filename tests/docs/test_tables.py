"""Tables in README and docs are what the ledgers in bench/results say."""

import subprocess
import sys
from pathlib import Path

from slipstream.lab.readme_table import stale

ROOT = Path(__file__).resolve().parents[2]


def test_tables_are_generated_from_ledgers():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    assert not stale(pages), "run: python -m slipstream.lab.readme_table README.md docs/*.md"


def test_speed_page_is_generated_from_bench_results():
    done = subprocess.run([sys.executable, ROOT / "bench" / "speed_table.py", "--check"])
    assert done.returncode == 0, "run: python bench/speed_table.py"
