"""Products of 17 to 128 rows, in CUDA C++ (`wide.cu`), compiled where it runs.

At these sizes a product is still a read of its weight, and what is lost is lost at its two ends:
nothing is read while the kernel in front finishes and the pipeline fills. So a weight is asked for
before the kernel in front has ended (programmatic dependent launch: kernels in front let this one
start early, see `launch`), every multiprocessor gets one program and one tile, programs that share
a tile add their sums up in shared memory (thread block clusters), and the gate of an MLP is applied
to the sums in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cuda.native import available, check, compiled, processors

_GROUP = 64
"""Rows a warpgroup multiplies."""
_MOST_ROWS = 2 * _GROUP
_BLOCK = 64
"""Inner length of a tile; as in wide.cu."""
_ROOM = 226 * 1024
"""Bytes of shared memory a program may have for its tiles."""
_STAGES = 12
"""Tiles in flight at most."""
_TILES = (256, 192, 128, 96, 80, 64)


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is cut: rows of the weight a program owns, and programs that share a tile's
    inner length.
    """

    tile: int
    split: int = 1


def cut_for(x: Tensor, weight: Tensor, *, gated: bool = False) -> Cut | None:
    """How `wide` should cut x @ weight.T, or None where it does not serve or is not faster."""
    if not 16 < len(x) <= _MOST_ROWS or x.dtype != torch.bfloat16 or not available(x.device):
        return None
    return choose(*weight.shape, gated=gated, at_once=processors(x.device))


def choose(columns: int, inner: int, *, gated: bool, at_once: int) -> Cut | None:
    """The cut that gives nearly every multiprocessor one program, with tiles of 64 rows or more.

    None for weights too small or too large for that: the stock products serve those. At most two
    programs share a tile: clusters of four do not all fit on an H200 at once (docs/log.md).
    """
    for split in (1,) if gated else (1, 2):
        for tile in _TILES:
            fits = columns % tile == tile % (8 * split) == inner % (_BLOCK * split) == 0
            if fits and 0.9 * at_once <= columns // tile * split <= at_once:
                return Cut(tile, split)
    return None


def wide(x: Tensor, weight: Tensor, cut: Cut, *, gated: bool = False) -> Tensor:
    """The product x @ weight.T, bfloat16 [rows, columns].

    `x` bfloat16 [rows, inner], `weight` [columns, inner], both contiguous; at most 128 rows.
    `gated`: `weight` [2 * columns, inner], and silu(first half) * second half, [rows, columns].
    """
    (rows, inner), total = x.shape, weight.shape[0]
    columns = total // 2 if gated else total
    groups = -(-rows // _GROUP)
    if total % cut.tile or inner % (_BLOCK * cut.split) or rows > _MOST_ROWS:
        raise ValueError(f"{tuple(x.shape)} by {tuple(weight.shape)} cannot be cut into {cut}")
    out = x.new_empty(rows, columns)
    stage = (groups * _GROUP + cut.tile) * _BLOCK * 2
    stages = min(_STAGES, _ROOM // stage)
    defined = {
        "GROUPS": groups,
        "TILE": cut.tile,
        "SPLIT": cut.split,
        "STAGES": stages,
        "GATED": int(gated),
    }
    kernel = compiled(
        "wide",
        x.device,
        tuple(defined.items()),
        threads=32 * (4 * groups + 1),
        room=stages * stage + 1024,  # tiles begin at multiples of 1,024 bytes
        head=wgmma(cut.tile),
    )
    maps = [_map(x, groups * _GROUP), _map(weight, cut.tile // 2 if gated else cut.tile)]
    blocks = inner // (_BLOCK * cut.split)
    kernel.launch((total // cut.tile, cut.split), [*maps, out, rows, columns, blocks])
    return out


def wgmma(columns: int) -> str:
    """The multiplication of 64 rows by `columns` as a macro: its operands depend on the tile."""
    count = columns // 2
    places = ", ".join(f"%{i}" for i in range(count))
    numbers = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        '#define WGMMA(d, a, b, more) asm volatile("{\\n.reg .pred p;\\n'
        f"setp.ne.b32 p, %{count + 2}, 0;\\n"
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
        f'{{{places}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}" '
        f': {numbers} : "l"(a), "l"(b), "r"((u32)(more)))\n'
    )


def _map(matrix: Tensor, rows: int) -> Any:
    """What the copy engine must know of a matrix that is read in tiles of `rows` by 64."""
    from cuda.bindings import driver as d

    height, width = matrix.shape
    return check(
        d.cuTensorMapEncodeTiled(
            d.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.data_ptr(),
            [d.cuuint64_t(width), d.cuuint64_t(height)],
            [d.cuuint64_t(width * matrix.element_size())],
            [d.cuuint32_t(_BLOCK), d.cuuint32_t(rows)],
            [d.cuuint32_t(1), d.cuuint32_t(1)],
            d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
