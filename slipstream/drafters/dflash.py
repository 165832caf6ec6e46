"""DFlash: a whole block of draft tokens in one pass over a few layers that read target features.

Source: arXiv 2602.06036 (see `models.dflash`). The draft layers' keys and values of committed
tokens lie at the same slots as the target's own, in storage of their own: pages that another
request takes over, rejected tokens and preemption need no bookkeeping here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from slipstream.drafters import weights
from slipstream.drafters.base import DeviceForm
from slipstream.drafters.lanes import Lane, LaneLaw, Reduced, choose, law_for, pack_lanes
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.errors import InvalidConfig
from slipstream.models.dflash import DFlash, load_dflash
from slipstream.models.loading import LoadedModel
from slipstream.target.target import ForwardOutput, ForwardRow, Target
from slipstream.types import Draft, IntArray, OneHot, Row, Span, Verdict

if TYPE_CHECKING:
    from slipstream.drafters.dflash_device import Walk


class DFlashDrafter:
    """Drafts up to `draft_len` tokens, each from its own mask's law, none seeing the others'.

    A block is always as long as those trained on, for every mask sees the others. `pages` of
    `page_size` positions as the target's cache has. A row past the drafter's own context drafts
    nothing.
    """

    def __init__(
        self, weights: DFlash, draft_len: int, *, pages: int, page_size: int, name: str
    ) -> None:
        self.name, self.max_draft_len = name, draft_len
        self.needs = weights.config.taps
        self.reach = weights.config.block_size
        self.weights = weights
        self.one_hot, self._first = False, 1
        self._reduced = Reduced.of(weights.ids, weights.config.model.vocab_size)
        self._page_size = page_size
        loaded = LoadedModel(weights.model, None, name, Path(), "")
        # The output of the last draft layer is for heads of descendants.
        self.block = Target(
            loaded,
            num_pages=pages,
            page_size=page_size,
            taps=(weights.model.config.num_layers,),
            ahead=weights.config.ahead,
        )

    @torch.inference_mode()
    def absorb(self, spans: Sequence[Span]) -> None:
        """Write the draft layers' keys and values of committed tokens."""
        limit = self.weights.model.config.max_context
        spans = [s for s in spans if s.start + len(s.features) <= limit]
        if not spans:
            return
        positions = [np.arange(s.start, s.start + len(s.features)) for s in spans]
        slots = np.concatenate(
            [self._slots(s.row.pages, at) for s, at in zip(spans, positions, strict=True)]
        )
        at = np.concatenate(positions)
        device = self.weights.model.device
        features = torch.cat([s.features for s in spans])
        if self.block.kernels:
            from slipstream.drafters.dflash_device import take_in
            from slipstream.target.device import send

            sent = send([at.astype(np.int32), slots.astype(np.int32)], device)
            take_in(self.weights, self.block.storage, features, positions=sent[0], cells=sent[1])
            return
        context = self.weights.context(
            features,
            torch.from_numpy(at).to(device),
            int(at.max()),
        )
        where = torch.from_numpy(slots).to(device)
        for storage, fresh in zip(self.block.storage, context, strict=True):
            storage.index_copy_(0, where, fresh)

    def open(self, rows: Sequence[Row]) -> None:
        """Nothing: the prompt's features were absorbed chunk by chunk."""

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], draft_lens: IntArray) -> Draft:
        """One pass over [anchor, mask, ...] of every row that drafts."""
        lanes = self._lanes(rows, draft_lens)
        if not lanes:
            return Draft.empty(len(rows))
        out = self._pass(lanes)
        law = self._law(lanes, out, len(rows))
        self._choose(lanes, out, law)
        return pack_lanes(lanes, law, rows=len(rows))

    def _law(self, lanes: Sequence[Lane], out: ForwardOutput, rows: int) -> LaneLaw:
        """The law of a batch of `rows` rows, to be filled by `_choose`."""
        if self.one_hot:
            return OneHot()
        vocab = self.weights.config.model.vocab_size
        return law_for(lanes, rows=rows, vocab=vocab, device=out.logits.device)

    def _lanes(self, rows: Sequence[Row], draft_lens: IntArray) -> list[Lane]:
        limit = self.weights.model.config.max_context
        lanes = []
        for i, (row, wanted) in enumerate(zip(rows, draft_lens.tolist(), strict=True)):
            width = min(wanted, self.max_draft_len, limit - len(row.tokens))
            if width > 0:
                lanes.append(Lane(index=i, row=row, width=width))
        return lanes

    def _pass(self, lanes: Sequence[Lane]) -> ForwardOutput:
        """The block of every lane; the head's logits of all its rows, [lanes * reach, rows]."""
        masks = [self.weights.config.mask_token_id] * (self.reach - 1)
        return self.block.forward(
            [
                ForwardRow(
                    [lane.row.tokens[-1], *masks],
                    len(lane.row.tokens) - 1,
                    lane.row.pages,
                    self.reach,
                )
                for lane in lanes
            ]
        )

    def _choose(self, lanes: list[Lane], out: ForwardOutput, law: LaneLaw) -> None:
        """Fill the lanes: draft token i is what mask row i + 1 says about its own position."""
        going = [(lane, i * self.reach + 1) for i, lane in enumerate(lanes)]
        for i in range(max(lane.width for lane in lanes)):
            going = [(lane, at) for lane, at in going if lane.width > i]
            logits = out.logits[[at + i for _, at in going]]
            alive = choose([lane for lane, _ in going], logits, law, self._reduced)
            going = [(lane, at) for lane, at in going if lane in alive]
            if not going:
                break

    def advance(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """Nothing: what was committed was absorbed."""

    def close(self, request_ids: Sequence[int]) -> None:
        """Nothing: what is kept belongs to pages."""

    def reset(self) -> None:
        """Nothing is kept across requests but with the target's own pages."""

    def on_device(self) -> DeviceForm:
        """The same passes over the same cache; from now on drafts are greedy for everyone."""
        from slipstream.drafters.dflash_device import BlockForm

        self.one_hot = True
        return BlockForm(
            weights=self.weights,
            draft_len=self.max_draft_len,
            storage=self.block.storage,
            first=self._first,
            walk=self._walker(),
        )

    def _walker(self) -> Walk | None:
        """What chooses a block's tokens on the device; None where each row takes its likeliest."""
        return None

    def _slots(self, pages: Sequence[int], positions: IntArray) -> IntArray:
        size = self._page_size
        slots: IntArray = np.asarray(pages)[positions // size] * size + positions % size
        return slots


def create(spec: DrafterSpec, context: DrafterContext) -> DFlashDrafter:
    """The drafter of a spec `dflash[:PATH][:draft_len]`.

    Raises `ModelError` for a checkpoint that does not fit the target and where none ships for it,
    `InvalidConfig` for more draft tokens than its block holds.
    """
    flash = load_dflash(weights.folder(spec, context), context.target.model)
    return assembled(flash, spec, context)


def assembled(flash: DFlash, spec: DrafterSpec, context: DrafterContext) -> DFlashDrafter:
    """A drafter of these weights. Raises `InvalidConfig` for more draft tokens than its block
    holds.
    """
    most = flash.config.block_size - 1
    if spec.draft_len > most:
        raise InvalidConfig(
            f"draft_len is {spec.draft_len} in drafter {str(spec)!r}; its block holds {most}."
        )
    return DFlashDrafter(
        flash,
        spec.draft_len,
        pages=context.pages,
        page_size=context.page_size,
        name=str(spec),
    )
