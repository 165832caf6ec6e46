"""A backend with fixed step costs and scripted acceptance on a virtual clock.

It separates what the lab concludes from how fast a machine is: with known costs the right verdict
is known. Every row it yields is labeled `simulated`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import InvalidConfig
from slipstream.lab.backends.base import Scores, TargetInfo, one_after_another
from slipstream.lab.samples import Request, Sample
from slipstream.types import StageTimes, StepRecord, Timings

Words = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedArm:
    """Costs in seconds. `verify`: rows of a step -> its forward. `accepted` is cycled by decode
    step of a request. `alter(request, words, users)` changes answers, as a lossy arm would.
    """

    verify: Callable[[int], float]
    draft: float = 0.0
    draft_len: int = 0
    accepted: tuple[int, ...] = (0,)
    cached_tokens: int | None = None
    alter: Callable[[Request, Words, int], Words] | None = None


@dataclass(slots=True)
class _Row:
    request: Request
    request_id: int
    words: Words
    prompt_tokens: int
    arrived: float
    times: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return sum(self.chunks) >= len(self.words)


def pseudo_answer(request: Request) -> Words:
    """As many different words as the request allows, a function of prompt and seed alone."""
    key = f"{request.prompt.content()}/{request.params.seed}/{request.params.greedy}"
    return tuple(
        hashlib.sha256(f"{key}/{i}".encode()).hexdigest()[:6]
        for i in range(request.params.max_tokens)
    )


class Simulated:
    """Implements `Backend`. `answer` gives the baseline's words, `margin(position)` the top-2 logit
    margin reported by `score`, `prefill` the seconds a prompt token costs.
    """

    def __init__(
        self,
        arms: Mapping[str, SimulatedArm],
        *,
        answer: Callable[[Request], Words] = pseudo_answer,
        margin: Callable[[int], float] = lambda position: 5.0,
        prefill: float = 0.0,
        fingerprint: str = "simulated",
    ) -> None:
        self.arms = dict(arms)
        self.now = 0.0
        self.resets: list[str] = []
        self.runs: list[tuple[str, int, tuple[str, ...]]] = []
        self._answer, self._margin, self._prefill = answer, margin, prefill
        self._steps = self._requests = 0
        self._info = TargetInfo(
            target="simulated",
            fingerprint=fingerprint,
            dtype="none",
            label="simulated",
        )

    @property
    def info(self) -> TargetInfo:
        """A target that does not exist."""
        return self._info

    def open(self, arms: Sequence[str], *, users: int, kv_tokens: int) -> dict[str, dict[str, Any]]:
        """Settings of each arm. Raises `InvalidConfig` for an arm without costs."""
        for arm in arms:
            if arm not in self.arms:
                known = ", ".join(self.arms)
                raise InvalidConfig(f"Arm {arm!r} has no simulated costs; those with: {known}.")
        return {arm: {"drafter": arm, "users": users, "kv_tokens": kv_tokens} for arm in arms}

    def count_tokens(self, text: str) -> int:
        """Words."""
        return len(text.split())

    def reset(self, arm: str) -> None:
        """Nothing is kept; the call is counted."""
        self.resets.append(arm)

    def close(self) -> None:
        """Nothing to give back."""

    def run(self, arm: str, requests: Sequence[Request], *, users: int) -> list[Sample]:
        """Closed loop on the virtual clock."""
        self.runs.append((arm, users, tuple(r.id for r in requests)))
        model, rows, active = self.arms[arm], [], []  # type: SimulatedArm, list[_Row], list[_Row]
        waiting = deque(requests)
        while waiting or active:
            while waiting and len(active) < users:
                row = self._admit(model, waiting.popleft(), users)
                rows.append(row)
                active.append(row)
            self._step(model, active)
            active = [row for row in active if not row.done]
        return [_sample(row, model) for row in rows]

    def run_together(
        self, arms: Sequence[str], requests: Sequence[Request], *, users: int
    ) -> dict[str, list[Sample]]:
        """Arm after arm: on a virtual clock nothing disturbs them."""
        return one_after_another(self, arms, requests, users=users)

    def score(self, request: Request, token_ids: Sequence[int]) -> Scores:
        """The baseline's own words are always the likeliest."""
        words = [token_id(word) for word in self._answer(request)[: len(token_ids)]]
        margins = tuple(self._margin(i) for i in range(len(token_ids)))
        gaps = tuple(
            0.0 if own == best else margin
            for own, best, margin in zip(token_ids, words, margins, strict=False)
        )
        return Scores(margins, tuple(words), gaps)

    def _admit(self, model: SimulatedArm, request: Request, users: int) -> _Row:
        words = self._answer(request)[: request.params.max_tokens]
        if model.alter is not None:
            words = model.alter(request, words, users)
        self._requests += 1
        tokens = self.count_tokens(request.prompt.content())
        return _Row(request, self._requests, words, tokens, self.now)

    def _step(self, model: SimulatedArm, active: Sequence[_Row]) -> None:
        starting = [row for row in active if not row.records]
        prefilled = sum(row.prompt_tokens for row in starting)
        draft = model.draft if len(starting) < len(active) else 0.0
        verify = model.verify(len(active)) + self._prefill * prefilled
        times = StageTimes(draft=draft, verify=verify, sample=0.0, host=0.0)
        self.now += times.total
        for row in active:
            self._commit(model, row, len(active), prefilled, times)
        self._steps += 1

    def _commit(
        self, model: SimulatedArm, row: _Row, rows: int, prefilled: int, times: StageTimes
    ) -> None:
        first = not row.records
        script = model.accepted[(len(row.records) - 1) % len(model.accepted)]
        accepted = 0 if first else min(script, model.draft_len)
        committed = min(accepted + 1, len(row.words) - sum(row.chunks))
        row.records.append(
            StepRecord(
                step=self._steps,
                request_id=row.request_id,
                prefill=first,
                depth=row.prompt_tokens + sum(row.chunks),
                drafted=0 if first else model.draft_len,
                accepted=accepted,
                committed=committed,
                rows=rows,
                prefill_tokens=prefilled,
                times=times,
            )
        )
        row.times.append(self.now)
        row.chunks.append(committed)


def token_id(word: str) -> int:
    """A stable id for a word."""
    return int(hashlib.sha256(word.encode()).hexdigest()[:8], 16)


def _sample(row: _Row, model: SimulatedArm) -> Sample:
    limit = row.request.params.max_tokens
    return Sample(
        id=row.request.id,
        text=" ".join(row.words),
        finish="length" if len(row.words) >= limit else "stop",
        timings=Timings(row.arrived, tuple(row.times), tuple(row.chunks)),
        seed=row.request.params.seed,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=model.cached_tokens,
        token_ids=tuple(map(token_id, row.words)),
        records=tuple(row.records),
    )
