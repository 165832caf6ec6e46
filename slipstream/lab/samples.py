"""One measured request, as raw as it came, and its line in a samples file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.lab.prompts import Prompt
from slipstream.types import SamplingParams, StageTimes, StepRecord, Timings


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to be sent. `id` is unique within a run of a backend; `prompt` is salted."""

    id: str
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What came back. A backend that does not report a value gives None: absent is not zero.

    `timings` are client-clock seconds; only differences within one run of a backend mean anything.
    `cached_tokens` are prompt tokens taken from a prefix cache. `unit` is the prompt's or wave's
    index, set by the runner. `copied`: share of the answer's words in verbatim runs of the prompt's
    source text (`prompts.copy_overlap`), None where the prompt has none.
    """

    id: str
    text: str
    finish: str
    timings: Timings
    unit: int = 0
    seed: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: tuple[int, ...] | None = None
    records: tuple[StepRecord, ...] | None = None
    error: str | None = None
    copied: float | None = None

    @property
    def tokens(self) -> int:
        """Output tokens, as they arrived at the client."""
        return sum(self.timings.chunk_tokens)


def window(samples: Iterable[Sample]) -> float:
    """Seconds from the first request sent to the last token received."""
    rows = [s for s in samples if s.timings.chunk_times]
    if not rows:
        return 0.0
    return max(s.timings.chunk_times[-1] for s in rows) - min(s.timings.arrived for s in rows)


def by_unit(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    """Samples of each prompt or wave, in order of arrival."""
    units: dict[int, list[Sample]] = {}
    for sample in samples:
        units.setdefault(sample.unit, []).append(sample)
    return units


def to_json(sample: Sample) -> dict[str, Any]:
    """Plain JSON types; records as rows of numbers, because there is one for every step."""
    records = sample.records
    return {
        "id": sample.id,
        "unit": sample.unit,
        "seed": sample.seed,
        "prompt_tokens": sample.prompt_tokens,
        "cached_tokens": sample.cached_tokens,
        "token_ids": None if sample.token_ids is None else list(sample.token_ids),
        "text": sample.text,
        "finish": sample.finish,
        "error": sample.error,
        "copied": sample.copied,
        "arrived": round(sample.timings.arrived, 6),
        "chunk_times": [round(t, 6) for t in sample.timings.chunk_times],
        "chunk_tokens": list(sample.timings.chunk_tokens),
        "records": None if records is None else [_pack(r) for r in records],
    }


def from_json(row: dict[str, Any]) -> Sample:
    """Inverse of `to_json`. Raises `KeyError`, `TypeError` or `ValueError` on foreign rows."""
    ids, records = row["token_ids"], row["records"]
    return Sample(
        id=row["id"],
        unit=row["unit"],
        seed=row["seed"],
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"],
        token_ids=None if ids is None else tuple(ids),
        text=row["text"],
        finish=row["finish"],
        error=row["error"],
        copied=row.get("copied"),
        timings=Timings(
            arrived=row["arrived"],
            chunk_times=tuple(row["chunk_times"]),
            chunk_tokens=tuple(row["chunk_tokens"]),
        ),
        records=None if records is None else tuple(_unpack(r) for r in records),
    )


def _pack(r: StepRecord) -> list[float]:
    counts = (r.step, r.request_id, int(r.prefill), r.depth, r.drafted, r.accepted, r.committed)
    t = r.times
    times = (round(x, 7) for x in (t.draft, t.verify, t.sample, t.host))
    return [*counts, r.rows, r.prefill_tokens, *times]


def _unpack(row: Sequence[Any]) -> StepRecord:
    step, request, prefill, depth, drafted, accepted, committed, rows, prefilled, *times = row
    return StepRecord(
        step=step,
        request_id=request,
        prefill=bool(prefill),
        depth=depth,
        drafted=drafted,
        accepted=accepted,
        committed=committed,
        rows=rows,
        prefill_tokens=prefilled,
        times=StageTimes(*times),
    )
