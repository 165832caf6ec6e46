"""From ragged rows to a flat batch: order, positions, slots, and the segments attention runs.

The flat batch is a sequence of *segments*, each attended to by one kernel call a layer:

- rows whose page runs lie at equal strides (see `cache.pages` on homes) form one segment, however
  their lengths differ: the storage is viewed as [rows, kv_heads, length, head_dim] and a mask hides
  what lies past each row's end;
- a long chunk of a prompt is a segment of its own, causal without a mask when it starts at zero;
- a row with scattered pages (a shared prefix) is gathered first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.models.attention import Segment
from slipstream.models.config import ModelConfig

_FOLD_LIMIT = 32
"""Longer rows are prompt chunks: each is a segment of its own, with heads as batch entries."""


@dataclass(frozen=True, slots=True)
class Placement:
    """A row of the flat batch: its token count, first position, and its page table."""

    length: int
    start: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class Placed:
    """A row in the flat batch: its length and first position, and where its positions live.

    `base` is the slot of position 0 if the pages are one contiguous run, else None. `slots`, int64
    [start + length], is filled for scattered rows only. `order`: index among the caller's rows.
    """

    order: int
    length: int
    start: int
    base: int | None
    slots: NDArray[np.int64] | None

    @property
    def end(self) -> int:
        """Positions in the cache after this forward."""
        return self.start + self.length

    def own_slots(self) -> NDArray[np.int64]:
        """Slots of this forward's tokens."""
        if self.slots is not None:
            return self.slots[self.start :]
        base = self.base or 0
        return np.arange(base + self.start, base + self.end)


