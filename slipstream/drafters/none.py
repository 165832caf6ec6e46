"""Plain decoding: the drafter that never drafts. Every baseline is this object in the same loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.types import Draft, IntArray, Row, Verdict


class NoneDrafter:
    """Drafts nothing, keeps nothing, asks for nothing."""

    max_draft_len = 0
    needs: tuple[int, ...] = ()

    def __init__(self, name: str = "none") -> None:
        self.name = name

    def open(self, rows: Sequence[Row]) -> None:
        """Nothing to keep."""

    def draft(self, rows: Sequence[Row], draft_lens: IntArray) -> Draft:
        """Zero tokens for every row."""
        return Draft.empty(len(rows))

    def advance(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """Nothing to bring forward."""

    def close(self, request_ids: Sequence[int]) -> None:
        """Nothing to free."""

    def reset(self) -> None:
        """Nothing to forget."""

    def on_device(self) -> NoneDrafter:
        """The same nothing."""
        return self

    def sized(self, rows: int, device: Any) -> None:
        """Nothing to enqueue."""


def create(spec: DrafterSpec, context: DrafterContext) -> NoneDrafter:
    """The drafter of the spec `none`."""
    return NoneDrafter(str(spec))
