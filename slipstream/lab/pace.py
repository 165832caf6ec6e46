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
        """Learn the cost of a prompt token and of a step at `users` from a baseline's warm-up.

        The fastest answer tells the step: the others waited for prompts that came after theirs,
        which are counted by themselves.
        """
        steps = [t for t in (tpot(s.timings) for s in samples) if t is not None]
        if steps:
            self._step[users] = min(steps)
        first = [t for t in (ttft(s.timings) for s in samples) if t is not None]
        tokens = sum(s.prompt_tokens or 0 for s in samples)
        if tokens and first:
            self._prefill = max(first) / tokens

    def measured(self, cell: str, seconds: float) -> None:
        """Learn what a block of a cell took."""
        self._measured.setdefault(cell, []).append(seconds)

    def block(self, cell: Cell, *, prompt_tokens: float) -> float:
        """Seconds a block will take. `prompt_tokens`: all its prompts together."""
        seen = self._measured.get(cell.slug)
        if seen:
            return sum(seen) / len(seen)
        answer = cell.max_tokens * (1 - cell.spread / 2)  # the mean of its limits
        return self._arms * self.requests(
            cell.prompts, users=cell.users, prompt_tokens=prompt_tokens, max_tokens=answer
        )

    def requests(self, count: int, *, users: int, prompt_tokens: float, max_tokens: float) -> float:
        """Seconds of `count` requests of one arm, `prompt_tokens` in all, `max_tokens` each."""
        if not count:
            return 0.0
        prefill = prompt_tokens * self._prefill * (1 + prompt_tokens / count / QUADRATIC_AT)
        step = self._step.get(users) or max(self._step.values(), default=0.0)
        return prefill + max(1.0, count / users) * max_tokens * step
