"""The controller that always asks for the same draft_len, clipped where tokens cannot be used."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.types import IntArray, Row, StepRecord


class StaticController:
    """`draft_len` for every row, never past what the row can still commit.

    A step commits its accepted draft tokens and one next token, so a row with r tokens left before
    max_tokens or `max_context` (tokens, prompt included) drafts at most r - 1.
    """

    def __init__(self, draft_len: int, *, max_context: int) -> None:
        self._draft_len, self._max_context = draft_len, max_context

    def plan(self, rows: Sequence[Row]) -> IntArray:
        """draft_len per row, int64 [rows]."""
        return np.array([self._row_plan(row) for row in rows], np.int64)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Finished steps change nothing here."""

    def _row_plan(self, row: Row) -> int:
        length = len(row.tokens)
        left = min(row.params.max_tokens - (length - row.prompt_len), self._max_context - length)
        return max(0, min(self._draft_len, left - 1))
