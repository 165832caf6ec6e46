"""Every python block of README and docs runs, in order, one namespace a page."""

import re
import sys
import types
from pathlib import Path

import pytest

from slipstream.drafters.specs import METHODS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.S | re.M)
RUNNABLE = [p for p in PAGES if p.exists() and BLOCK.search(p.read_text(encoding="utf-8"))]


@pytest.fixture
def registry():
    """Takes out what a page registers: its module is gone after the test."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda p: p.name)
def test_python_blocks_run(page, monkeypatch):
    name = "docs_" + re.sub(r"\W", "_", page.stem)
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        exec(compile(block, str(page), "exec"), module.__dict__)


@pytest.mark.parametrize("page", [p for p in PAGES if p.exists()], ids=lambda p: p.name)
def test_files_named_in_prose_exist(page):
    named = re.findall(r"`((?:slipstream|tests|docs|bench)/[\w./*-]+)`", page.read_text("utf-8"))
    missing = [n for n in named if not list(ROOT.glob(n))]
    assert not missing, f"{page.name} names files that do not exist"
