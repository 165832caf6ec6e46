"""What every drafter promises. One file a method beside this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from slipstream.types import Draft, IntArray, Row, Span, Verdict


class Drafter(Protocol):
    """Proposes draft tokens; never changes target state, sampling state or the rows it is shown.

    State is keyed by `row.request_id`, so that a slot reused by another request starts empty. Two
    more things help on an accelerator and may be left out: `one_hot = True` says that the law of
    every draft is `OneHot`, and `OnDevice` below. Who `needs` features is `TakesFeatures`. Who uses
    the row's pages past the drafts (`reach` positions from the anchor's on) says so too; so does
    who keeps at a position what depends on the token after it (`shifted`): of a prefix that others
    computed, the last page is then computed again.
    """

    name: str
    """The resolved spec, every default written out, e.g. `ngram:3,min=2,max=4,factor=1.5`."""

    max_draft_len: int
    """The most tokens `draft` may return for a row; 0 for `none`."""

    needs: tuple[int, ...]
    """Target layer outputs wanted as features (`hs[i]` indices); empty where none are."""

    def open(self, rows: Sequence[Row]) -> None:
        """Rows whose prompt is in the target's cache; `row.tokens` already ends in the anchor."""
        ...

    def draft(self, rows: Sequence[Row], draft_lens: IntArray) -> Draft:
        """Up to `draft_lens[i]` tokens continuing `rows[i].tokens`; fewer or none is an answer."""
        ...

    def advance(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """After a step: `row.tokens` has the committed tokens. Finished rows are closed instead."""
        ...

    def close(self, request_ids: Sequence[int]) -> None:
        """Requests that finished, were cancelled or were preempted (these are opened again)."""
        ...

    def reset(self) -> None:
        """Forget everything kept across requests, so that a measurement starts cold."""
        ...


class DeviceForm(Protocol):
    """A drafter that runs on an accelerator, before it knows for how many rows.

    One that `needs` features takes in, first thing in a step, what the target saw in the step
    before (`target.graphs.Step`); what no later step takes in, `absorb` is given. Whoever has a
    context of its own says so (`max_context`): requests that may outgrow it stay on the host.
    """

    def sized(self, rows: int, device: Any) -> Any | None:
        """What `target.graphs` enqueues for so many rows; None where nothing is to be drafted."""
        ...


@runtime_checkable
class TakesFeatures(Protocol):
    """A drafter with `needs`: it is shown the features of every committed token.

    A prompt's come chunk by chunk, before the row is opened. Pages of the target's cache may be
    taken over by other requests with the same tokens, so what is kept of a span belongs to pages,
    not to requests; a preempted request's features come again.
    """

    def absorb(self, spans: Sequence[Span]) -> None:
        """After a forward and before `advance` and `open`, also for rows that finished with it."""
        ...


@runtime_checkable
class Pads(Protocol):
    """A drafter whose own passes over prompts launch much, and can be padded and captured."""

    def pad(self, *, rows: int, tokens: int, positions: int) -> None:
        """From now on passes of up to so many rows and tokens are padded; `positions`: how far the
        target's cache goes. Called after `on_device`.
        """
        ...

    def warm_up(self) -> None:
        """Capture them all, before there are requests."""
        ...


@runtime_checkable
class KeepsState(Protocol):
    """A device form that keeps something of each slot from step to step."""

    def entered(self, rows: Sequence[Row], slots: Sequence[int]) -> None:
        """Row i sits in slot `slots[i]` from the next launch on, and all that was committed of it
        has been absorbed: what was kept of these slots before is to be replaced. Without waiting:
        steps may be in flight, for whom only what is enqueued behind them changes nothing.
        """
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A drafter that can draft where the tokens are, without the host. Its drafts are one-hot: from
    the call of `on_device` on those made on the host too, for a seed's tokens must not depend on
    which of the two makes a step's.
    """

    def on_device(self) -> DeviceForm | None:
        """Its form there; None where its options need the host."""
        ...
