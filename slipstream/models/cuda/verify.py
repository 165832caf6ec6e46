"""Attention of verify rows where rows and KV heads alone fill the chip, in CUDA C++ (`verify.cu`).

A KV head of a row is one program's, so no partial results leave it, and its eight warps read
positions independently of one another. The first keys and values are asked for while the kernel in
front still writes the fresh ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.models.cuda.native import available, compiled, processors

if TYPE_CHECKING:
    from slipstream.models.cuda.attention import Tiles

_DIM, _WARPS, _SPAN = 128, 8, 16
"""Dimensions of a head, warps of a program and positions a warp reads at once, as in verify.cu."""
_STAGES = 3
"""Reads of a warp in flight, one of them in use."""


def serves(qkv: Tensor, storage: Tensor, tiles: Tiles, page_size: int) -> bool:
    """Whether `verify_attention` can take these tiles and keeps nearly every multiprocessor busy.

    Arguments as in `attention.attend`.
    """
    kv, dim = storage.shape[1] // 2, storage.shape[2]
    if qkv.dtype != torch.bfloat16 or dim != _DIM or not available(qkv.device):
        return False
    if not fits(tiles.tokens, _group(qkv, storage), page_size):
        return False
    return fills(len(tiles.row) * kv, processors(qkv.device))


def fits(tokens: int, group: int, page_size: int) -> bool:
    """Whether a tile of so many tokens and query heads a KV head is whole blocks of 16 rows."""
    blocks = _blocks(tokens, group)
    return blocks <= 2 and 16 * blocks % group == 0 and page_size % _SPAN == 0


def fills(programs: int, at_once: int) -> bool:
    """Whether so many programs of equal length keep nine of ten places busy."""
    return programs >= 0.9 * at_once * -(-programs // at_once)


def verify_attention(
    qkv: Tensor, storage: Tensor, tiles: Tiles, *, page_size: int, causal: bool
) -> Tensor:
    """As `attention.attend`, for what `serves` allows: [tokens, queries * dim]."""
    kv, group = storage.shape[1] // 2, _group(qkv, storage)
    out = qkv.new_empty(len(qkv), group * kv * _DIM)
    defined = {
        "GROUP": group,
        "BLOCKS": _blocks(tiles.tokens, group),
        "PAGE": page_size,
        "CAUSAL": int(causal),
        "STAGES": _STAGES,
    }
    room = _WARPS * _STAGES * 2 * _SPAN * _DIM * 2
    kernel = compiled("verify", qkv.device, tuple(defined.items()), threads=32 * _WARPS, room=room)
    tables = (tiles.row, tiles.first, tiles.start, tiles.length, tiles.token, tiles.pages)
    scale = math.log2(math.e) / _DIM**0.5  # powers are taken to base 2
    kernel.launch(
        (len(tiles.row), kv), [qkv, storage, out, *tables, tiles.pages.shape[1], kv, scale]
    )
    return out


def _group(qkv: Tensor, storage: Tensor) -> int:
    heads = qkv.shape[1] // storage.shape[2]
    return heads // (storage.shape[1] // 2) - 2


def _blocks(tokens: int, group: int) -> int:
    """Blocks of 16 (token, query head) pairs."""
    return -(-tokens * group // 16)
