"""Products of 17 to 128 rows whose programs also share the inner length.

The stock products leave memory idle where a weight has too few columns to give every
multiprocessor a tile, and where a kernel starts and ends. Here a weight's tiles are rows of *steps*
(one step is BLOCK_K of the inner length); programs take equal runs of steps, also across tiles
(stream-K, Osama et al. 2023), and whoever reads the result adds the parts up (`norm.add_norm`,
`rope.rotate_and_store`), which saves the launch that would do nothing else. While the kernel before
still runs, a program asks for its first weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slipstream.models.cuda.launch import is_hopper, overlap, read_rows_ahead, tried, wait

MOST_ROWS = 128


@triton.jit
def _wide_kernel(
    x,
    weight,
    raw_weight,
    parts,
    rows,
    columns,
    inner,
    run,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CROSSES: tl.constexpr,
    AHEAD: tl.constexpr,
    LANES: tl.constexpr,
    PDL: tl.constexpr,
):
    program, steps = tl.program_id(0), tl.cdiv(inner, BLOCK_K)
    first = program * run
    n, low = first // steps * BLOCK_N, first % steps * BLOCK_K
    if AHEAD:
        read_rows_ahead(raw_weight, n, inner, low, BLOCK_N, AHEAD, LANES)
    wait(PDL)
    m, at = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if CROSSES:
        last = tl.minimum(first + run, tl.cdiv(columns, BLOCK_N) * steps)
        for step in range(first, last):
            n, k = step // steps * BLOCK_N, step % steps * BLOCK_K
            total = tl.dot(x.load([0, k]), weight.load([n, k]).T, total)
            if (k + BLOCK_K >= inner) | (step + 1 == last):
                part = program - step // steps * steps // run
                cell = (part * rows + m[:, None]) * columns + n + at[None, :]
                tl.store(parts + cell, total, mask=(m < rows)[:, None])
                total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    else:
        for k in range(low, tl.minimum(low + run * BLOCK_K, inner), BLOCK_K):
            total = tl.dot(x.load([0, k]), weight.load([n, k]).T, total)
        part = first % steps // run
        cell = (part * rows + m[:, None]) * columns + n + at[None, :]
        tl.store(parts + cell, total, mask=(m < rows)[:, None])


@dataclass(frozen=True, slots=True)
class Cut:
    """Output columns and inner length of a step, and how many steps a program takes.

    `ahead`: inner length of the first weights to ask for while the kernel before still runs.
    """

    n: int
    k: int
    run: int
    warps: int
    stages: int
    ahead: int = 512


@dataclass(frozen=True, slots=True)
class Parts:
    """A product in parts: `sums` float32 [most, rows, columns], in tiles of `n` columns.

    Tile t took steps t * steps to t * steps + steps - 1, `run` of them a program; each program that
    took part left a part there, in order. What is behind the last of them was never written.
    """

    sums: Tensor
    n: int
    steps: int
    run: int

    @property
    def even(self) -> bool:
        """Whether every column has all parts."""
        return self.steps % self.run == 0


MEASURED = ((4096, 12288), (4096, 4096))
"""Columns and inner length of weights for which a cut beats the stock product (docs/log.md)."""
_QKV, _FEATURES = (6144, 4096), (4096, 20480)


def cut_for(x: Tensor, weight: Tensor) -> Cut | None:
    """How to cut x @ weight.T, or None where the stock product is as fast."""
    if not 16 < len(x) <= MOST_ROWS or x.dtype != torch.bfloat16 or not is_hopper(x.device):
        return None
    (columns, inner), few = weight.shape, len(x) <= 64
    warps, steps = 4 if few else 8, inner // 64
    ahead = 0 if tried("bare") else 1024 if tried("deep") else 512
    if (columns, inner) == _FEATURES and tried("less") and len(x) > 32:
        return Cut(128, 64, steps // 4, warps, 6, ahead)
    if (columns, inner) in MEASURED and tried("cut") and len(x) > 32:
        # Beside attention, before the output product, there is room for few stages.
        return Cut(128, 64, steps // 4, warps, 4 if inner == 4096 else 6, ahead)
    if (columns, inner) in MEASURED:
        return (
            Cut(64, 128, steps // 8, 4, 3, ahead) if few else Cut(64, 64, steps // 2, 4, 6, ahead)
        )
    if (columns, inner) == _QKV and tried("qkv") and len(x) > 32:
        # Room for the norm's programs beside it; no run begins less than 512 before a row's end.
        return Cut(128, 64, 24, warps, 4, min(ahead, 512))
    return None


def partial_products(x: Tensor, weight: Tensor, cut: Cut) -> Parts:
    """X @ weight.T in parts.

    `x` [rows, inner] contiguous, at most 128 rows; `weight` [columns, inner], columns a multiple of
    `cut.n` and inner of `cut.k`.
    """
    (rows, inner), columns = x.shape, weight.shape[0]
    block = max(16, triton.next_power_of_2(rows))
    steps, tiles = triton.cdiv(inner, cut.k), triton.cdiv(columns, cut.n)
    even = steps % cut.run == 0
    most = steps // cut.run if even else triton.cdiv(steps - 1, cut.run) + 1
    early = overlap(x)
    sums = torch.empty(most, rows, columns, dtype=torch.float32, device=x.device)
    _wide_kernel[(triton.cdiv(tiles * steps, cut.run),)](
        TensorDescriptor.from_tensor(x, [block, cut.k]),
        TensorDescriptor.from_tensor(weight, [cut.n, cut.k]),
        weight,
        sums,
        rows,
        columns,
        inner,
        cut.run,
        BLOCK_M=block,
        BLOCK_N=cut.n,
        BLOCK_K=cut.k,
        CROSSES=not even,
        AHEAD=cut.ahead if early["PDL"] else 0,
        LANES=32 * cut.warps,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **early,
    )
    return Parts(sums, cut.n, steps, cut.run)
