"""The house limits of DESIGN section 2, held by a test: sizes, and errors never swallowed."""

import ast
import statistics
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "slipstream").rglob("*.py"))
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def _length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


def _is_kernel(node: ast.AST) -> bool:
    return any(ast.unparse(d).startswith("triton.jit") for d in node.decorator_list)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_and_function_lengths(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 400, "a file has at most 400 lines"
    long = {
        n.name: _length(n)
        for n in ast.walk(ast.parse(text))
        if isinstance(n, FUNCTION) and _length(n) > 60 and not _is_kernel(n)
    }
    assert not long, "a function has at most 60 lines"


def test_median_function_is_short():
    lengths = [
        _length(n)
        for path in FILES
        for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(n, FUNCTION)
    ]
    assert statistics.median(lengths) < 12


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_error_is_swallowed(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)), node.lineno


def test_tracked_files_fit_thirty_mebibytes():
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    files = [ROOT / line for line in listing.stdout.splitlines()]
    assert files
    assert sum(f.stat().st_size for f in files if f.is_file()) < 30 * 2**20
