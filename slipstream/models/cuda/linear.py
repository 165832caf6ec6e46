"""Matrix products of few rows at the speed their weights can be read.

At 1 to 16 rows a product is a read of its weights: one program owns BLOCK_N output columns and
streams their weights once. What would be the next layer's norm rides along in the epilogue: beside
the new residual stream x it writes x * norm_weight, and each program's share of sum(x^2). The
missing factor 1 / rms is a number a row, so whoever reads the next product multiplies by it
(`rope`, `norm.silu_gate`), and no launch is spent on norms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

FEW_ROWS = 16
"""Up to this many rows one tile of rows serves all."""


@triton.jit
def _linear_kernel(
    x,
    weight,
    bias,
    residual,
    norm,
    out,
    scaled,
    squares,
    rows,
    columns,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr,
):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    alive, inside = m < rows, n < columns
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
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
    at = m[:, None] * columns + n[None, :]
    kept = alive[:, None] & inside[None, :]
    if HAS_BIAS:
        total += tl.load(bias + n, mask=inside, other=0.0).to(tl.float32)[None, :]
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
    """How a product is cut: output columns and inner length a program handles at once."""

    n: int
    k: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Normed:
    """A residual stream ready for the next products.

    `x` [rows, hidden]; `scaled` [rows, hidden] is x * norm_weight, times 1 / rms if `squares` is
    None; `squares` float32 [rows, parts]: shares of sum(x^2) a row.
    """

    x: Tensor
    scaled: Tensor
    squares: Tensor | None


def tile_for(columns: int, inner: int) -> Tile:
    """Measured on one NVIDIA H200 (docs/gpu.md): two warps a program, four loads in flight."""
    if inner % 256 == 0:
        return Tile(16, 256, 2, 4)
    return Tile(16, 64, 2, 6)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x @ weight.T + bias + residual, rounded once.

    `x` [rows, inner] contiguous, `weight` [columns, inner], `residual` [rows, columns].
    """
    return _launch(x, weight, bias, residual, norm=None, tile=tile).x


def linear_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm: Tensor
) -> Normed:
    """`linear` plus everything the next norm, of weight `norm` [columns], needs."""
    return _launch(x, weight, bias, residual, norm=norm, tile=None)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    norm: Tensor | None,
    tile: Tile | None,
) -> Normed:
    rows, inner = x.shape
    columns = weight.shape[0]
    tile = tile or tile_for(columns, inner)
    block_m = 16 if rows <= 16 else min(128, triton.next_power_of_2(rows))
    grid = (triton.cdiv(columns, tile.n), triton.cdiv(rows, block_m))
    out = x.new_empty(rows, columns)
    scaled, squares = out, None
    if norm is not None:
        scaled = torch.empty_like(out)
        squares = torch.empty(rows, grid[0], dtype=torch.float32, device=x.device)
    _linear_kernel[grid](
        x,
        weight,
        bias if bias is not None else x,
        residual if residual is not None else x,
        norm if norm is not None else x,
        out,
        scaled,
        squares if squares is not None else x,
        rows,
        columns,
        inner,
        BLOCK_M=block_m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        EVEN_K=inner % tile.k == 0,
        EVEN_N=columns % tile.n == 0,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return Normed(out, scaled, squares)
