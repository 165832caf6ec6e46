"""What the device knows of running requests, so that a step needs no word from the host.

A *slot* is a request's place in these tables. Batch row r of a step serves slot `slot_of[r]`; the
last slot is nobody's and pads a batch to a captured size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import overlap, wait
from slipstream.sampling.fused import Knobs
from slipstream.types import SamplingParams


class Slots:
    """Tables over `count` slots and nobody's: tokens int32 [count + 1, capacity], lengths (tokens
    so far), `stop_at` (no step starts at or above this many tokens), page tables, sampling knobs.
    `start`, `length`, `token` are the current step's rows, as `models.cuda.attention.Tiles` wants.
    `spare`: positions that page tables reach past `capacity`, for blocks of drafters.
    """

    def __init__(
        self, count: int, *, capacity: int, page_size: int, device: torch.device, spare: int = 0
    ) -> None:
        self.count, self.capacity, self.page_size = count, capacity, page_size

        def table(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(count + 1, *shape, dtype=dtype, device=device)

        self.tokens = table(capacity)
        self.pages = table(-(-(capacity + spare) // page_size))
        self.lengths, self.stop_at = table(), table()
        self.start, self.length, self.token = table(), table(), table()
        self.knobs = Knobs(
            heat=table(dtype=torch.float32),
            top_p=table(dtype=torch.float64),
            min_p=table(dtype=torch.float32),
            top_k=table(),
            seed=table(dtype=torch.int64),
        )

    def enter(self, entries: Sequence[Entry]) -> None:
        """Bring the tables up to date, all in one copy, behind whatever is in flight."""
        width = self.pages.shape[1]
        pages = [entry.pages[:width] for entry in entries]
        token_at = [e.slot * self.capacity + e.known + np.arange(len(e.tokens)) for e in entries]
        page_at = [e.slot * width + np.arange(len(p)) for e, p in zip(entries, pages, strict=True)]
        reals = [(e.params.temperature, e.params.top_p, e.params.min_p) for e in entries]
        wholes = [(e.slot, e.seed, e.length, e.stop_at, e.params.top_k) for e in entries]
        parts = [
            *(np.array(column, np.int64) for column in zip(*wholes, strict=True)),
            *(np.array(column, np.float64).view(np.int64) for column in zip(*reals, strict=True)),
            np.concatenate(token_at),
            np.array([token for e in entries for token in e.tokens], np.int64),
            np.concatenate(page_at),
            np.array([page for own in pages for page in own], np.int64),
        ]
        sent = torch.from_numpy(np.concatenate(parts)).to(self.tokens.device, non_blocking=True)
        at, seed, length, stop_at, top_k, *columns = sent.split([len(part) for part in parts])
        heat, top_p, min_p = (bits.view(torch.float64) for bits in columns[:3])
        columns = columns[3:]
        knobs = self.knobs
        tables = (knobs.seed, self.lengths, self.stop_at, knobs.top_k)
        tables += (knobs.heat, knobs.top_p, knobs.min_p)
        values = (seed, length, stop_at, top_k, heat, top_p, min_p)
        for table, value in zip(tables, values, strict=True):
            table[at] = value.to(table.dtype)
        self.tokens.view(-1)[columns[0]] = columns[1].int()
        self.pages.view(-1)[columns[2]] = columns[3].int()


@dataclass(frozen=True, slots=True)
class Entry:
    """A request that takes a slot, or is seen to in it: its `tokens` from index `known` on (the
    device has the ones before), its length, and where it certainly ends.
    """

    slot: int
    known: int
    tokens: Sequence[int]
    length: int
    stop_at: int
    pages: Sequence[int]
    params: SamplingParams
    seed: int


@triton.jit
def _prepare_kernel(
    slot_of,
    lengths,
    stop_at,
    tokens,
    pages,
    drafts,
    counts,
    start,
    length,
    token,
    ids,
    positions,
    cells,
    capacity,
    pages_width,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    WHOLE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_of + row)
    known = tl.load(lengths + slot)
    room = tl.load(stop_at + slot) - known
    place = tl.arange(0, WIDTH_PADDED)
    drafted = tl.full((), 0, tl.int32)
    if WIDTH > 1:
        drafted = tl.minimum(tl.load(counts + row), WIDTH - 1)
        if not WHOLE:
            drafted = tl.minimum(drafted, tl.maximum(room - 1, 0))
    fed = tl.where(room > 0, drafted + 1, 0)
    anchor = tl.load(tokens + slot.to(tl.int64) * capacity + known - 1, mask=fed > 0, other=0)
    mine = place < fed
    draft = tl.load(drafts + row * (WIDTH - 1) + place - 1, mask=mine & (place > 0), other=0)
    position = tl.where(mine, known - 1 + place, 0)
    page = tl.load(pages + slot.to(tl.int64) * pages_width + position // PAGE, mask=mine, other=0)
    at = row * WIDTH + place
    inside = place < WIDTH
    tl.store(ids + at, tl.where(place == 0, anchor, draft).to(tl.int64), mask=inside)
    tl.store(positions + at, position, mask=inside)
    tl.store(cells + at, tl.where(mine, page * PAGE + position % PAGE, -1), mask=inside)
    tl.store(start + slot, known - 1)
    tl.store(length + slot, fed)
    tl.store(token + slot, row * WIDTH)


def prepare(
    slots: Slots,
    slot_of: Tensor,
    *,
    drafts: Tensor,
    counts: Tensor,
    ids: Tensor,
    positions: Tensor,
    cells: Tensor,
    whole: bool = False,
) -> None:
    """Lay out a step: anchor and draft tokens of each row, their positions and cache cells.

    `slot_of` int32 [rows]; `drafts` int32 [rows, draft_len], `counts` int32 [rows]; out: `ids`
    int64, `positions`, `cells` int32 [rows * (draft_len + 1)]. A row that reached `stop_at` gets no
    tokens; `whole`: one that did not gets all its drafts, also past `stop_at`.
    """
    rows = len(slot_of)
    width = len(ids) // rows
    _prepare_kernel[(rows,)](
        slot_of,
        slots.lengths,
        slots.stop_at,
        slots.tokens,
        slots.pages,
        drafts,
        counts,
        slots.start,
        slots.length,
        slots.token,
        ids,
        positions,
        cells,
        slots.capacity,
        slots.pages.shape[1],
        PAGE=slots.page_size,
        WIDTH=width,
        WIDTH_PADDED=triton.next_power_of_2(width),
        WHOLE=whole,
        num_warps=1,
        **overlap(ids),
    )
