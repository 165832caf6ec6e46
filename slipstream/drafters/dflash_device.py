"""Block drafters on the device: context keys and values from the features of the step before, then
a block of mask tokens that sees the context and itself.

Source: DFlash (arXiv 2602.06036); layout of the published checkpoints. The passes are those of
`drafters.dflash` over the same cache, so prompts that the host took in are seen here. Descendants
bring a `Walk` that turns the block's logits into tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.cuda.attention import Tiles
from slipstream.models.cuda.layers import Flat, product, run_layers
from slipstream.models.cuda.norm import rms_norm
from slipstream.models.cuda.rope import rotate_and_store
from slipstream.models.dflash import DFlash
from slipstream.sampling.fused import Chooser
from slipstream.target.device import scratch_of, splits_for
from slipstream.target.graphs import Step
from slipstream.target.slots import prepare

_TILE = 128
"""Most (token, query head) pairs of a tile; larger blocks are cut into several."""


def take_in(
    w: DFlash, storage: Sequence[Tensor], features: Tensor, *, positions: Tensor, cells: Tensor
) -> None:
    """Write the draft layers' keys and values of `features` [tokens, taps, hidden] to `storage`, at
    `positions` and `cells` int32 [tokens]; a cell of -1 is left out.
    """
    config = w.model.config
    fused = product(features.flatten(1), w.fc.weight, w.fc.bias)
    context = rms_norm(fused, w.norm.weight, w.norm.eps)
    fresh = product(context, w.kv.weight, w.kv.bias).chunk(config.num_layers, 1)
    for layer, kv, own in zip(w.model.layers, fresh, storage, strict=True):
        norms = layer.qk_norm
        rotate_and_store(
            kv,
            rotations(w),
            norms=norms[config.num_heads :] if norms is not None else None,
            eps=config.norm_eps,
            positions=positions,
            slots=cells,
            storage=own,
            kv=config.num_kv_heads,
        )


def rotations(w: DFlash) -> tuple[Tensor, Tensor]:
    """The tables of all positions: they must never move, and a block may reach past the end."""
    return w.model.rope.tables(w.model.config.max_context + w.config.block_size)


class Walk(Protocol):
    """Chooses a block's tokens from left to right, without the host: it is captured in a graph."""

    def __call__(
        self, anchors: Tensor, hidden: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens int64 [rows, draft_len], and how many of each row to offer, [rows] (None: all).

        `anchors` int64 [rows]; `hidden` [rows, draft_len, hidden] normed; `logits` [rows,
        draft_len, head] of the head. A row that is nobody's holds anything.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockForm:
    """A block drafter before it knows its rows. `storage`: [slots, 2 * kv, dim] a layer, the cache
    that the host's passes use. `first`: the row of the block that drafts the first token. `walk`:
    None where each row takes its own likeliest.
    """

    weights: DFlash
    draft_len: int
    storage: Sequence[Tensor]
    first: int = 1
    walk: Walk | None = None

    @property
    def max_context(self) -> int:
        """Tokens a request may have at most."""
        return self.weights.model.config.max_context

    def sized(self, rows: int, device: Any) -> BlockPass:
        """The passes for `rows` rows."""
        return BlockPass(self, rows)


class BlockPass:
    """The drafting of a step for `rows` rows: up to `draft_len` tokens each, greedy.

    A block always has the length of those trained on; the last ones of a row may lie past its end.
    """

    def __init__(self, form: BlockForm, rows: int) -> None:
        w = self._weights = form.weights
        self._form, self.needs = form, w.config.taps
        config, device, width = w.model.config, w.model.device, w.config.block_size

        def whole(*size: int, value: int = 0, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        self._masks = whole(rows, width - 1, value=w.config.mask_token_id)
        self._counts = whole(rows, value=width - 1)
        self._ids = whole(rows * width, dtype=torch.int64)
        self._positions, self._cells = whole(rows * width), whole(rows * width)
        self._per_tile = min(width, max(1, _TILE // config.group))
        self._tiles = -(-width // self._per_tile)
        self._tile_row = whole(rows * self._tiles)
        self._tile_first = (torch.arange(self._tiles, device=device) * self._per_tile).int()
        self._tile_first = self._tile_first.repeat(rows)
        vocab = w.config.draft_vocab or config.vocab_size
        self._chooser = Chooser(rows, form.draft_len, vocab=vocab, device=device)
        rotations(w)
        self._flat: Flat | None = None

    def enqueue(self, step: Step) -> None:
        """Launch both passes; `step.features` are of the step before."""
        self._take_in(step)
        hidden = self._block(step)
        tokens, counts = self._choose(hidden)
        step.drafts.copy_(tokens)
        if counts is None:
            step.counts.fill_(self._form.draft_len)
        else:
            step.counts.copy_(counts)

    def _take_in(self, step: Step) -> None:
        """What the target saw last; rejected positions are overwritten."""
        take_in(
            self._weights,
            self._form.storage,
            step.features,
            positions=step.positions,
            cells=step.cells,
        )

    def _block(self, step: Step) -> Tensor:
        """States of the rows that draft, after the final norm: [rows * draft_len, hidden]."""
        slots, model, form = step.slots, self._weights.model, self._form
        prepare(
            slots,
            step.slot_of,
            drafts=self._masks,
            counts=self._counts,
            ids=self._ids,
            positions=self._positions,
            cells=self._cells,
            whole=True,
        )
        self._tile_row.view(-1, self._tiles).copy_(step.slot_of.unsqueeze(1))
        if self._flat is None:
            self._flat = self._laid_out(step)
        x = F.embedding(self._ids, model.embedding)
        hidden, _ = run_layers(model, x, self._flat, form.storage)
        blocks = hidden.view(len(step.slot_of), -1, hidden.shape[1])
        drafting = blocks[:, form.first : form.first + form.draft_len].flatten(0, 1)
        return rms_norm(drafting.contiguous(), model.norm.weight, model.norm.eps)

    def _choose(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        w, form, rows = self._weights, self._form, len(self._counts)
        scores = product(hidden, w.model.head.weight, w.model.head.bias)
        if form.walk is None:
            best = self._chooser.best(scores)
            best = best if w.ids is None else w.ids[best.long()]
            return best.view(rows, form.draft_len), None
        anchors = self._ids.view(rows, -1)[:, 0]
        shape = (rows, form.draft_len, -1)
        return form.walk(anchors, hidden.view(shape), scores.view(shape))

    def _laid_out(self, step: Step) -> Flat:
        slots, config = step.slots, self._weights.model.config
        device = self._ids.device
        tiles = Tiles(
            row=self._tile_row,
            first=self._tile_first,
            start=slots.start,
            length=slots.length,
            token=slots.token,
            pages=slots.pages,
            tokens=self._per_tile,
            splits=splits_for(len(self._tile_row) * config.num_kv_heads, device),
        )
        scratch = scratch_of(tiles, config, device)
        ahead = self._weights.config.ahead
        return Flat(self._positions, self._cells, tiles, scratch, slots.page_size, ahead)
