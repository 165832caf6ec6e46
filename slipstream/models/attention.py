"""Attention over paged keys and values, read in place. Compiled by TorchScript with its caller.

Query heads of a group are folded into query rows, so each key is read once a group. Heads arrive
in (group, kv_head) order (see `models.dense`), which makes the folding and its undoing views.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F


class Segment(NamedTuple):
    """One kernel call: `rows` x `queries` tokens of the flat batch, from token `start` to `stop`.

    `base`: slot of the first row's first visible position; `stride`: slots from one row to the
    next; `length`: visible positions (of the longest row). `slots` [length] replaces base and
    stride for a scattered row. `mask`: additive [rows or 1, 1, queries or queries * group, length],
    None where everything (or, if `causal`, everything up to itself) is visible. `pad` int64
    [rows * queries] picks the token behind each query where rows are ragged or absent; `unpad`
    int64 [stop - start] undoes it. `folded`: a group's heads are query rows, else batch entries.
    """

    start: int
    stop: int
    rows: int
    queries: int
    base: int
    stride: int
    length: int
    folded: bool
    causal: bool
    mask: Optional[Tensor]  # noqa: UP045 - TorchScript resolves these at run time
    slots: Optional[Tensor]  # noqa: UP045
    pad: Optional[Tensor]  # noqa: UP045
    unpad: Optional[Tensor]  # noqa: UP045


def attend(heads: Tensor, storage: Tensor, s: Segment, kv: int) -> Tensor:
    """Attention of one segment: [stop - start, num_heads * head_dim].

    `heads` [N, num_heads + 2 * kv, head_dim]; `storage` [slots, 2 * kv, head_dim], keys before
    values, this batch's already in it.
    """
    queries = heads.size(1) - 2 * kv
    dim = heads.size(2)
    group = queries // kv
    rows, stride, base = s.rows, s.stride, s.base
    if not s.folded:
        rows, stride = group, 0
    slots = s.slots
    if slots is not None:
        storage, base = storage.index_select(0, slots), 0
    width = 2 * kv * dim
    offset = storage.storage_offset() + base * width
    keys = storage.as_strided([rows, kv, s.length, dim], [stride * width, dim, width, 1], offset)
    values = storage.as_strided(
        [rows, kv, s.length, dim], [stride * width, dim, width, 1], offset + kv * dim
    )
    out = F.scaled_dot_product_attention(
        _fold(heads, s, kv, queries), keys, values, attn_mask=s.mask, is_causal=s.causal
    )
    if s.folded:
        # The kernel's output lies in memory as [rows, queries * group, kv, dim]: a view again.
        flat = out.transpose(1, 2).reshape(s.rows * s.queries, queries * dim)
    else:
        flat = out.permute(2, 0, 1, 3).reshape(s.queries, queries * dim)
    unpad = s.unpad
    return flat if unpad is None else flat.index_select(0, unpad)


def _fold(heads: Tensor, s: Segment, kv: int, queries: int) -> Tensor:
    """Queries as [rows, kv, queries * group, dim], or [group, kv, queries, dim] if not folded."""
    dim = heads.size(2)
    group = queries // kv
    pad = s.pad
    if pad is not None:
        own = heads[:, :queries].index_select(0, pad)
        return own.view(s.rows, s.queries * group, kv, dim).transpose(1, 2)
    if not s.folded:
        own = heads[s.start : s.stop, :queries]
        return own.reshape(s.queries, group, kv, dim).permute(1, 2, 0, 3)
    if s.queries == 1:
        token = heads.stride(0)
        offset = heads.storage_offset() + s.start * token
        return heads.as_strided([s.rows, kv, group, dim], [token, dim, kv * dim, 1], offset)
    own = heads[s.start : s.stop, :queries].contiguous()
    return own.view(s.rows, s.queries * group, kv, dim).transpose(1, 2)


def attend_all(heads: Tensor, storage: Tensor, segments: list[Segment], kv: int) -> Tensor:
    """Attention of the whole flat batch, segment by segment: [N, num_heads * head_dim].

    Rows of `heads` behind the last segment belong to nobody; theirs are zero.
    """
    parts = [attend(heads, storage, s, kv) for s in segments]
    spare = heads.size(0) - segments[-1].stop
    if spare > 0:
        parts.append(parts[0].new_zeros([spare, parts[0].size(1)]))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
