"""A `GridResult` as one JSON file, so that tables can be made again without the raw samples."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from slipstream.errors import LedgerError
from slipstream.lab.results import CellResult, GateResult, GateStatus, GridResult, Interval
from slipstream.types import StageTimes

FORMAT = 1
_INTERVALS = ("ms_per_token", "user_tok_s", "total_tok_s", "ttft_ms", "speedup", "decode_speedup")


def save_result(result: GridResult, path: Path) -> None:
    """Write `result` to `path`, whole or not at all. Raises `LedgerError` where that fails."""
    gates = [asdict(g) | {"status": g.status.value} for g in result.gates]
    body = {"format": FORMAT} | asdict(result) | {"gates": gates}
    draft = path.with_name(f"{path.name}.tmp")
    try:
        text = json.dumps(body, indent=1, ensure_ascii=False, allow_nan=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text + "\n", encoding="utf-8")
        os.replace(draft, path)
    except (OSError, ValueError, TypeError) as error:
        draft.unlink(missing_ok=True)
        raise LedgerError(f"The result could not be written to {path}: {error}.") from error


def load_result(path: Path) -> GridResult:
    """Read what `save_result` wrote. Raises `LedgerError` with the reason on anything else."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        if body["format"] != FORMAT:
            raise ValueError(f"format is {body['format']!r}, this version reads {FORMAT}")
        return GridResult(
            run=body["run"],
            title=body["title"],
            meta=body["meta"],
            cells=tuple(_cell(c) for c in body["cells"]),
            gates=tuple(_gate(g) for g in body["gates"]),
            warnings=tuple(body["warnings"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LedgerError(
            f"{path} holds no readable result ({error}); make it again from its ledger."
        ) from error


def _cell(body: dict[str, Any]) -> CellResult:
    values = dict(body)
    for name in _INTERVALS:
        value = body.get(name)
        values[name] = None if value is None else Interval(**value)
    values["stage_ms"] = None if body["stage_ms"] is None else StageTimes(**body["stage_ms"])
    values["by_position"] = tuple(body["by_position"])
    values["reasons"] = tuple(body["reasons"])
    known = {f.name for f in fields(CellResult)}
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(f"unknown keys {unknown}")
    return CellResult(**values)


def _gate(body: dict[str, Any]) -> GateResult:
    return GateResult(**(body | {"status": GateStatus(body["status"])}))
