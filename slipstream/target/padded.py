"""Ragged forwards padded to a few sizes, each of them one CUDA graph.

A forward that reads a prompt launches some eight kernels a layer, and where the model is small the
host takes longer to launch them than the device to run them. So such a batch is laid out in buffers
that never move, filled up with tokens that are computed and not stored and with tiles of a row of
no tokens, and the launches are replayed. vLLM and SGLang do the same with graphs of padded token
counts; here attention is inside too, since its tiles are a fixed number of programs whatever the
rows are. Large batches keep the device busy for longer than the launches take, and run unpadded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.cuda.attention import Tiles
from slipstream.models.cuda.layers import Flat, run_layers
from slipstream.models.dense import Model
from slipstream.target.batch import Placement
from slipstream.target.device import (
    FEW,
    Arranged,
    arrange,
    eager_splits,
    scratch_of,
    tile_tokens,
)
from slipstream.target.graphs import capture

Body: TypeAlias = Callable[[Tensor, Flat], None]
_STEP = 64
"""Sizes are multiples of it but for the smallest; matrix products have tiles of so many rows."""
_DEEP = 8192
"""Positions from which on a context that is read in too few parts may cost more than launches: 256
reads of 32 positions, each half a microsecond or more, every layer."""
_WORK = {torch.bfloat16: 8e10, torch.float32: 1e10}
"""Tokens times weights of a layer that the device takes as long for as the host for the layer's
launches: 0.35 ms (11 ms and 30 layers, docs/log.md) at half of one NVIDIA H200's stated peak."""


