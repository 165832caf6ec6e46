"""Attention of verify rows where rows and KV heads alone fill the chip, in CUDA C++ (`verify.cu`).

A KV head of a row is one program's, so no partial results leave it, and its eight warps read
positions independently of one another. The first keys and values are asked for while the kernel in
front still writes the fresh ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.cuda.native import available, compiled, processors

_DIM = 128
_WARPS = 8
_STAGES = 3
_SPAN = 16
"""Positions a warp reads at once; these four as in verify.cu."""
_MOST_ROWS = 32
"""(token, query head) pairs of a tile."""


def serves(
    qkv: Tensor, *, tiles: int, kv: int, dim: int, group: int, block: int, page_size: int
) -> bool:
    """Whether `verify_attention` can take these tiles and has a program for nearly every
    multiprocessor all the time. `block`: (token, query head) pairs a tile is padded to.
    """
    if dim != _DIM or block > _MOST_ROWS or block % group or page_size % _SPAN:
        return False
    if qkv.dtype != torch.bfloat16 or not available(qkv.device):
        return False
    return fills(tiles * kv, processors(qkv.device))


def fills(programs: int, at_once: int) -> bool:
    """Whether so many programs of equal length keep nine of ten places busy."""
    rounds = -(-programs // at_once)
    return programs >= 0.9 * rounds * at_once


def verify_attention(
    qkv: Tensor,
    storage: Tensor,
    out: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    scale: float,
    group: int,
    block: int,
    page_size: int,
    causal: bool,
) -> None:
    """Fill `out` [tokens, queries * dim]; the other arguments as in `attention.attend`.

    `tables`: row, first, start, length, token and pages of `attention.Tiles`. `scale`: of scores
    whose power is taken to base 2.
    """
    kv, blocks = storage.shape[1] // 2, block // 16
    defined = {
        "GROUP": group,
        "BLOCKS": blocks,
        "PAGE": page_size,
        "CAUSAL": int(causal),
        "STAGES": _STAGES,
    }
    room = _WARPS * _STAGES * 2 * _SPAN * _DIM * 2
    kernel = compiled(
        "verify", qkv.device, tuple(defined.items()), threads=32 * _WARPS, room=room
    )
    width = tables[5].shape[1]
    kernel.launch((len(tables[0]), kv), [qkv, storage, out, *tables, width, kv, scale])
