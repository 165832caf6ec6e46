"""What a running grid tells whoever watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """`PLAN` and `WARNING` are worth a line; the others move a bar."""

    PLAN = "plan"
    PROGRESS = "progress"
    WARNING = "warning"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Event:
    """`done` of `total` arm runs so far. `seconds_left`: estimate, None before there is one."""

    kind: Kind
    text: str
    done: int = 0
    total: int = 0
    seconds_left: float | None = None


OnEvent = Callable[[Event], None]


def ignore(event: Event) -> None:
    """For callers who do not watch."""


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `1 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
