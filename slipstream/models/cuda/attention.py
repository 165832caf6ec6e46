"""Attention over paged keys and values: a few verify rows or a prompt chunk, one kernel.

A program owns one KV head of one *tile* (up to BLOCK_M (token, query head) pairs of one row) and
one *split* of the row's positions. A group's query heads sit in one tile, so each key is read once
a group. Splits fill the chip where rows are few and contexts long (flash-decoding, Dao et al.
2023). Few splits are merged by the last program to finish, many by a second kernel. Query heads are
ordered (group, kv_head), as everywhere here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import lead, overlap, wait
from slipstream.models.cuda.verify import serves, verify_attention

LOG2E = 1.4426950408889634
MAX_SPLITS = 64
_FEW_SPLITS = 8
"""So many partial results are merged by one program as fast as a launch takes."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Where the queries of a forward lie. All int32 on the device.

    `row`, `first` [tiles]: the row a tile belongs to and the first of its tokens in it. `start`,
    `length`, `token` [rows]: positions cached before this forward, tokens in it, and the flat index
    of the first. `pages` [rows, width]: page tables. `tokens`: tokens a tile covers at most.
    `splits`: parts a row's positions are cut into.
    """

    row: Tensor
    first: Tensor
    start: Tensor
    length: Tensor
    token: Tensor
    pages: Tensor
    tokens: int
    splits: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """Partial results of the splits: `out` float32 [tiles, kv, splits, block, dim], `sums` float32
    [tiles, kv, splits, block, 2] (highest score, total weight). `tickets` int32 [tiles, kv]: splits
    that have finished; zero between launches.
    """

    out: Tensor
    sums: Tensor
    tickets: Tensor


@triton.jit(do_not_specialize=["pages_width"])  # one compilation for all table sizes
def _attend_kernel(
    qkv,
    storage,
    out,
    part_out,
    part_sums,
    tickets,
    sinks,
    tile_row,
    tile_first,
    row_start,
    row_length,
    row_token,
    pages,
    pages_width,
    queries,
    kv,
    scale,
    window,
    PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    SPLITS: tl.constexpr,
    MERGED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    lead(PDL)
    wait(PDL)
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(tile_row + tile)
    first = tl.load(tile_first + tile)
    start, length = tl.load(row_start + row), tl.load(row_length + row)
    lane = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, DIM)
    token = first + lane // GROUP
    query_head = (lane % GROUP) * kv + head
    alive = (token < length) & (lane < (BLOCK_M // GROUP) * GROUP)
    position = start + token
    if CAUSAL:
        end = tl.minimum(start + first + BLOCK_M // GROUP, start + length)
    else:
        end = start + length
    begin = 0
    if WINDOWED:
        begin = tl.maximum(start + first + 1 - window, 0) // BLOCK_T * BLOCK_T
    reach = tl.cdiv(tl.cdiv(end - begin, SPLITS), BLOCK_T) * BLOCK_T
    low = begin + split * reach
    high = tl.minimum(low + reach, end)
    flat = (tl.load(row_token + row) + token).to(tl.int64)
    width = (queries + 2 * kv) * DIM
    q = tl.load(
        qkv + flat[:, None] * width + query_head[:, None] * DIM + dim[None, :],
        mask=alive[:, None],
        other=0.0,
    )
    peak = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    table = pages + row.to(tl.int64) * pages_width
    for at in range(low, high, BLOCK_T):
        spot = at + tl.arange(0, BLOCK_T)
        there = spot < high
        if PAGE % BLOCK_T == 0:
            page = tl.load(table + at // PAGE).to(tl.int64)
            cell = ((page * PAGE + at % PAGE + tl.arange(0, BLOCK_T)) * 2 * kv + head) * DIM
        else:
            page = tl.load(table + spot // PAGE, mask=there, other=0).to(tl.int64)
            cell = ((page * PAGE + spot % PAGE) * 2 * kv + head) * DIM
        keys = tl.load(storage + cell[None, :] + dim[:, None], mask=there[None, :], other=0.0)
        scores = tl.dot(q, keys, input_precision=PRECISION) * scale
        seen = there[None, :]
        if CAUSAL:
            seen = seen & (spot[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (spot[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, -1.0e30)
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.where(seen, tl.exp2(scores - higher[:, None]), 0.0)
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(
            storage + cell[:, None] + kv * DIM + dim[None, :], mask=there[:, None], other=0.0
        )
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)
        peak = higher
    last = True
    if SPLITS > 1:
        first_cell = (tile.to(tl.int64) * kv + head) * SPLITS * BLOCK_M + lane
        cell = first_cell + split * BLOCK_M
        tl.store(part_sums + cell * 2, peak)
        tl.store(part_sums + cell * 2 + 1, total)
        if low < high:
            tl.store(part_out + cell[:, None] * DIM + dim[None, :], acc)
        last = False
        if MERGED:
            tl.debug_barrier()  # the whole program has stored before its ticket is taken
            ticket = tickets + tile * kv + head
            last = tl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
            if last:
                tl.store(ticket, 0)
                peak, total, acc = _merged(
                    part_out, part_sums, first_cell, alive, BLOCK_M, DIM, SPLITS
                )
    if last:
        if SINKS:
            sink = (
                tl.load(sinks + query_head, mask=alive, other=0.0).to(tl.float32)
                * 1.4426950408889634
            )
            higher = tl.maximum(peak, sink)
            acc = acc * tl.exp2(peak - higher)[:, None]
            total = total * tl.exp2(peak - higher) + tl.exp2(sink - higher)
        mean = acc / tl.where(total > 0, total, 1.0)[:, None]
        target = out + flat[:, None] * queries * DIM + query_head[:, None] * DIM + dim[None, :]
        tl.store(target, mean.to(out.dtype.element_ty), mask=alive[:, None])


@triton.jit
def _merged(
    part_out,
    part_sums,
    first_cell,
    alive,
    BLOCK_M: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Highest score, total weight and weighted sum over all splits of a tile's head."""
    dim = tl.arange(0, DIM)
    peak = tl.full((BLOCK_M,), -1.0e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    for split in tl.static_range(SPLITS):
        cell = first_cell + split * BLOCK_M
        own = tl.load(part_sums + cell * 2, mask=alive, other=-1.0e30)
        weight = tl.load(part_sums + cell * 2 + 1, mask=alive, other=0.0)
        part = tl.load(
            part_out + cell[:, None] * DIM + dim[None, :], mask=(weight > 0)[:, None], other=0.0
        )
        higher = tl.maximum(peak, own)
        old, new = tl.exp2(peak - higher), tl.exp2(own - higher)
        total = total * old + weight * new
        acc = acc * old[:, None] + part * new[:, None]
        peak = higher
    return peak, total, acc


@triton.jit
def _merge_kernel(
    part_out,
    part_sums,
    sinks,
    out,
    tile_row,
    tile_first,
    row_length,
    row_token,
    queries,
    kv,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LANES: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PADDED: tl.constexpr,
    SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    lead(PDL)
    wait(PDL)
    tile, head = tl.program_id(0), tl.program_id(1)
    lane = tl.program_id(2) * LANES + tl.arange(0, LANES)
    row = tl.load(tile_row + tile)
    token = tl.load(tile_first + tile) + lane // GROUP
    alive = (token < tl.load(row_length + row)) & (lane < (BLOCK_M // GROUP) * GROUP)
    query_head = (lane % GROUP) * kv + head
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, DIM)
    first = (tile.to(tl.int64) * kv + head) * SPLITS
    cell = (first + split[:, None]) * BLOCK_M + lane[None, :]
    inside = (split < SPLITS)[:, None] & alive[None, :]
    peaks = tl.load(part_sums + cell * 2, mask=inside, other=-1.0e30)
    totals = tl.load(part_sums + cell * 2 + 1, mask=inside, other=0.0)
    peak = tl.max(peaks, 0)
    if SINKS:
        sink = tl.load(sinks + query_head, mask=alive, other=0.0).to(tl.float32)
        sink = sink * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    shares = tl.where(totals > 0, tl.exp2(peaks - peak[None, :]), 0.0)
    total = tl.sum(shares * totals, 0)
    if SINKS:
        total += tl.exp2(sink - peak)
    parts = tl.load(
        part_out + cell[:, :, None] * DIM + dim[None, None, :],
        mask=(totals > 0)[:, :, None],
        other=0.0,
    )
    mean = tl.sum(parts * shares[:, :, None], 0) / tl.where(total > 0, total, 1.0)[:, None]
    flat = (tl.load(row_token + row) + token).to(tl.int64)
    target = out + (flat * queries + query_head)[:, None] * DIM + dim[None, :]
    tl.store(target, mean.to(out.dtype.element_ty), mask=alive[:, None])


@dataclass(frozen=True, slots=True)
class Reading:
    """Positions a program reads at once, how many such reads are in flight, and its warps."""

    positions: int
    stages: int
    warps: int = 4


def reading_for(splits: int, block: int) -> Reading:
    """Measured on one NVIDIA H200 (docs/gpu.md): many programs take small bites, few large ones."""
    shape = Reading(32, 5, 2) if splits <= 4 else Reading(64, 2)
    return shape if block <= 32 else replace(shape, warps=8 if block >= 128 else 4)


def block_rows(tokens: int, group: int) -> int:
    """(token, query head) pairs a tile of so many tokens is padded to."""
    return max(16, triton.next_power_of_2(tokens * group))


def scratch_for(
    tiles: int, *, kv: int, dim: int, group: int, tokens: int, splits: int, device: torch.device
) -> Scratch:
    """Room for the partial results of one layer's attention; layers may share it."""
    shape = (tiles, kv, splits, block_rows(tokens, group)) if splits > 1 else (1, 1, 1, 1)
    return Scratch(
        torch.empty((*shape, dim), dtype=torch.float32, device=device),
        torch.empty((*shape, 2), dtype=torch.float32, device=device),
        torch.zeros(tiles, kv, dtype=torch.int32, device=device),
    )


def attend(
    qkv: Tensor,
    storage: Tensor,
    tiles: Tiles,
    *,
    scratch: Scratch,
    page_size: int,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every query to the positions it may see: [tokens, queries * dim].

    `qkv` [tokens, (queries + 2 * kv) * dim], its queries rotated; `storage` [slots, 2 * kv, dim],
    this forward's keys and values already in it. A query sees positions up to its own, without
    `causal` its row to the end, with `window` only the last so many. `sinks` [queries]: logits in
    the softmax that have no value (Xiao et al. 2024; gpt-oss).
    """
    if window is None and sinks is None and serves(qkv, storage, tiles, page_size):
        return verify_attention(qkv, storage, tiles, page_size=page_size, causal=causal)
    kv, dim = storage.shape[1] // 2, storage.shape[2]
    queries = qkv.shape[1] // dim - 2 * kv
    group, single = queries // kv, qkv.dtype == torch.float32
    block = block_rows(tiles.tokens, group)
    out = qkv.new_empty(len(qkv), queries * dim)
    shape = Reading(32, 2) if single else reading_for(tiles.splits, block)
    _attend_kernel[(tiles.row.shape[0], kv, tiles.splits)](
        qkv,
        storage,
        out,
        *(scratch.out, scratch.sums, scratch.tickets),
        sinks if sinks is not None else qkv,
        tiles.row,
        tiles.first,
        tiles.start,
        *(tiles.length, tiles.token, tiles.pages, tiles.pages.shape[1]),
        queries,
        kv,
        LOG2E / dim**0.5,
        window or 0,
        PAGE=page_size,
        GROUP=group,
        DIM=dim,
        BLOCK_M=block,
        BLOCK_T=shape.positions,
        SPLITS=tiles.splits,
        MERGED=tiles.splits <= _FEW_SPLITS,
        CAUSAL=causal,
        WINDOWED=window is not None,
        SINKS=sinks is not None,
        PRECISION="ieee" if single else "tf32",
        num_warps=shape.warps,
        num_stages=shape.stages,
        **overlap(qkv),
    )
    if tiles.splits > _FEW_SPLITS:
        _merge(scratch, tiles, out, kv=kv, group=group, sinks=sinks)
    return out


def _merge(
    scratch: Scratch, tiles: Tiles, out: Tensor, *, kv: int, group: int, sinks: Tensor | None
) -> None:
    block, dim = scratch.out.shape[3:]
    padded = triton.next_power_of_2(tiles.splits)
    lanes = max(1, min(triton.next_power_of_2(tiles.tokens * group), 32 // padded))
    _merge_kernel[(tiles.row.shape[0], kv, triton.cdiv(tiles.tokens * group, lanes))](
        scratch.out,
        scratch.sums,
        sinks if sinks is not None else out,
        out,
        tiles.row,
        tiles.first,
        tiles.length,
        tiles.token,
        kv * group,
        kv,
        GROUP=group,
        DIM=dim,
        BLOCK_M=block,
        LANES=lanes,
        SPLITS=tiles.splits,
        SPLITS_PADDED=padded,
        SINKS=sinks is not None,
        num_warps=4,
        **overlap(out),
    )
