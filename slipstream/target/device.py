"""Ragged rows on an accelerator: pages are read in place, so nothing is grouped or gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.cuda.attention import MAX_SPLITS, Scratch, Tiles, scratch_for
from slipstream.models.cuda.layers import Flat, run_layers
from slipstream.models.cuda.native import processors
from slipstream.models.dense import Model
from slipstream.target.batch import Placement

Index = NDArray[np.int32]
_PROMPT_TILE = 64
"""(token, query head) pairs of a tile where some row is a prompt chunk."""
SPLITS = (1, 4, 32)
"""Parts that contexts are cut into outside captured steps."""
FEW = 16
"""Rows of up to this many tokens are one tile each."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """A flat batch on the host, all int32: `ids`, `positions`, `slots` [tokens]; the rest as
    `models.cuda.attention.Tiles` takes it, with at most `per_tile` tokens a tile.
    """

    ids: Index
    positions: Index
    slots: Index
    tile_row: Index
    tile_first: Index
    start: Index
    length: Index
    token: Index
    pages: Index
    per_tile: int


def arrange(
    ids: Sequence[int],
    rows: Sequence[Placement],
    *,
    page_size: int,
    config: ModelConfig,
    per_tile: int | None = None,
) -> Arranged:
    """Find where every token of `rows` lies. `per_tile`: chosen by the longest row where None.

    Raises ValueError where a row is empty or its pages do not cover it.
    """
    lengths = np.array([r.length for r in rows], np.int32)
    starts = np.array([r.start for r in rows], np.int32)
    tokens = np.cumsum(lengths, dtype=np.int32) - lengths
    per_tile = per_tile or tile_tokens(config, int(lengths.max()))
    counts = -(-lengths // per_tile)
    tile_row = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    tile_first = (
        np.arange(len(tile_row)) - np.repeat(np.cumsum(counts) - counts, counts)
    ) * per_tile
    pages = _page_tables(rows, page_size)
    owner = np.repeat(np.arange(len(rows)), lengths)
    positions = (np.arange(len(owner)) - tokens[owner] + starts[owner]).astype(np.int32)
    slots = pages[owner, positions // page_size] * page_size + positions % page_size
    return Arranged(
        np.array(ids, np.int32),
        positions,
        slots.astype(np.int32),
        tile_row,
        tile_first.astype(np.int32),
        starts,
        lengths,
        tokens,
        pages,
        per_tile,
    )


def tile_tokens(config: ModelConfig, longest: int) -> int:
    """Tokens of a tile where the longest row has so many: few, or a part of a prompt chunk."""
    return FEW if longest <= FEW else max(1, _PROMPT_TILE // config.group)


def on_device(
    arranged: Arranged,
    config: ModelConfig,
    device: torch.device,
    *,
    page_size: int,
    splits: int | None = None,
    ahead: tuple[bool, ...] = (),
) -> tuple[Tensor, Flat]:
    """The same on the device, in one copy: ids int32 [tokens], and where they belong."""
    a = arranged
    parts = (a.ids, a.positions, a.slots, a.tile_row, a.tile_first, a.start, a.length, a.token)
    sent = send([*parts, a.pages.reshape(-1)], device)
    tiles = Tiles(
        row=sent[3],
        first=sent[4],
        start=sent[5],
        length=sent[6],
        token=sent[7],
        pages=sent[8].view(a.pages.shape),
        tokens=a.per_tile,
        splits=splits or eager_splits(len(a.tile_row), config, device),
    )
    scratch = scratch_of(tiles, config, device)
    return sent[0], Flat(sent[1], sent[2], tiles, scratch, page_size, ahead)


def run_rows(
    model: Model,
    ids: Sequence[int],
    rows: Sequence[Placement],
    *,
    storage: Sequence[Tensor],
    page_size: int,
    taps: Sequence[int],
    splits: int | None = None,
    ahead: tuple[bool, ...] = (),
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Hidden states before the final norm, taps, and the slots (int32) of the tokens.

    `splits`: one of `SPLITS`, chosen by size where it is None. Where `ahead[i]`, a token of
    layer i sees its own row to the end.
    """
    arranged = arrange(ids, rows, page_size=page_size, config=model.config)
    sent, flat = on_device(
        arranged, model.config, model.device, page_size=page_size, splits=splits, ahead=ahead
    )
    x = F.embedding(sent.long(), model.embedding)
    hidden, tapped = run_layers(model, x, flat, storage, taps)
    return hidden, tapped, flat.slots


def eager_splits(tiles: int, config: ModelConfig, device: torch.device) -> int:
    """Parts that `run_rows` cuts contexts into for so many tiles: the largest of `SPLITS` up to the
    wanted number, since each is a compilation.
    """
    wanted = splits_for(tiles * config.num_kv_heads, device)
    return max(s for s in SPLITS if s <= wanted)


def scratch_of(tiles: Tiles, config: ModelConfig, device: torch.device) -> Scratch:
    """Room for the attention of these tiles."""
    return scratch_for(
        len(tiles.row),
        kv=config.num_kv_heads,
        dim=config.head_dim,
        group=config.group,
        tokens=tiles.tokens,
        splits=tiles.splits,
        device=device,
    )


def warm_up(model: Model, *, storage: Sequence[Tensor], page_size: int) -> None:
    """Compile what `run_rows` can need, so that no request waits for a compiler.

    Writes to the first pages of the cache: call it before there are requests.
    """
    for length in (1, FEW + 1):
        row = Placement(length, 0, range(-(-length // page_size)))
        for splits in SPLITS:
            run_rows(
                model,
                [0] * length,
                [row],
                storage=storage,
                page_size=page_size,
                taps=(),
                splits=splits,
            )


def splits_for(programs: int, device: torch.device) -> int:
    """Parts to cut contexts into so that two to four programs sit on every multiprocessor."""
    each = 2 if 2 * programs >= multiprocessors(device) else 4
    wanted = each * multiprocessors(device) // max(programs, 1)
    return max(1, min(MAX_SPLITS, 1 << max(wanted, 1).bit_length() - 1))


def multiprocessors(device: torch.device) -> int:
    """How many there are; 1 where Triton's interpreter stands in."""
    if device.type != "cuda":
        return 1
    return processors(device)


def _page_tables(rows: Sequence[Placement], page_size: int) -> Index:
    counts = [-(-(r.start + r.length) // page_size) for r in rows]
    table = np.zeros((len(rows), max(counts)), np.int32)
    for i, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if row.length < 1 or count > len(row.pages):
            raise ValueError(
                f"row {i}: {row.length} tokens from position {row.start} on need {count} pages, "
                f"the table has {len(row.pages)}"
            )
        table[i, :count] = row.pages[:count]
    return table


def send(parts: Sequence[Index], device: torch.device) -> list[Tensor]:
    """All parts in one copy; int32 views of it, each at a multiple of 16 bytes: Triton compiles
    anew for every mixture of aligned and unaligned pointers.
    """
    padded = [np.pad(p, (0, -len(p) % 4)) for p in parts]
    whole = torch.from_numpy(np.concatenate(padded)).to(device, non_blocking=True)
    starts = np.cumsum([0, *map(len, padded)]).tolist()
    return [whole[at : at + len(part)] for at, part in zip(starts, parts, strict=False)]
