"""Shows a running grid: bars on a terminal, a line a block in a log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from slipstream.lab.events import Event, Kind, OnEvent, duration


@contextmanager
def watch(console: Console | None = None) -> Iterator[OnEvent]:
    """Yield the `on_event` to give to `run_grid`. Works with and without a terminal."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(console).on_event
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield _Bars(progress).on_event


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading", total=None, left="")

    def on_event(self, event: Event) -> None:
        """Move the bar; print what is worth a line above it."""
        if event.kind in (Kind.PLAN, Kind.WARNING):
            self._progress.console.print(event.text, markup=False, highlight=False)
        text = event.text if event.kind is Kind.PROGRESS else None
        self._progress.update(
            self._task,
            description=text,
            completed=event.done,
            total=event.total or None,
            left=_left(event),
        )


class _Lines:
    def __init__(self, console: Console) -> None:
        self._console, self._last = console, ""

    def on_event(self, event: Event) -> None:
        """Print plans and warnings, and progress where the block or gate changes."""
        if event.kind is Kind.PROGRESS:
            block = event.text.split(": ")[0]
            if block == self._last:
                return
            self._last = block
            counted = f"{event.done}/{event.total}" if event.total else ""
            text = " ".join(part for part in (counted, block, _left(event)) if part)
        else:
            text = event.text
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _left(event: Event) -> str:
    """`about 4 min left`, empty without an estimate."""
    return f"about {duration(event.seconds_left)} left" if event.seconds_left else ""
