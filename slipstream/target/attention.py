"""Attention over paged keys and values, read in place wherever a row's pages are one run.

The flat batch is a sequence of *segments*, each attended to by one kernel call a layer:

- rows whose page runs lie at equal strides (see `cache.pages` on homes) form one segment, however
  their lengths differ: the storage is viewed as [rows, kv_heads, length, head_dim] and a mask hides
  what lies past each row's end. Whatever is behind a mask is finite: storage starts as zeros, and
  the target wipes entries that turned out not to be;
- a long chunk of a prompt is a segment of its own, causal without a mask when it starts at zero;
- a row with scattered pages (a shared prefix) is gathered first.

Query heads of a group are folded into query rows, so each key is read once a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Segment:
    """One kernel call: `rows` x `queries` tokens of the flat batch, from token `start` to `stop`.

    `base`: slot of the first row's first visible position; `stride`: slots from one row to the
    next; `length`: visible positions (of the longest row). `slots` [length] replaces base and
    stride for a scattered row. `mask`: additive [rows or 1, 1, queries or queries * group, length],
    None where everything (or, if `causal`, everything up to itself) is visible. `pad` int64 [rows *
    queries] picks the token behind each query where rows are ragged or absent; `unpad` int64 [stop
    - start] undoes it. `folded`: a group's heads are query rows (else they are batch entries).
    """

    start: int
    stop: int
    rows: int
    queries: int
    base: int
    stride: int
    length: int
    mask: Tensor | None
    folded: bool = True
    causal: bool = False
    slots: Tensor | None = None
    pad: Tensor | None = None
    unpad: Tensor | None = None


class PagedAttention:
    """Implements `models.dense.Attention` for one batch. `storage`: [layers] of [slots, 2 * kv,
    hd].

    `slots` int64 [N]: where each token's key and value go. `plans[i]`: the segments of layer i.
    """

    def __init__(
        self,
        config: ModelConfig,
        storage: Sequence[Tensor],
        slots: Tensor,
        plans: Sequence[Sequence[Segment]],
    ) -> None:
        self._queries, self._kv = config.num_heads, config.num_kv_heads
        self._group, self._dim = config.group, config.head_dim
        self._storage, self._slots, self._plans = storage, slots, plans
        self._scale = config.head_dim**-0.5

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """Store this batch's keys and values, then attend; see `models.dense.Attention`."""
        storage = self._storage[layer]
        storage.index_copy_(0, self._slots, heads[:, self._queries :])
        outputs = [self._attend(s, storage, heads) for s in self._plans[layer]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(self, segment: Segment, storage: Tensor, heads: Tensor) -> Tensor:
        s = segment
        keys, values = self._keys_values(s, storage)
        queries = self._fold(s, heads)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=s.mask, is_causal=s.causal, scale=self._scale
        )
        if s.folded:
            # The kernel's output lies in memory as [rows, queries * group, kv, hd]: a view again.
            flat = out.transpose(1, 2).reshape(s.rows * s.queries, self._queries * self._dim)
        else:
            flat = out.permute(2, 0, 1, 3).reshape(s.queries, self._queries * self._dim)
        return flat if s.unpad is None else flat.index_select(0, s.unpad)

    def _keys_values(self, s: Segment, storage: Tensor) -> tuple[Tensor, Tensor]:
        """Views [rows, kv, length, hd] of the storage (rows = group, stride 0, if not folded)."""
        rows, stride = (s.rows, s.stride) if s.folded else (self._group, 0)
        base = s.base
        if s.slots is not None:
            storage, base = storage.index_select(0, s.slots), 0
        width = 2 * self._kv * self._dim
        size = (rows, self._kv, s.length, self._dim)
        strides = (stride * width, self._dim, width, 1)
        offset = storage.storage_offset() + base * width
        return (
            storage.as_strided(size, strides, offset),
            storage.as_strided(size, strides, offset + self._kv * self._dim),
        )

    def _fold(self, s: Segment, heads: Tensor) -> Tensor:
        """Queries as [rows, kv, queries * group, hd], or [group, kv, queries, hd] if not folded."""
        kv, group, dim = self._kv, self._group, self._dim
        if not s.folded:
            own = heads[s.start : s.stop, : self._queries]
            return own.reshape(s.queries, group, kv, dim).permute(1, 2, 0, 3)
        if s.pad is None and s.queries == 1:
            token = heads.stride(0)
            offset = heads.storage_offset() + s.start * token
            return heads.as_strided((s.rows, kv, group, dim), (token, dim, kv * dim, 1), offset)
        own = heads[:, : self._queries]
        own = own[s.start : s.stop].contiguous() if s.pad is None else own.index_select(0, s.pad)
        return own.view(s.rows, s.queries * group, kv, dim).transpose(1, 2)
