"""Head norm, rotation and the cache write of one layer's fresh queries, keys and values."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import lead, overlap, wait
from slipstream.models.cuda.linear import Normed
from slipstream.models.cuda.norm import inverse_rms


@triton.jit
def _rope_kernel(
    qkv,
    cos,
    sin,
    norms,
    positions,
    slots,
    storage,
    bias,
    squares,
    stride,
    queries,
    kv,
    parts,
    inner,
    eps,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    NORMED: tl.constexpr,
    ROTATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    lead(PDL)
    wait(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, DIM // 2)
    slot = tl.load(slots + token).to(tl.int64)
    turned, real = head < queries + kv, head < queries + 2 * kv
    base = qkv + token * stride + head[:, None] * DIM + half[None, :]
    low = tl.load(base, mask=real[:, None], other=0.0)
    high = tl.load(base + DIM // 2, mask=real[:, None], other=0.0)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if SCALED:
        scale = inverse_rms(squares, token, parts, inner, eps, PARTS)
        a, b = a * scale, b * scale
    if HAS_BIAS:
        shift = bias + head[:, None] * DIM + half[None, :]
        a += tl.load(shift, mask=real[:, None], other=0.0).to(tl.float32)
        b += tl.load(shift + DIM // 2, mask=real[:, None], other=0.0).to(tl.float32)
    low, high = a.to(low.dtype), b.to(high.dtype)
    a, b = low.to(tl.float32), high.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / DIM + eps)
        weights = norms + head[:, None] * DIM + half[None, :]
        low_weight = tl.load(weights, mask=turned[:, None], other=0.0).to(tl.float32)
        high_weight = tl.load(weights + DIM // 2, mask=turned[:, None], other=0.0).to(tl.float32)
        a = (a * scale[:, None]).to(low.dtype).to(tl.float32) * low_weight
        b = (b * scale[:, None]).to(low.dtype).to(tl.float32) * high_weight
        a, b = a.to(low.dtype).to(tl.float32), b.to(low.dtype).to(tl.float32)
    if ROTATED:
        position = tl.load(positions + token).to(tl.int64)
        table = position * DIM + half
        c = tl.load(cos + table).to(tl.float32)[None, :]
        s = tl.load(sin + DIM // 2 + table).to(tl.float32)[None, :]
        a, b = a * c - b * s, b * c + a * s
    low = tl.where(turned[:, None], a.to(low.dtype), low)
    high = tl.where(turned[:, None], b.to(low.dtype), high)
    tl.store(base, low, mask=(head < queries)[:, None])
    tl.store(base + DIM // 2, high, mask=(head < queries)[:, None])
    kept = ((head >= queries) & real & (slot >= 0))[:, None]
    cell = storage + slot * 2 * kv * DIM + (head - queries)[:, None] * DIM + half[None, :]
    tl.store(cell, low, mask=kept)
    tl.store(cell + DIM // 2, high, mask=kept)


def rotate_and_store(
    qkv: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    *,
    norms: Tensor | None,
    eps: float,
    positions: Tensor,
    slots: Tensor,
    storage: Tensor,
    kv: int,
    source: Normed | None = None,
    bias: Tensor | None = None,
) -> None:
    """Finish one layer's projections in place: queries in `qkv`, keys and values in `storage`.

    `qkv` [tokens, (queries + 2 * kv) * dim], whose rows may lie apart; `tables` cos and signed sin,
    [positions, dim] each (see `models.rope`), None for layers without rotation; `norms` [queries +
    kv, dim] or None; `positions`, `slots` int32 [tokens], a token of slot -1 is not stored;
    `storage` [slots, 2 * kv, dim]. `source`: what `qkv` is a product of, if its 1 / rms is still
    due; it is applied here, and then `bias` [qkv's width] is added.
    """
    squares = source.squares if source is not None else None
    parts = squares.shape[1] if squares is not None else 1
    tokens, dim = qkv.shape[0], storage.shape[2]
    heads = qkv.shape[1] // dim
    block = 8 if heads >= 8 else triton.next_power_of_2(heads)
    cos, sin = tables if tables is not None else (qkv, qkv)
    _rope_kernel[(tokens, triton.cdiv(heads, block))](
        qkv,
        cos,
        sin,
        norms if norms is not None else qkv,
        positions,
        slots,
        storage,
        bias if bias is not None else qkv,
        squares if squares is not None else qkv,
        qkv.stride(0),
        heads - 2 * kv,
        kv,
        parts,
        source.x.shape[1] if source is not None else 1,
        eps,
        DIM=dim,
        HEADS=block,
        NORMED=norms is not None,
        ROTATED=tables is not None,
        HAS_BIAS=bias is not None,
        SCALED=squares is not None,
        PARTS=triton.next_power_of_2(parts),
        num_warps=2,
        **overlap(qkv, early=True),
    )
