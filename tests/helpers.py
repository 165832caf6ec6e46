"""Drafters and rows for tests: what they draft is written down, not computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.drafters.packing import pack
from slipstream.types import Draft, DraftLaw, IntArray, Row, SamplingParams, Verdict


@dataclass
class StubRow:
    """The `Row` protocol without an engine."""

    tokens: list[int]
    request_id: int = 0
    prompt_len: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    sampler: Any = None


class ScriptedDrafter:
    """Drafts `script[request_id][step]`, clipped to the plan; nothing once the script has run out.

    A step is a `draft` call in which the request took part. `law(rows, draft)` says what the tokens
    are claimed to be drawn from (default: `OneHot`); pass one that builds `Dense` or `TopK` of
    [rows, width] to test these paths. `calls` logs ("open" | "close" | "advance" | "reset", ids).
    """

    needs: tuple[int, ...] = ()

    def __init__(
        self,
        script: Mapping[int, Sequence[Sequence[int]]],
        *,
        law: Callable[[Sequence[Row], Draft], DraftLaw] | None = None,
    ) -> None:
        self.name = "scripted"
        self.script, self.law = script, law
        self.max_draft_len = max((len(d) for steps in script.values() for d in steps), default=0)
        self.steps: dict[int, int] = {}
        self.verdicts: list[Verdict] = []
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def open(self, rows: Sequence[Row]) -> None:
        self._log("open", [r.request_id for r in rows])

    def draft(self, rows: Sequence[Row], draft_lens: IntArray) -> Draft:
        draft = pack([self._next(r)[: int(n)] for r, n in zip(rows, draft_lens, strict=True)])
        if self.law is None or not draft.tokens.size:
            return draft
        return Draft(draft.tokens, draft.lens, self.law(rows, draft))

    def advance(self, rows: Sequence[Row], verdict: Verdict) -> None:
        self._log("advance", [r.request_id for r in rows])
        self.verdicts.append(verdict)

    def close(self, request_ids: Sequence[int]) -> None:
        self._log("close", request_ids)

    def reset(self) -> None:
        self._log("reset", [])
        self.steps.clear()

    def _next(self, row: Row) -> Sequence[int]:
        step = self.steps.get(row.request_id, 0)
        self.steps[row.request_id] = step + 1
        steps = self.script.get(row.request_id, ())
        return steps[step] if step < len(steps) else ()

    def _log(self, call: str, ids: Sequence[int]) -> None:
        self.calls.append((call, tuple(ids)))


class PerfectDrafter(ScriptedDrafter):
    """Drafts what is known to come: `futures[request_id]` is the whole text, prompt included."""

    def __init__(self, futures: Mapping[int, Sequence[int]], draft_len: int) -> None:
        super().__init__({})
        self.name = f"perfect:{draft_len}"
        self.futures, self.max_draft_len = futures, draft_len

    def _next(self, row: Row) -> Sequence[int]:
        future = self.futures[row.request_id]
        assert list(future[: len(row.tokens)]) == row.tokens, "the text left the known future"
        return future[len(row.tokens) : len(row.tokens) + self.max_draft_len]


def lens(*values: int) -> IntArray:
    """A plan."""
    return np.array(values, np.int64)


def verdict(rows: int) -> Verdict:
    """A verdict nobody reads the content of."""
    zeros = np.zeros(rows, np.int64)
    return Verdict(zeros, zeros, (None,) * rows)
