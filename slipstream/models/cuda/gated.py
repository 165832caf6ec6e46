"""The gated product of 33 to 128 rows: both halves of the MLP's first weight and the gate between.

24,576 columns in tiles of 128 or 256 leave a third of a chip of 132 multiprocessors without work at
the end. Here a program takes one and a half blocks of columns of either half, so that 12,288 gated
columns make 128 equal programs, and the gate is applied before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.models.cuda.launch import is_hopper, overlap, read_rows_ahead, tried, wait
from slipstream.models.cuda.wide import MOST_ROWS


@triton.jit
def _gated_kernel(
    x,
    weight,
    narrow,
    raw_weight,
    out,
    rows,
    columns,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HALF: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    a = tl.program_id(0) * (BLOCK_N + HALF)
    b = a + BLOCK_N
    if AHEAD:
        read_rows_ahead(raw_weight, a, inner, 0, BLOCK_N, AHEAD, LANES)
        read_rows_ahead(raw_weight, columns + a, inner, 0, BLOCK_N, AHEAD, LANES)
        if HALF:
            read_rows_ahead(raw_weight, b, inner, 0, HALF, AHEAD, LANES)
            read_rows_ahead(raw_weight, columns + b, inner, 0, HALF, AHEAD, LANES)
    wait(PDL)
    both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    width: tl.constexpr = HALF if HALF else 16
    more = tl.zeros((BLOCK_M, 2 * width), tl.float32)
    for k in range(0, inner, BLOCK_K):
        xs = x.load([0, k])
        # Rows of the gate and rows of what it lets pass as one operand: x is then read once.
        both = tl.dot(xs, weight.load([0, a, k]).reshape(2 * BLOCK_N, BLOCK_K).T, both)
        if HALF:
            more = tl.dot(xs, narrow.load([0, b, k]).reshape(2 * HALF, BLOCK_K).T, more)
    _store_gated(both, out, a, rows, columns, BLOCK_M, BLOCK_N)
    if HALF:
        _store_gated(more, out, b, rows, columns, BLOCK_M, HALF)


@triton.jit
def _store_gated(both, out, n, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    gate, up = both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()
    m, at = tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    value = (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty)
    tl.store(out + m[:, None] * columns + at[None, :], value, mask=(m < rows)[:, None])


@dataclass(frozen=True, slots=True)
class Band:
    """Gated columns a program makes, `n` and half as many again if `more`; inner length a step."""

    n: int
    k: int
    more: bool
    warps: int
    stages: int
    ahead: int = 256

    @property
    def columns(self) -> int:
        """Gated columns of a program."""
        return self.n + (self.n // 2 if self.more else 0)


def band_for(x: Tensor, weight: Tensor, bias: Tensor | None) -> Band | None:
    """How to cut the gated product, or None where stock product and gate are as fast."""
    if not 32 < len(x) <= MOST_ROWS or x.dtype != torch.bfloat16 or not is_hopper(x.device):
        return None
    if tuple(weight.shape) != (24576, 4096) or bias is not None:
        return None
    few, ahead = len(x) <= 64, 0 if tried("bare") else 256
    if tried("gate"):
        return Band(64, 64, True, 4 if few else 8, 6 if few else 5, ahead)
    if tried("gate64"):
        return Band(64, 64, False, 4, 4 if few else 3, ahead)
    return Band(32, 64, False, 4, 4 if few else 3, ahead) if tried("gate32") else None


def gated_product(x: Tensor, weight: Tensor, band: Band) -> Tensor:
    """silu(first half) * second half of x @ weight.T: [rows, columns].

    `x` [rows, inner] contiguous, at most 128 rows; `weight` [2 * columns, inner], columns a
    multiple of `band.columns` and inner of `band.k`.
    """
    (rows, inner), columns = x.shape, weight.shape[0] // 2
    block, half = max(16, triton.next_power_of_2(rows)), band.columns - band.n
    halves = weight.view(2, columns, inner)
    out, early = x.new_empty(rows, columns), overlap(x)
    _gated_kernel[(columns // band.columns,)](
        TensorDescriptor.from_tensor(x, [block, band.k]),
        TensorDescriptor.from_tensor(halves, [2, band.n, band.k]),
        TensorDescriptor.from_tensor(halves, [2, half or band.n, band.k]),
        weight,
        out,
        rows,
        columns,
        inner,
        BLOCK_M=block,
        BLOCK_N=band.n,
        BLOCK_K=band.k,
        HALF=half,
        AHEAD=band.ahead if early["PDL"] else 0,
        LANES=32 * band.warps,
        num_warps=band.warps,
        num_stages=band.stages,
        **early,
    )
    return out
