"""Tables in README and docs are generated: `python -m slipstream.lab.readme_table --check FILE`.

Without `--check` the named files are rewritten. A place for a table is a pair of comments,
`<!-- table: NAME -->` and `<!-- /table -->`. NAME is a result below bench/results
(`NAME/result.json`, or the reference ledger `NAME.jsonl`), and may end in `/verdict`, `/gates` or
`/kept-out` for another part of the report than the headline table.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slipstream.errors import InvalidConfig, SlipstreamError
from slipstream.lab.reference import load_reference
from slipstream.lab.report import headline_markdown, markdown_table, markdown_verdicts
from slipstream.lab.report_tables import gates, held_back
from slipstream.lab.results import GridResult
from slipstream.lab.results_json import load_result

RESULTS = Path(__file__).resolve().parents[2] / "bench/results"
PARTS: dict[str, Callable[[GridResult], str]] = {
    "headline": headline_markdown,
    "verdict": markdown_verdicts,
    "gates": lambda result: markdown_table(gates(result)),
    "kept-out": lambda result: markdown_table(held_back(result)),
}
_OPEN = re.compile(r"<!-- table: (?P<name>\S+) -->")
_CLOSE = "<!-- /table -->"


def render_part(result: GridResult, part: str = "headline") -> str:
    """One part of a report as markdown. Raises `InvalidConfig` on an unknown part."""
    if part not in PARTS:
        raise InvalidConfig(f"There is no table part {part!r}; use one of {', '.join(PARTS)}.")
    return PARTS[part](result)


def table(name: str, results: Path = RESULTS) -> str:
    """The table a marker names. Raises `InvalidConfig` where no such result exists."""
    base, _, part = name.partition("/")
    result, ledger = results / base / "result.json", results / f"{base}.jsonl"
    if not (result.is_file() or ledger.is_file()):
        raise InvalidConfig(
            f"The table {name!r} needs {result} or {ledger}; neither exists. Run the grid, or take"
            " the marker out."
        )
    loaded = load_result(result) if result.is_file() else load_reference(ledger)
    return render_part(loaded, part or "headline")


def update(text: str, results: Path = RESULTS) -> str:
    """`text` with its tables made again. Raises `InvalidConfig` on a marker never closed."""
    parts, position = [], 0
    for found in _OPEN.finditer(text):
        end = text.find(_CLOSE, found.end())
        following = _OPEN.search(text, found.end())
        if end < 0 or (following and following.start() < end):
            raise InvalidConfig(f"The marker {found.group()!r} is never closed; add {_CLOSE!r}.")
        parts += [text[position : found.end()], f"\n{table(found['name'], results)}\n"]
        position = end
    return "".join([*parts, text[position:]])


def stale(paths: Sequence[Path], results: Path = RESULTS) -> list[Path]:
    """Files whose tables do not match the results they name."""
    return [p for p in paths if (t := p.read_text(encoding="utf-8")) != update(t, results)]


def main(arguments: Sequence[str]) -> int:
    """Rewrite the tables of the named files, or with `--check` only say which are out of date."""
    paths = [Path(a) for a in arguments if a != "--check"]
    try:
        old = stale(paths)
        if "--check" in arguments:
            for path in old:
                print(f"{path}: a table is out of date; run `python -m {__spec__.name} {path}`.")
            return 1 if old else 0
        for path in old:
            path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
            print(f"{path}: tables made again.")
    except (SlipstreamError, OSError) as error:
        print(error, file=sys.stderr)
        return error.exit_code if isinstance(error, SlipstreamError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
