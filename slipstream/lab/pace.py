"""How long will it take? Measured where it can be, estimated from the warm-up where not."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.lab.grid import Cell
from slipstream.lab.samples import Sample
from slipstream.metrics import tpot, ttft

# Attention makes a prompt token dearer the more come before it: twice at about this many.
QUADRATIC_AT = 6000.0


class Pace:
    """Seconds of a block: one cell in one repeat, all arms."""

    def __init__(self, *, arms: int) -> None:
        self._arms = arms
        self._prefill = 0.0
        self._step: dict[int, float] = {}
        self._measured: dict[str, list[float]] = {}

    def warmed_up(self, users: int, samples: Sequence[Sample]) -> None:
        """Learn the cost of a prompt token and of a step at `users` from a baseline's warm-up."""
        steps = [t for t in (tpot(s.timings) for s in samples) if t is not None]
        if steps:
            self._step[users] = sum(steps) / len(steps)
        first = [ttft(s.timings) for s in samples]
        tokens = sum(s.prompt_tokens or 0 for s in samples)
        if tokens and first[-1] is not None:
            self._prefill = max(t for t in first if t is not None) / tokens

    def measured(self, cell: str, seconds: float) -> None:
        """Learn what a block of a cell took."""
        self._measured.setdefault(cell, []).append(seconds)

    def block(self, cell: Cell, *, prompt_tokens: float) -> float:
        """Seconds a block will take. `prompt_tokens`: all its prompts together."""
        seen = self._measured.get(cell.slug)
        if seen:
            return sum(seen) / len(seen)
        each = prompt_tokens / cell.prompts
        prefill = prompt_tokens * self._prefill * (1 + each / QUADRATIC_AT)
        rounds = cell.prompts / cell.users
        step = self._step.get(cell.users) or max(self._step.values(), default=0.0)
        return self._arms * (prefill + rounds * cell.max_tokens * step)
