"""What the lab needs of anything that runs a target: this engine, or a server over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.lab.samples import Request, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """The target of a run. `label` is a word every row must carry (`simulated`), else empty."""

    target: str
    fingerprint: str
    dtype: str
    threads: int | None = None
    context: int | None = None
    chat_template: bool = True
    label: str = ""
    random_weights: bool = False
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Scores:
    """Teacher-forced check of an output: per output position, the margin between the two likeliest
    tokens (nats, unprocessed logits), the likeliest token, and how far below it the output's own
    token lies (`gaps`).
    """

    margins: tuple[float, ...]
    argmax: tuple[int, ...]
    gaps: tuple[float, ...]


class Backend(Protocol):
    """Runs arms of one target. An arm is named by its drafter spec, as the grid writes it."""

    @property
    def info(self) -> TargetInfo:
        """The target this backend runs."""
        ...

    def open(self, arms: Sequence[str], *, users: int, kv_tokens: int) -> dict[str, dict[str, Any]]:
        """Start every arm with room for `users` requests of `kv_tokens` tokens in all.

        Returns the resolved settings of each arm, defaults written out. Settings other than the
        drafter must be alike in all arms. Raises `InvalidConfig` on an unknown arm.
        """
        ...

    def count_tokens(self, text: str) -> int:
        """Tokens of plain text."""
        ...

    def reset(self, arm: str) -> None:
        """Forget prefix caches and whatever the drafter keeps across requests."""
        ...

    def run(self, arm: str, requests: Sequence[Request], *, users: int) -> list[Sample]:
        """Closed loop of `users`: the next is sent when one ends. Samples in request order."""
        ...

    def run_together(
        self, arms: Sequence[str], requests: Sequence[Request], *, users: int
    ) -> dict[str, list[Sample]]:
        """The same requests on every arm, as finely interleaved as the backend can, `arms` first to
        last. Each arm's clock counts its own work only; a backend that cannot take turns inside a
        request uses `one_after_another`.
        """
        ...

    def score(self, request: Request, token_ids: Sequence[int]) -> Scores | None:
        """Score an output of `request`; None where the backend cannot."""
        ...

    def close(self) -> None:
        """Give back what `open` took."""
        ...


def one_after_another(
    backend: Backend, arms: Sequence[str], requests: Sequence[Request], *, users: int
) -> dict[str, list[Sample]]:
    """`run_together` of backends whose arms cannot take turns: whole runs, in order."""
    return {arm: backend.run(arm, requests, users=users) for arm in arms}
