"""Where a step's wall time goes."""

from __future__ import annotations

import time

from slipstream.types import StageTimes


class Clock:
    """Splits a step's wall time into stages. `verify`: seconds of that stage that are over."""

    def __init__(self, *, verify: float = 0.0) -> None:
        self._last = time.perf_counter()
        self._start = self._last - verify
        self.seconds = {"draft": 0.0, "verify": verify, "sample": 0.0}

    def lap(self, stage: str | None) -> None:
        """Book the time since the last lap under `stage`; None leaves it to the host."""
        now = time.perf_counter()
        if stage is not None:
            self.seconds[stage] += now - self._last
        self._last = now

    def times(self) -> StageTimes:
        """Stages so far; whatever was not booked is host time."""
        total = time.perf_counter() - self._start
        return StageTimes(**self.seconds, host=total - sum(self.seconds.values()))
