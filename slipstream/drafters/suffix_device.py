"""Suffix decoding on the device: the drafts of `suffix`, found where the tokens are.

Same rule as `drafters.suffix` without its automaton. Every earlier position is compared with the
text's end; of the positions that match, up to `SEEN` (the longest matches, then the most recent
ones) are kept, and all their continuations are compared with each other. How often a continuation
was seen after a match of every length is then a matrix product of zeros and ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
SEEN = 64
"""Occurrences of the text's ending that are looked at."""


@triton.jit
def _match_kernel(
    tokens,
    lengths,
    slot_of,
    matched,
    histogram,
    capacity,
    DEPTH: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Tokens that agree before each position and before the end, and how often each number is."""
    row = tl.program_id(0)
    slot = tl.load(slot_of + row)
    length = tl.load(lengths + slot)
    first = tl.program_id(1) * CHUNK
    if first < length:
        line = tokens + slot.to(tl.int64) * capacity
        after = first + tl.arange(0, CHUNK)
        going = (after > 0) & (after < length)
        found = tl.zeros((CHUNK,), tl.int32)
        for i in tl.static_range(DEPTH):
            last = tl.load(line + length - 1 - i, mask=length - 1 - i >= 0, other=-1)
            there = going & (after - 1 - i >= 0)
            token = tl.load(line + after - 1 - i, mask=there, other=-2)
            going = there & (token == last)
            found += going.to(tl.int32)
        tl.store(matched + row.to(tl.int64) * capacity + after, found, mask=after < length)
        bins = tl.histogram(found, BINS)
        tl.atomic_add(histogram + row * BINS + tl.arange(0, BINS), bins)


@triton.jit
def _select_kernel(
    lengths,
    slot_of,
    matched,
    histogram,
    seen_after,
    seen_matched,
    seen_count,
    capacity,
    DEPTH: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    SEEN: tl.constexpr,
):
    """The positions that are looked at: those that match longest, then the most recent."""
    row = tl.program_id(0)
    length = tl.load(lengths + tl.load(slot_of + row))
    at = tl.arange(0, BINS)
    counts = tl.load(histogram + row * BINS + at)
    counts = tl.where((at >= 1) & (at <= DEPTH), counts, 0)
    longer = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # matches of at least so many tokens
    fits = (at >= 1) & (longer <= SEEN)
    least = tl.min(tl.where(fits, at, DEPTH + 1), 0)
    whole = tl.sum(tl.where(at >= least, counts, 0), 0)
    placed = tl.zeros((), tl.int32)
    filled = tl.zeros((), tl.int32)
    chunks = tl.cdiv(length, CHUNK)
    for i in range(chunks):
        after = (chunks - 1 - i) * CHUNK + tl.arange(0, CHUNK)
        line = matched + row.to(tl.int64) * capacity
        found = tl.load(line + after, mask=after < length, other=0).to(tl.int32)
        long = ((found >= least) & (found > 0)).to(tl.int32)
        next_best = ((found == least - 1) & (found > 0)).to(tl.int32)
        place = placed + tl.cumsum(long, 0) - 1
        behind = tl.sum(next_best, 0) - tl.cumsum(next_best, 0)
        place = tl.where(long > 0, place, whole + filled + behind)
        kept = ((long > 0) | (next_best > 0)) & (place < SEEN)
        tl.store(seen_after + row * SEEN + place, after, mask=kept)
        tl.store(seen_matched + row * SEEN + place, found, mask=kept)
        placed += tl.sum(long, 0)
        filled += tl.sum(next_best, 0)
    tl.store(seen_count + row, tl.minimum(whole + filled, SEEN))


@triton.jit
def _walk_kernel(
    tokens,
    lengths,
    slot_of,
    histogram,
    seen_after,
    seen_matched,
    seen_count,
    limits,
    drafts,
    counts,
    capacity,
    min_prob,
    DRAFT: tl.constexpr,
    DRAFT_PADDED: tl.constexpr,
    DEPTH: tl.constexpr,
    LEVELS: tl.constexpr,
    BINS: tl.constexpr,
    SEEN: tl.constexpr,
):
    """The continuation with the most expected accepted tokens, over all match lengths."""
    row = tl.program_id(0)
    slot = tl.load(slot_of + row)
    length = tl.load(lengths + slot)
    tl.store(histogram + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    line = tokens + slot.to(tl.int64) * capacity
    which = tl.arange(0, SEEN)
    there = which < tl.load(seen_count + row)
    after = tl.load(seen_after + row * SEEN + which, mask=there, other=0)
    matched = tl.load(seen_matched + row * SEEN + which, mask=there, other=0)
    level = tl.arange(0, LEVELS) + 1
    limit = tl.load(limits + level - 1)
    member = (matched[None, :] >= level[:, None]) & (level <= DEPTH)[:, None]
    members = member.to(tl.float16)
    size = tl.sum(members.to(tl.float32), 1)[:, None]
    same = there[:, None] & there[None, :]
    walking = member
    score = tl.zeros((LEVELS, SEEN), tl.float32)
    width = tl.zeros((LEVELS, SEEN), tl.int32)
    for i in tl.static_range(DRAFT):
        inside = there & (after + i < length)
        token = tl.load(line + after + i, mask=inside, other=-1)
        same = same & (token[:, None] == token[None, :]) & inside[:, None]
        agree = tl.dot(members, same.to(tl.float16))
        walking = walking & (agree >= min_prob * size) & (agree > 0) & (limit > i)[:, None]
        score += tl.where(walking, agree, 0.0)
        width += walking.to(tl.int32)
    worth = tl.where(width > 0, score / tl.maximum(size, 1.0), -1.0)
    best = tl.maximum(tl.max(tl.max(worth, 1), 0) - 1e-5, 0.0)
    key = level.to(tl.int64)[:, None] * 4294967296 + after.to(tl.int64)[None, :]
    key = tl.where(worth >= best, key, 0)
    chosen = tl.max(tl.max(key, 1), 0)
    taken = tl.max(tl.max(tl.where(key == chosen, width, 0), 1), 0)
    place = tl.arange(0, DRAFT_PADDED)
    start = (chosen % 4294967296).to(tl.int32)
    found = tl.load(line + start + place, mask=place < taken, other=-1)
    tl.store(drafts + row * DRAFT + place, found, mask=place < DRAFT)
    tl.store(counts + row, taken)


class DeviceSuffix:
    """`suffix` for `rows` rows at once; fills `drafts` int32 [rows, draft_len], `counts` [rows]."""

    needs: tuple[int, ...] = ()

    def __init__(
        self,
        rows: int,
        draft_len: int,
        *,
        min_prob: float,
        factor: float,
        depth: int,
        device: torch.device,
    ) -> None:
        self._rows, self._draft_len, self._depth = rows, draft_len, depth
        self._min_prob, self._device = min_prob, device
        self._levels = max(16, triton.next_power_of_2(depth))
        self._bins = triton.next_power_of_2(depth + 1)
        limits = [min(draft_len, max(1, int(factor * n))) for n in range(1, self._levels + 1)]
        self._limits = torch.tensor(limits, dtype=torch.int32, device=device)
        self._histogram = self._ints(rows, self._bins)
        self._after, self._found = self._ints(rows, SEEN), self._ints(rows, SEEN)
        self._count = self._ints(rows)
        self._matched: Tensor | None = None

    def _ints(self, *size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def enqueue(self, step: Any) -> None:
        """The drafting of one `target.graphs.Step`."""
        slots = step.slots
        self.find(slots.tokens, slots.lengths, step.slot_of, drafts=step.drafts, counts=step.counts)

    def find(
        self, tokens: Tensor, lengths: Tensor, slot_of: Tensor, *, drafts: Tensor, counts: Tensor
    ) -> None:
        """Launch. `tokens` int32 [slots, capacity], `lengths` int32 [slots], `slot_of` [rows]."""
        rows, capacity = len(slot_of), tokens.shape[1]
        if self._matched is None:
            self._matched = torch.zeros(rows, capacity, dtype=torch.int8, device=self._device)
        matched, shape = self._matched, {"DEPTH": self._depth, "BINS": self._bins}
        _match_kernel[(rows, triton.cdiv(capacity, CHUNK))](
            tokens, lengths, slot_of, matched, self._histogram, capacity, **shape, CHUNK=CHUNK
        )
        _select_kernel[(rows,)](
            lengths,
            slot_of,
            matched,
            self._histogram,
            self._after,
            self._found,
            self._count,
            capacity,
            **shape,
            CHUNK=CHUNK,
            SEEN=SEEN,
        )
        _walk_kernel[(rows,)](
            tokens,
            lengths,
            slot_of,
            self._histogram,
            self._after,
            self._found,
            self._count,
            self._limits,
            drafts,
            counts,
            capacity,
            self._min_prob,
            **shape,
            DRAFT=self._draft_len,
            DRAFT_PADDED=triton.next_power_of_2(self._draft_len),
            LEVELS=self._levels,
            SEEN=SEEN,
            num_warps=8,
        )