def place(order: int, length: int, start: int, pages: Sequence[int], page_size: int) -> Placed:
    """Find where a row's positions live. Raises ValueError if its pages do not cover them."""
    count = -(-(start + length) // page_size)
    if length < 1 or count > len(pages):
        raise ValueError(
            f"row {order}: {length} tokens from position {start} on need {count} pages, "
            f"the table has {len(pages)}"
        )
    first = pages[0]
    if pages[count - 1] - first == count - 1 and (
        count <= 2 or list(pages[:count]) == list(range(first, first + count))
    ):
        return Placed(order, length, start, first * page_size, None)
    positions = np.arange(start + length)
    slots = np.asarray(pages[:count])[positions // page_size] * page_size + positions % page_size
    return Placed(order, length, start, None, slots)


@dataclass(frozen=True, slots=True)
class Run:
    """Rows that share a kernel call: sorted by base, at multiples of `stride` from the first.

    `at[i]` is row i's multiple; multiples nobody sits at are computed and thrown away.
    """

    rows: list[Placed]
    at: list[int]
    stride: int


def arrange(rows: Iterable[Placed]) -> list[Run]:
    """Group rows into runs; the flat batch follows the order of the runs."""
    buckets: dict[int, list[Placed]] = {}
    alone: list[Run] = []
    for row in rows:
        if row.base is None or row.length > _FOLD_LIMIT:
            alone.append(Run([row], [0], 0))
        else:
            buckets.setdefault((row.length - 1).bit_length(), []).append(row)
    runs = [run for key in sorted(buckets) for run in _runs(buckets[key])]
    return runs + alone


def _runs(rows: list[Placed]) -> list[Run]:
    """Split rows of like length into runs at equal strides with at most every other place empty."""
    if len(rows) == 1:
        return [Run(rows, [0], 0)]
    rows = sorted(rows, key=lambda r: r.base or 0)
    gaps = [(b.base or 0) - (a.base or 0) for a, b in pairwise(rows)]
    stride = min(gaps) or 1
    runs = [Run([rows[0]], [0], stride)]
    for row, gap in zip(rows[1:], gaps, strict=True):
        run = runs[-1]
        steps, rest = divmod(gap, stride)
        shortest = min(r.end for r in run.rows)
        alike = max(row.end, *(r.end for r in run.rows)) <= 2 * min(shortest, row.end) + 256
        if rest == 0 and 1 <= steps <= 2 and alike:
            run.rows.append(row)
            run.at.append(run.at[-1] + steps)
        else:
            runs.append(Run([row], [0], stride))
    return runs


@dataclass(frozen=True, slots=True)
class Layout:
    """A flat batch: rows in its order, each token's position and slot, and what attention runs.

    `positions` int64 [N]; `slots` int64 [N] on the device; `plans` and `plan_of` as
    `models.layers.run_layers` takes them; `order[i]`: where the caller's row i lies.
    """

    rows: list[Placed]
    positions: NDArray[np.int64]
    slots: Tensor
    plans: list[list[Segment]]
    plan_of: list[int]
    order: list[NDArray[np.int64]]


def lay_out(
    placed: Sequence[Placed],
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    *,
    ahead: Sequence[bool] = (),
    alone: bool = False,
) -> Layout:
    """Arrange rows for one forward. `alone`: no row is viewed across another's pages; `ahead` as
    `Segments` takes it.
    """
    runs = [Run([p], [0], 0) for p in placed] if alone else arrange(placed)
    rows = [row for run in runs for row in run.rows]
    plans, plan_of = Segments(config, runs, dtype, device, ahead=ahead).plans()
    order: list[NDArray[np.int64]] = [np.empty(0, np.int64)] * len(rows)
    token = 0
    for p in rows:
        order[p.order] = np.arange(token, token + p.length)
        token += p.length
    return Layout(
        rows,
        np.concatenate([np.arange(p.start, p.end) for p in rows]),
        torch.from_numpy(np.concatenate([p.own_slots() for p in rows])).to(device),
        plans,
        plan_of,
        order,
    )


class Segments:
    """Builds the segments of one batch, once for each distinct attention window.

    `ahead[i]`: in layer i every token sees its row to the end (and, of what is before it, as much
    as its window holds); empty: in none.
    """

    def __init__(
        self,
        config: ModelConfig,
        runs: Sequence[Run],
        dtype: torch.dtype,
        device: torch.device,
        *,
        ahead: Sequence[bool] = (),
    ) -> None:
        self._config, self._runs = config, runs
        self._ahead = tuple(ahead) or (False,) * config.num_layers
        self._dtype, self._device = dtype, device
        self._longest = max(row.end for run in runs for row in run.rows)

    def plans(self) -> tuple[list[list[Segment]], list[int]]:
        """The distinct plans, and for each layer which one it runs."""
        reaches = [
            (
                window if window is not None and window < self._longest else None,
                ahead,
            )
            for window, ahead in zip(self._config.windows, self._ahead, strict=True)
        ]
        distinct = list(dict.fromkeys(reaches))
        return [self._build(*reach) for reach in distinct], [distinct.index(r) for r in reaches]

    def _build(self, window: int | None, ahead: bool) -> list[Segment]:
        segments, start = [], 0
        for run in self._runs:
            stop = start + sum(row.length for row in run.rows)
            if window is not None and len(run.rows) > 1:
                # Each row's window begins elsewhere: views would not line up, so row by row.
                for row in run.rows:
                    segments.append(self._single(row, start, window, ahead))
                    start += row.length
            elif len(run.rows) > 1:
                segments.append(self._batched(run, start, stop, ahead))
            else:
                segments.append(self._single(run.rows[0], start, window, ahead))
            start = stop
        return segments

    def _single(self, row: Placed, start: int, window: int | None, ahead: bool) -> Segment:
        first = max(0, row.start + 1 - window) if window is not None else 0
        length = row.end - first
        folded = row.length <= _FOLD_LIMIT
        causal = not (folded or ahead) and row.start == 0 and (window is None or window >= row.end)
        mask = None
        if not causal:
            # Also for a single query that sees everything: torch's kernel is a quarter faster over
            # long contexts when it is given a mask.
            positions = np.arange(row.start, row.end)[None, :]
            last = np.full_like(positions, row.end - 1) if ahead else positions
            mask = self._mask(positions, last, np.array([first]), length, window, folded=folded)
        slots = None
        if row.slots is not None:
            slots = torch.from_numpy(row.slots[first : row.end]).to(self._device)
        return Segment(
            start=start,
            stop=start + row.length,
            rows=1,
            queries=row.length,
            base=0 if row.base is None else row.base + first,
            stride=0,
            length=length,
            mask=mask,
            folded=folded,
            causal=causal,
            slots=slots,
            pad=None,
            unpad=None,
        )

    def _batched(self, run: Run, start: int, stop: int, ahead: bool) -> Segment:
        rows, queries = run.at[-1] + 1, max(row.length for row in run.rows)
        length = max(row.end for row in run.rows)
        positions = np.zeros((rows, queries), np.int64)
        pad = np.full((rows, queries), start, np.int64)
        unpad, token = [], start
        for at, row in zip(run.at, run.rows, strict=True):
            own = np.minimum(np.arange(queries), row.length - 1)
            positions[at] = row.end - 1 if ahead else row.start + own
            pad[at] = token + own
            unpad.append(at * queries + np.arange(row.length))
            token += row.length
        ragged = rows * queries != stop - start
        return Segment(
            start=start,
            stop=stop,
            rows=rows,
            queries=queries,
            base=run.rows[0].base or 0,
            stride=run.stride,
            length=length,
            folded=True,
            causal=False,
            slots=None,
            mask=self._mask(
                positions, positions, np.zeros(rows, np.int64), length, None, folded=True
            ),
            pad=self._index(pad.reshape(-1)) if ragged else None,
            unpad=self._index(np.concatenate(unpad)) if ragged else None,
        )

    def _mask(
        self,
        positions: NDArray[np.int64],
        last: NDArray[np.int64],
        first: NDArray[np.int64],
        length: int,
        window: int | None,
        *,
        folded: bool,
    ) -> Tensor:
        """Additive mask [rows, 1, queries (* group), length]; key j of row r is position first[r] +
        j. A query at `positions` sees keys up to `last`, from its window's first on.
        """
        query = torch.from_numpy(positions).to(self._device)[:, :, None]
        latest = torch.from_numpy(last).to(self._device)[:, :, None]
        key = torch.from_numpy(first).to(self._device)[:, None, None] + torch.arange(
            length, device=self._device
        )
        hidden = key > latest
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        if folded and self._config.group > 1:
            mask = mask.repeat_interleave(self._config.group, 1)
        return mask[:, None]

    def _index(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._device)
