"""Prompt lookup on the device: the drafts of `ngram`, found where the tokens are.

Every earlier position is compared with the text's end, all positions at once: at 126,000 tokens
that is half a megabyte to read, next to the weights of a forward nothing.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


@triton.jit
def _match_kernel(
    tokens,
    lengths,
    slot_of,
    best,
    capacity,
    MAX: tl.constexpr,
    MIN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_of + row)
    length = tl.load(lengths + slot)
    first = tl.program_id(1) * CHUNK
    if first < length:
        line = tokens + slot.to(tl.int64) * capacity
        after = first + tl.arange(0, CHUNK)
        going = (after > 0) & (after < length)
        matched = tl.zeros((CHUNK,), tl.int32)
        for i in tl.static_range(MAX):
            last = tl.load(line + length - 1 - i, mask=length - 1 - i >= 0, other=-1)
            there = going & (after - 1 - i >= 0)
            token = tl.load(line + after - 1 - i, mask=there, other=-2)
            going = there & (token == last)
            matched += going.to(tl.int32)
        key = tl.where(matched >= MIN, matched.to(tl.int64) * 4294967296 + after, 0)
        tl.atomic_max(best + row, tl.max(key, 0))


@triton.jit
def _propose_kernel(
    tokens,
    lengths,
    slot_of,
    best,
    drafts,
    counts,
    widths,
    capacity,
    DRAFT: tl.constexpr,
    DRAFT_PADDED: tl.constexpr,
    ENOUGH: tl.constexpr,
    ENOUGH_PADDED: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_of + row)
    length = tl.load(lengths + slot)
    key = tl.load(best + row)
    tl.store(best + row, tl.zeros((), tl.int64))
    after = (key % 4294967296).to(tl.int32)
    line = tokens + slot.to(tl.int64) * capacity
    back = tl.arange(0, ENOUGH_PADDED)
    checked = (back < ENOUGH) & (after - 1 - back >= 0)
    here = tl.load(line + length - 1 - back, mask=checked, other=-1)
    there = tl.load(line + after - 1 - back, mask=checked, other=-2)
    agree = checked & (here == there)
    matched = tl.min(tl.where(agree, ENOUGH_PADDED, back), 0)
    width = tl.load(widths + matched)
    period = tl.maximum(tl.minimum(width, length - after), 1)
    place = tl.arange(0, DRAFT_PADDED)
    found = tl.load(line + after + place % period, mask=(place < width) & (key > 0), other=-1)
    tl.store(drafts + row * DRAFT + place, found, mask=place < DRAFT)
    tl.store(counts + row, tl.where(key > 0, width, 0))


class DeviceNgram:
    """`ngram` for `rows` rows at once; fills `drafts` int32 [rows, draft_len], `counts` [rows]."""

    needs: tuple[int, ...] = ()

    def __init__(
        self,
        rows: int,
        draft_len: int,
        *,
        min_match: int,
        max_match: int,
        factor: float,
        device: torch.device,
    ) -> None:
        self._draft_len, self._min, self._max = draft_len, min_match, max_match
        self._enough = math.ceil(draft_len / factor)
        # Draft lengths by matched tokens, worked out here to be rounded as on the host.
        widths = [min(draft_len, max(1, int(factor * n))) for n in range(self._enough + 1)]
        self._widths = torch.tensor(widths, dtype=torch.int32, device=device)
        self._best = torch.zeros(rows, dtype=torch.int64, device=device)

    def enqueue(self, step: Any) -> None:
        """The drafting of one `target.graphs.Step`."""
        slots = step.slots
        self.find(slots.tokens, slots.lengths, step.slot_of, drafts=step.drafts, counts=step.counts)

    def find(
        self, tokens: Tensor, lengths: Tensor, slot_of: Tensor, *, drafts: Tensor, counts: Tensor
    ) -> None:
        """Launch. `tokens` int32 [slots, capacity], `lengths` int32 [slots], `slot_of` [rows]."""
        rows, capacity = len(slot_of), tokens.shape[1]
        _match_kernel[(rows, triton.cdiv(capacity, CHUNK))](
            tokens,
            lengths,
            slot_of,
            self._best,
            capacity,
            MAX=self._max,
            MIN=self._min,
            CHUNK=CHUNK,
        )
        _propose_kernel[(rows,)](
            tokens,
            lengths,
            slot_of,
            self._best,
            drafts,
            counts,
            self._widths,
            capacity,
            DRAFT=self._draft_len,
            DRAFT_PADDED=triton.next_power_of_2(self._draft_len),
            ENOUGH=self._enough,
            ENOUGH_PADDED=triton.next_power_of_2(self._enough),
            num_warps=1,  # with more, one might clear `best` before another has read it
        )
