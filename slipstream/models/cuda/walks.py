"""Walks along a block, token by token, in few launches: DFlash2's selector, DSpark's Markov head.

A walk made of stock operations is some sixty launches a step, as long as a third of a small
target's forward. Numbers as in `drafters.dflash2` and `drafters.dspark`, greedy.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import overlap, wait

PART = 512
"""Columns of the head that one program looks at."""


@triton.jit
def _select_kernel(
    anchors,
    unary,
    ids,
    projected,
    before,
    after,
    out,
    anchor_stride,
    DRAFT: tl.constexpr,
    TOP: tl.constexpr,
    TOP_PADDED: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    top, rank = tl.arange(0, TOP_PADDED), tl.arange(0, RANK_PADDED)
    inside = (top[:, None] < TOP) & (rank[None, :] < RANK)
    token = tl.load(anchors + row * anchor_stride).to(tl.int64)
    for i in tl.static_range(DRAFT):
        at = row * DRAFT + i
        own = tl.load(before + token * RANK + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        state = tl.load(projected + at * RANK + rank, mask=rank < RANK, other=0.0).to(tl.float32)
        found = tl.load(ids + at * TOP + top, mask=top < TOP, other=0)
        codes = tl.load(after + found[:, None] * RANK + rank[None, :], mask=inside, other=0.0)
        bonds = tl.sum((own * state)[None, :] * codes.to(tl.float32), 1)
        score = tl.load(unary + at * TOP + top, mask=top < TOP, other=float("-inf")) + bonds
        score = tl.where(top < TOP, score, float("-inf"))
        best = tl.min(tl.where(score == tl.max(score, 0), top, TOP - 1), 0)
        token = tl.sum(tl.where(top == best, found, 0), 0).to(tl.int64)
        tl.store(out + at, token)


def select(
    anchors: Tensor,
    unary: Tensor,
    ids: Tensor,
    *,
    projected: Tensor,
    before: Tensor,
    after: Tensor,
) -> Tensor:
    """DFlash2's greedy walk: int64 [rows, draft_len].

    `anchors` int64 [rows]; `unary` float32 and `ids` int64 [rows, draft_len, top_k], each token's
    candidates; `projected` [rows, draft_len, rank]; `before`, `after` [vocab, rank].
    """
    rows, draft_len, top = unary.shape
    rank = before.shape[1]
    out = torch.empty(rows, draft_len, dtype=torch.int64, device=unary.device)
    _select_kernel[(rows,)](
        anchors,
        unary,
        ids,
        projected,
        before,
        after,
        out,
        anchors.stride(0),
        DRAFT=draft_len,
        TOP=top,
        TOP_PADDED=triton.next_power_of_2(top),
        RANK=rank,
        RANK_PADDED=triton.next_power_of_2(rank),
        num_warps=1,
        **overlap(projected),
    )
    return out


@triton.jit
def _chosen(peaks, best, mapping, first, parts, PARTS: tl.constexpr, MAPPED: tl.constexpr):
    """The token that wins among a row's parts, of which the `first` cell is given."""
    part = tl.arange(0, PARTS)
    peak = tl.load(peaks + first + part, mask=part < parts, other=float("-inf"))
    # Lower columns first where peaks are equal, as argmax has it.
    which = tl.min(tl.where(peak == tl.max(peak, 0), part, parts - 1), 0)
    column = tl.load(best + first + which).to(tl.int64)
    if MAPPED:
        column = tl.load(mapping + column)
    return column


@triton.jit
def _markov_kernel(
    anchors,
    logits,
    first,
    second,
    mapping,
    peaks,
    best,
    out,
    anchor_stride,
    columns,
    parts,
    AT: tl.constexpr,
    DRAFT: tl.constexpr,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Two sets of cells in turn: what programs of this launch write, none of them reads.
    here = ((AT % 2) * tl.num_programs(0) + row) * parts
    if AT == 0:
        token = tl.load(anchors + row * anchor_stride).to(tl.int64)
    else:
        there = (((AT - 1) % 2) * tl.num_programs(0) + row) * parts
        token = _chosen(peaks, best, mapping, there, parts, PARTS=PARTS, MAPPED=MAPPED)
        tl.store(out + row * DRAFT + AT - 1, token)
    if AT < DRAFT:
        at, bias = part * PART + tl.arange(0, PART), tl.zeros((PART,), tl.float32)
        for start in range(0, RANK, CHUNK):
            rank = start + tl.arange(0, CHUNK)
            own = tl.load(first + token * RANK + rank, mask=rank < RANK, other=0.0)
            inside = (at[:, None] < columns) & (rank[None, :] < RANK)
            codes = tl.load(second + at[:, None] * RANK + rank[None, :], mask=inside, other=0.0)
            bias += tl.sum(codes.to(tl.float32) * own.to(tl.float32)[None, :], 1)
        value = tl.load(
            logits + (row * DRAFT + AT) * columns + at, mask=at < columns, other=float("-inf")
        )
        # Rounded where stock operations round, so that ties fall alike.
        rounded = bias.to(value.dtype).to(tl.float32)
        score = (value.to(tl.float32) + rounded).to(value.dtype).to(tl.float32)
        peak = tl.max(score, 0)
        which = tl.min(tl.where(score == peak, at, columns - 1), 0)
        tl.store(peaks + here + part, peak)
        tl.store(best + here + part, which)


def markov(
    anchors: Tensor, logits: Tensor, *, first: Tensor, second: Tensor, ids: Tensor | None
) -> Tensor:
    """DSpark's greedy walk with a vanilla Markov head: int64 [rows, draft_len].

    `anchors` int64 [rows]; `logits` [rows, draft_len, columns] of the head; `first` [vocab, rank]
    of the token before, `second` [columns, rank]; `ids` int64 [columns], the target's token of each
    column, None where these are the target's own.
    """
    rows, draft_len, columns = logits.shape
    parts, rank = triton.cdiv(columns, PART), first.shape[1]
    peaks = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
    best = torch.empty(2, rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, draft_len, dtype=torch.int64, device=logits.device)
    for i in range(draft_len + 1):
        _markov_kernel[(rows, parts if i < draft_len else 1)](
            anchors,
            logits,
            first,
            second,
            best if ids is None else ids,
            peaks,
            best,
            out,
            anchors.stride(0),
            columns,
            parts,
            AT=i,
            DRAFT=draft_len,
            RANK=rank,
            CHUNK=min(16, triton.next_power_of_2(rank)),
            PART=min(PART, triton.next_power_of_2(columns)),
            PARTS=triton.next_power_of_2(parts),
            MAPPED=ids is not None,
            **overlap(first),
        )
    return out
