"""The article's own table as a reference ledger, so that it renders through the same report.

The numbers are medians without intervals and every row is labeled `reference`. Ratios are the
printed ones: the printed inputs are rounded, so a ratio computed from them may differ in the last
digit, and `ratio_range` says by how much.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import LedgerError
from slipstream.lab.results import CellResult, GateResult, GateStatus, GridResult, Interval
from slipstream.metrics import efficiency

REFERENCE = "reference"
REFERENCE_PATH = Path(__file__).resolve().parents[2] / "bench/results/article-reference.jsonl"


@dataclass(frozen=True, slots=True)
class ReferenceCell:
    """One of the article's columns; `key` starts the names of its numbers in a ledger row."""

    traffic: str
    users: int
    key: str

    def numbers(self, row: dict[str, Any]) -> tuple[float | None, float | None, float | None]:
        """Printed ms/token, tok/s and ratio of one row."""
        return row.get(f"{self.key}_ms"), row.get(f"{self.key}_tok_s"), row.get(f"{self.key}_ratio")


ARTICLE_CELLS = (
    ReferenceCell("chat", 1, "chat_1"),
    ReferenceCell("chat", 16, "chat_16"),
    ReferenceCell("code", 16, "code_16"),
    ReferenceCell("doc", 1, "doc_1"),
)


def load_reference(path: Path = REFERENCE_PATH) -> GridResult:
    """Read a reference ledger. Raises `LedgerError` where a line cannot be read."""
    lines = list(_lines(path))
    heads = [line for line in lines if line["kind"] == "run"]
    if len(heads) != 1:
        raise LedgerError(f"{path} has {len(heads)} lines of kind 'run'; it needs exactly one.")
    return GridResult(
        run=heads[0]["run"],
        title=heads[0]["title"],
        meta=heads[0]["meta"],
        cells=tuple(c for line in lines if line["kind"] == "row" for c in _cells(line)),
        gates=tuple(_gate(line) for line in lines if line["kind"] == "gate"),
        warnings=tuple(line["text"] for line in lines if line["kind"] == "warning"),
    )


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LedgerError(f"The reference ledger {path} could not be read: {error}.") from error
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            body = json.loads(line)
            known = body["kind"] in ("run", "row", "gate", "warning")
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(f"{path} line {number} is not a ledger line: {error!r}.") from error
        if not known:
            raise LedgerError(
                f"{path} line {number} has kind {body['kind']!r}; use run, row, gate or warning."
            )
        yield body


def _cells(row: dict[str, Any]) -> Iterable[CellResult]:
    empty = not any(v is not None for cell in ARTICLE_CELLS for v in cell.numbers(row))
    for cell in ARTICLE_CELLS:
        ms, tok_s, ratio = cell.numbers(row)
        if empty or ms is not None or tok_s is not None:
            yield _cell(row, cell, ms, tok_s, ratio)


def _cell(
    row: dict[str, Any],
    cell: ReferenceCell,
    ms: float | None,
    tok_s: float | None,
    ratio: float | None,
) -> CellResult:
    tokens = row.get(f"{cell.traffic}_tokens_per_step")
    reasons = tuple(row.get("reasons", ()))
    return CellResult(
        target=row["model"],
        arm=row["arm"],
        traffic=cell.traffic,
        users=cell.users,
        sampling="",
        baseline=row.get("baseline", False),
        batch=row["batch"],
        run=row["run"],
        ms_per_token=Interval(ms) if ms is not None else None,
        user_tok_s=None,
        total_tok_s=Interval(tok_s) if tok_s is not None else None,
        ttft_ms=None,
        tokens_per_step=tokens,
        acceptance_length=None,
        acceptance_rate=None,
        by_position=(),
        speedup=Interval(ratio) if ratio is not None else None,
        efficiency=efficiency(ratio, tokens) if ratio is not None and tokens else None,
        stage_ms=None,
        repeats=0,
        prompts=0,
        tokens=0,
        looping=0,
        judged_for_loops=0,
        output_length_ratio=None,
        publishable=not reasons,
        reasons=reasons,
        label=REFERENCE,
        published_ratio=ratio,
    )


def _gate(line: dict[str, Any]) -> GateResult:
    return GateResult(
        arm=line["arm"],
        gate=line["gate"],
        status=GateStatus(line["status"]),
        value=line.get("value"),
        low=None,
        high=None,
        bar=line.get("bar"),
        evidence=line["evidence"],
    )


def ratio_range(over: float, under: float, *, over_unit: float, under_unit: float) -> Interval:
    """Ratios that `over / under` may have had before each was rounded to its printed unit."""
    high = (over + over_unit / 2) / (under - under_unit / 2)
    return Interval(over / under, (over - over_unit / 2) / (under + under_unit / 2), high)
