"""Says aloud, once, that a drafter's tokens are hardly ever kept."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from slipstream.metrics import BROKEN_ROW_STEPS, BROKEN_SHARE
from slipstream.types import StepRecord


class DraftWatch:
    """Looks at the first `BROKEN_ROW_STEPS` row-steps that had a draft."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen = self._kept = 0

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Take in the records of a finished step; warns when enough was seen and nothing held."""
        for record in records:
            if record.drafted and self._seen < BROKEN_ROW_STEPS:
                self._seen += 1
                self._kept += record.accepted > 0
                if self._seen == BROKEN_ROW_STEPS:
                    self._judge()

    def _judge(self) -> None:
        if self._kept < BROKEN_SHARE * BROKEN_ROW_STEPS:
            warnings.warn(
                f"The drafter {self._name} is broken or was made for another target: of its first "
                f"{BROKEN_ROW_STEPS} drafts {self._kept} had a token accepted. The answers are the "
                "target's all the same, only slower; use another drafter or none.",
                stacklevel=2,
            )
