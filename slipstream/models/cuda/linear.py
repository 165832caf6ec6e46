"""Matrix products of few rows at the speed their weights can be read.

At 1 to 16 rows a product is a read of its weights: one program owns BLOCK_N output columns and
streams their weights once. Small weights are served up to 128 rows: there launches count. What
would be the next layer's norm rides along in the epilogue: beside the new residual stream x it
writes x * norm_weight, and each program's share of sum(x^2). The missing factor 1 / rms is a
number a row, so whoever reads the next product multiplies by it (`rope`, `linear_gated`), and no
launch is spent on norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import overlap, wait

FEW_ROWS = 16
"""Up to this many rows one tile of rows serves all."""
_TALL_ROWS = 64
"""Beyond so many rows a tile holds 64 of them: 1.04 ms of a verify pass of 128 rows of
SmolLM2-135M by stock products, 1.11 with tiles of 16 rows, 0.96 with these."""


@triton.jit(do_not_specialize=["rows"])  # one compilation for all batch sizes
def _linear_kernel(
    x,
    weight,
    bias,
    residual,
    norm,
    squares_in,
    out,
    scaled,
    squares,
    rows,
    columns,
    inner,
    parts,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    alive, inside = m < rows, n < columns
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row = weight + n[None, :].to(tl.int64) * inner
    for start in range(0, inner, BLOCK_K):
        at = start + k
        fits = at < inner
        if EVEN_K:
            xs = tl.load(x + m[:, None] * inner + at[None, :], mask=alive[:, None], other=0.0)
        else:
            xs = tl.load(
                x + m[:, None] * inner + at[None, :], mask=alive[:, None] & fits[None, :], other=0.0
            )
        if EVEN_K and EVEN_N:
            ws = tl.load(row + at[:, None])
        else:
            ws = tl.load(row + at[:, None], mask=fits[:, None] & inside[None, :], other=0.0)
        total = tl.dot(xs, ws, total, input_precision=PRECISION)
        if GATED:
            # The first half of the weight's rows is the gate, the second what it lets pass.
            up = row + columns.to(tl.int64) * inner + at[:, None]
            if EVEN_K and EVEN_N:
                us = tl.load(up)
            else:
                us = tl.load(up, mask=fits[:, None] & inside[None, :], other=0.0)
            other = tl.dot(xs, us, other, input_precision=PRECISION)
    at = m[:, None] * columns + n[None, :]
    kept = alive[:, None] & inside[None, :]
    if SCALED:
        part = tl.arange(0, PARTS)
        own = squares_in + m[:, None] * parts + part[None, :]
        shares = tl.load(own, mask=alive[:, None] & (part < parts)[None, :], other=0.0)
        scale = tl.rsqrt(tl.sum(shares, 1) / inner + eps)
        total, other = total * scale[:, None], other * scale[:, None]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if HAS_BIAS:
            other += tl.load(bias + columns + n, mask=inside, other=0.0).to(tl.float32)[None, :]
        total = total * tl.sigmoid(total) * other
    if HAS_RESIDUAL:
        total += tl.load(residual + at, mask=kept, other=0.0).to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=kept)
    if HAS_NORM:
        wide = tl.where(kept, rounded.to(tl.float32), 0.0)
        factor = tl.load(norm + n, mask=inside, other=0.0).to(tl.float32)
        tl.store(scaled + at, (wide * factor[None, :]).to(out.dtype.element_ty), mask=kept)
        share = tl.sum(wide * wide, 1)
        tl.store(squares + m * tl.num_programs(0) + tl.program_id(0), share, mask=alive)


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut: output columns, inner length and rows a program handles at once."""

    n: int
    k: int
    warps: int
    stages: int
    m: int = FEW_ROWS


@dataclass(frozen=True, slots=True)
class Normed:
    """A residual stream ready for the next products.

    `x` [rows, hidden]; `scaled` [rows, hidden] is x * norm_weight, times 1 / rms if `squares` is
    None; `squares` float32 [rows, parts]: shares of sum(x^2) a row.
    """

    x: Tensor
    scaled: Tensor
    squares: Tensor | None


def tile_for(rows: int, columns: int, inner: int, *, gated: bool) -> Tile:
    """Measured on one NVIDIA H200 (docs/log.md): small programs, many loads in flight. Where
    every tile of rows reads the weights again, fewer and wider programs.
    """
    if rows > _TALL_ROWS:
        deep = not gated and inner % 128 == 0
        return Tile(32, 128 if deep else 64, 4, 4 if gated or deep else 5, m=64)
    if rows > FEW_ROWS:
        if gated:
            return Tile(32, 64, 4, 5)
        return Tile(32, 64, 2, 6) if inner % 128 else Tile(32, 128, 4, 5)
    if inner % 256:
        return Tile(16, 64, 2, 6)
    if gated:
        return Tile(32, 128, 4, 4) if columns >= 8192 else Tile(16, 128, 2, 4)
    return Tile(64, 128, 4, 4) if columns >= 16384 else Tile(16, 256, 2, 5)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """Compute x @ weight.T + bias + residual, rounded once.

    `x` [rows, inner] contiguous, `weight` [columns, inner], `residual` [rows, columns].
    """
    return _launch(_Operands(x=x, weight=weight, bias=bias, residual=residual, tile=tile)).x


def linear_gated(
    source: Normed, weight: Tensor, bias: Tensor | None, *, eps: float, tile: Tile | None = None
) -> Tensor:
    """silu(first half) * second half of the normed stream's product, [rows, columns].

    `weight` [2 * columns, hidden], `bias` [2 * columns]. A 1 / rms still due is applied first.
    """
    return _launch(
        _Operands(
            x=source.scaled,
            weight=weight,
            bias=bias,
            squares=source.squares,
            eps=eps,
            gated=True,
            tile=tile,
        )
    ).x


def linear_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, norm: Tensor
) -> Normed:
    """`linear` plus everything the next norm, of weight `norm` [columns], needs."""
    return _launch(_Operands(x=x, weight=weight, bias=bias, residual=residual, norm=norm))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operands:
    """What a product takes; see the functions above."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None = None
    norm: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0
    gated: bool = False
    tile: Tile | None = None


def _launch(o: _Operands) -> Normed:
    x, squares = o.x, o.squares
    rows, inner = x.shape
    columns = o.weight.shape[0] // (2 if o.gated else 1)
    tile = o.tile or tile_for(rows, columns, inner, gated=o.gated)
    grid = (triton.cdiv(columns, tile.n), triton.cdiv(rows, tile.m))
    out = x.new_empty(rows, columns)
    scaled, shares = out, None
    if o.norm is not None:
        scaled = torch.empty_like(out)
        shares = torch.empty(rows, grid[0], dtype=torch.float32, device=x.device)
    parts = squares.shape[1] if squares is not None else 1

    def given(tensor: Tensor | None) -> Tensor:
        return tensor if tensor is not None else x

    _linear_kernel[grid](
        x,
        o.weight,
        given(o.bias),
        given(o.residual),
        given(o.norm),
        given(squares),
        out,
        scaled,
        given(shares),
        rows,
        columns,
        inner,
        parts,
        o.eps,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        HAS_BIAS=o.bias is not None,
        HAS_RESIDUAL=o.residual is not None,
        HAS_NORM=o.norm is not None,
        EVEN_K=inner % tile.k == 0,
        EVEN_N=columns % tile.n == 0,
        GATED=o.gated,
        SCALED=squares is not None,
        PARTS=triton.next_power_of_2(parts),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
        **overlap(x),
    )
    return Normed(out, scaled, shares)
