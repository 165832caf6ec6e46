"""Products of 17 to 128 rows into few columns, cut along the inner length.

The stock products leave memory idle where a weight has too few columns to give every
multiprocessor a tile. Here programs also share the inner length, and whoever reads the result adds
their parts up (`norm.add_norm`), which saves the launch that would do nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.models.cuda.launch import is_hopper

MOST_ROWS = 128


@triton.jit
def _wide_kernel(
    x,
    weight,
    parts,
    rows,
    columns,
    inner,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
):
    n, part = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    reach = tl.cdiv(tl.cdiv(inner, BLOCK_K), SPLIT) * BLOCK_K
    low = part * reach
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(low, tl.minimum(low + reach, inner), BLOCK_K):
        total = tl.dot(x.load([0, k]), weight.load([n, k]).T, total)
    m, at = tl.arange(0, BLOCK_M), n + tl.arange(0, BLOCK_N)
    cell = (part * rows + m[:, None]) * columns + at[None, :]
    tl.store(parts + cell, total, mask=(m < rows)[:, None] & (at < columns)[None, :])


@dataclass(frozen=True, slots=True)
class Cut:
    """Output columns and inner length a program handles at once, and programs that share a tile."""

    n: int
    k: int
    split: int
    warps: int
    stages: int


MEASURED = ((4096, 12288), (4096, 4096))
"""Columns and inner length of weights for which a cut beats the stock product (docs/log.md)."""


def cut_for(x: Tensor, weight: Tensor) -> Cut | None:
    """How to cut x @ weight.T, or None where the stock product is as fast."""
    if not 16 < len(x) <= MOST_ROWS or x.dtype != torch.bfloat16 or not is_hopper(x.device):
        return None
    if tuple(weight.shape) not in MEASURED:
        return None
    return Cut(64, 128, 4, 4, 3) if len(x) <= 64 else Cut(64, 64, 2, 4, 6)


def partial_products(x: Tensor, weight: Tensor, cut: Cut) -> Tensor:
    """Parts of x @ weight.T that add up to it: float32 [split, rows, columns].

    `x` [rows, inner] contiguous, at most 128 rows; `weight` [columns, inner].
    """
    (rows, inner), columns = x.shape, weight.shape[0]
    block = max(16, triton.next_power_of_2(rows))
    parts = torch.empty(cut.split, rows, columns, dtype=torch.float32, device=x.device)
    _wide_kernel[(triton.cdiv(columns, cut.n), cut.split)](
        TensorDescriptor.from_tensor(x, [block, cut.k]),
        TensorDescriptor.from_tensor(weight, [cut.n, cut.k]),
        parts,
        rows,
        columns,
        inner,
        BLOCK_M=block,
        BLOCK_N=cut.n,
        BLOCK_K=cut.k,
        SPLIT=cut.split,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    return parts