def sizes(most: int) -> tuple[int, ...]:
    """Padded token counts, ascending: 16, 64, 128, 192, 256, then four a doubling, so that larger
    batches grow by a quarter at most; the last is `most` rounded up. None where `most` is 0.
    """
    found, at = [FEW], _STEP
    while at < most:
        found.append(at)
        at += max(_STEP, (1 << (at.bit_length() - 1)) // 4)
    if most <= FEW:
        return (FEW,) if most > 0 else ()
    return (*found, -(-most // _STEP) * _STEP)


def paying(model: Model, most: int) -> tuple[int, ...]:
    """The sizes up to `most` tokens at which launching, not computing, is what takes time."""
    layer = model.layers[0]
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    weights = sum(product.weight.numel() for product in products)
    limit = _WORK.get(model.dtype, _WORK[torch.float32]) / weights
    return tuple(size for size in sizes(most) if size <= limit)


class Shape:
    """One padded size: where its parts lie in `Padded.sent`, and what a blank batch of it holds.

    `rows` rows at most, and behind them nobody's, which has no tokens: dead tiles are its.
    """

    def __init__(self, tokens: int, rows: int, config: ModelConfig) -> None:
        self.tokens, self.rows = tokens, min(tokens, rows)
        self.per_tile = tile_tokens(config, tokens)
        # A row of n tokens takes at most (n + per_tile - 1) / per_tile tiles.
        most = (tokens + self.rows * (self.per_tile - 1)) // self.per_tile
        self.tiles = min(tokens, most)
        counts = [tokens] * 3 + [self.tiles] * 2 + [self.rows + 1] * 3
        # Multiples of 16 bytes: Triton compiles anew for unaligned pointers.
        self.starts = np.cumsum([0] + [-(-n // 4) * 4 for n in counts]).tolist()
        self.counts = counts
        self._blank = np.zeros(self.starts[-1], np.int32)
        self._part(self._blank, 2).fill(-1)
        self._part(self._blank, 3).fill(self.rows)

    def filled(self, a: Arranged) -> NDArray[np.int32]:
        """The batch as `Padded.sent` holds it, its page tables behind it."""
        values = self._blank.copy()
        parts = (a.ids, a.positions, a.slots, a.tile_row, a.tile_first, a.start, a.length, a.token)
        for i, part in enumerate(parts):
            self._part(values, i)[: len(part)] = part
        return np.concatenate([values, a.pages.reshape(-1)])

    def blank(self) -> NDArray[np.int32]:
        """A batch of no tokens."""
        return self._blank

    def views(self, sent: Tensor) -> list[Tensor]:
        """The parts in `Padded.sent`: ids, positions, slots, tile rows, tile firsts, starts,
        lengths and first tokens.
        """
        return [sent[at : at + n] for at, n in zip(self.starts, self.counts, strict=False)]

    def _part(self, values: NDArray[np.int32], i: int) -> NDArray[np.int32]:
        return values[self.starts[i] : self.starts[i] + self.counts[i]]


class Sized:
    """The launches of one padded size, and their graph once they are captured.

    `sent` int32: what comes from the host, in one copy; `pages` int32 [rows + 1, width]: page
    tables as the kernels read them. All sizes share both: no two run at once.
    """

    def __init__(
        self,
        shape: Shape,
        config: ModelConfig,
        body: Body,
        *,
        sent: Tensor,
        pages: Tensor,
        page_size: int,
        ahead: tuple[bool, ...],
    ) -> None:
        self.shape, self._body, self._sent, self._pages = shape, body, sent, pages
        self._ids, positions, slots, row, first, start, length, token = shape.views(sent)
        self.splits = eager_splits(shape.tiles, config, sent.device)
        tiles = Tiles(
            row=row,
            first=first,
            start=start,
            length=length,
            token=token,
            pages=pages,
            tokens=shape.per_tile,
            splits=self.splits,
        )
        scratch = scratch_of(tiles, config, sent.device)
        self.flat = Flat(positions, slots, tiles, scratch, page_size, ahead)
        self._graph: Any = None

    def run(self, arranged: Arranged) -> None:
        """Bring a batch to the device (one copy, and one there that widens the page tables) and run
        the captured graph, or launch by launch before `capture`.
        """
        values, at = torch.from_numpy(self.shape.filled(arranged)), self.shape.starts[-1]
        self._sent[: len(values)].copy_(values, non_blocking=True)
        rows, width = arranged.pages.shape
        self._pages[:rows, :width].copy_(self._sent[at : len(values)].view(rows, width))
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body(self._ids, self.flat)

    def capture(self, pool: Any) -> None:
        """Record the launches, over a batch of no tokens."""
        blank = torch.from_numpy(self.shape.blank())
        self._sent[: len(blank)].copy_(blank)
        self._graph = capture(lambda: self._body(self._ids, self.flat), pool=pool)


class Padded:
    """Forwards of up to `rows` rows, padded to one of `sizes` tokens, with launches of `body`.

    `body` takes ids int32 [size] and where they belong, and leaves what it makes in buffers that
    stay, the first `size` rows of them. `positions`: the furthest that page tables reach. A size's
    graph is captured when it first comes, or all at once by `warm_up`; they share one memory pool,
    so together they hold what the largest needs. Elsewhere than on CUDA the same launches are made
    one by one.
    """

    def __init__(
        self,
        config: ModelConfig,
        body: Body,
        *,
        sizes: tuple[int, ...],
        rows: int,
        positions: int,
        page_size: int,
        device: torch.device,
        ahead: tuple[bool, ...] = (),
    ) -> None:
        self._config, self._body, self._ahead, self._page_size = config, body, ahead, page_size
        self.sizes = sizes
        self._shapes = {size: Shape(size, rows, config) for size in sizes}
        self._sized: dict[int, Sized] = {}
        width = -(-positions // page_size)
        fixed = max((shape.starts[-1] for shape in self._shapes.values()), default=0)
        self.sent = torch.zeros(fixed + rows * width, dtype=torch.int32, device=device)
        self.pages = torch.zeros(rows + 1, width, dtype=torch.int32, device=device)
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    @property
    def largest(self) -> int:
        """Tokens that `body` runs over at most; 0 where nothing is worth padding."""
        return max(self.sizes, default=0)

    def fit(self, ids: Sequence[int], rows: Sequence[Placement]) -> tuple[Sized, Arranged] | None:
        """The size for a batch, and the batch laid out; None where it is better off unpadded."""
        size = next((size for size in self.sizes if size >= len(ids)), None)
        if size is None or len(rows) > self._shapes[size].rows:
            return None
        per_tile = self._shapes[size].per_tile
        page_size, config = self._page_size, self._config
        arranged = arrange(ids, rows, page_size=page_size, config=config, per_tile=per_tile)
        if arranged.pages.shape[1] > self.pages.shape[1]:
            return None
        sized = self._of(size)
        return None if self._too_deep(sized, arranged) else (sized, arranged)

    def warm_up(self) -> None:
        """Capture every size, before there are requests; the largest first, in whose memory the
        others then fit.
        """
        for size in reversed(self.sizes):
            self._of(size)

    def _of(self, size: int) -> Sized:
        sized = self._sized.get(size)
        if sized is None:
            sized = self._sized[size] = Sized(
                self._shapes[size],
                self._config,
                self._body,
                sent=self.sent,
                pages=self.pages,
                page_size=self._page_size,
                ahead=self._ahead,
            )
            if self._pool is not None:
                sized.capture(self._pool)
        return sized

    def _too_deep(self, sized: Sized, arranged: Arranged) -> bool:
        """Whether some row's context is so long that more parts gain more than launches cost."""
        if int((arranged.start + arranged.length).max()) < _DEEP:
            return False
        tiles, device = len(arranged.tile_row), self.sent.device
        return eager_splits(tiles, self._config, device) > sized.splits


class PaddedTarget:
    """A target's forwards of up to `rows` rows and `tokens` tokens, where padding pays."""

    def __init__(
        self,
        model: Model,
        storage: Sequence[Tensor],
        *,
        page_size: int,
        positions: int,
        rows: int,
        tokens: int,
        taps: tuple[int, ...],
        ahead: tuple[bool, ...],
    ) -> None:
        self._model, self._storage, self._taps = model, storage, taps
        self.padded = Padded(
            model.config,
            self._body,
            sizes=paying(model, tokens),
            rows=rows,
            positions=positions,
            page_size=page_size,
            device=model.device,
            ahead=ahead,
        )
        most, size = self.padded.largest, model.config.hidden_size
        self.hidden = torch.zeros(most, size, dtype=model.dtype, device=model.device)
        self.features = self.hidden.new_zeros(most, len(taps), size)

    def run(
        self, ids: Sequence[int], rows: Sequence[Placement]
    ) -> tuple[Tensor, Tensor | None, Tensor] | None:
        """Hidden states before the final norm, features and slots (int32) of the tokens; None where
        the batch is better off unpadded. Hidden states and slots are good until the next run.
        """
        fit = self.padded.fit(ids, rows)
        if fit is None:
            return None
        sized, arranged = fit
        sized.run(arranged)
        tokens = len(ids)
        features = self.features[:tokens].clone() if self._taps else None
        return self.hidden[:tokens], features, sized.flat.slots[:tokens]

    def _body(self, ids: Tensor, flat: Flat) -> None:
        x = F.embedding(ids.long(), self._model.embedding)
        hidden, tapped = run_layers(self._model, x, flat, self._storage, self._taps)
        self.hidden[: len(ids)].copy_(hidden)
        if self._taps:
            torch.stack(tapped, 1, out=self.features[: len(ids)])
