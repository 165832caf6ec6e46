"""DFlash2: DFlash's pass, then a walk over the likeliest few tokens of each mask.

Source: DFlash2 of inco and z-lab (see `models.dflash2`). At each position the selector scores the
`top_k` likeliest tokens, given the token chosen before; the walk takes the best of them, or draws
one at the request's temperature. What it draws from is the draft law: `TopK`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.drafters import weights
from slipstream.drafters.dflash import DFlashDrafter
from slipstream.drafters.lanes import Lane, LaneLaw, draws
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.errors import InvalidConfig
from slipstream.models.dflash2 import DFlash2, load_dflash2
from slipstream.models.layers import rms_norm
from slipstream.sampling.accept import invert_cdf
from slipstream.sampling.probs import process_logits
from slipstream.target.target import ForwardOutput
from slipstream.types import OneHot, TopK

_COLDEST = 1e-30

if TYPE_CHECKING:
    from slipstream.drafters.dflash_device import Walk


class DFlash2Drafter(DFlashDrafter):
    """Differences from DFlash: convolutions in the layers (`models.layers.Mix`), and each token is
    chosen among its mask's likeliest by the selector's score, which knows the token before.

    Penalties, bans and grammar are the target's own, applied to the logits before the likeliest are
    taken. `top_k`, `top_p` and `min_p` of a request are not: its temperature alone shapes the law.
    """

    def __init__(
        self, flash2: DFlash2, draft_len: int, *, pages: int, page_size: int, name: str
    ) -> None:
        super().__init__(flash2.flash, draft_len, pages=pages, page_size=page_size, name=name)
        self.flash2 = flash2

    def _law(self, lanes: Sequence[Lane], out: ForwardOutput, rows: int) -> LaneLaw:
        if self.one_hot or all(lane.row.params.greedy for lane in lanes):
            return OneHot()
        width = max(lane.width for lane in lanes)
        shape = (rows, width, self.flash2.config.top_k)
        device = out.logits.device
        return TopK(
            torch.zeros(shape, dtype=torch.int64, device=device), torch.zeros(shape, device=device)
        )

    def _choose(self, lanes: list[Lane], out: ForwardOutput, law: LaneLaw) -> None:
        """Fill the lanes from left to right; a lane without a finite score ends."""
        assert out.features is not None
        hidden = rms_norm(out.features[:, 0].contiguous(), self.weights.model.norm)
        going = [(lane, i * self.reach + 1) for i, lane in enumerate(lanes)]
        for i in range(max(lane.width for lane in lanes)):
            going = [(lane, at) for lane, at in going if lane.width > i]
            rows = [at + i for _, at in going]
            alive = self._step([lane for lane, _ in going], out.logits[rows], hidden[rows], law)
            going = [pair for pair, lives in zip(going, alive, strict=True) if lives]
            if not going:
                return

    def _step(self, lanes: list[Lane], logits: Tensor, hidden: Tensor, law: LaneLaw) -> list[bool]:
        """Append one token to each lane that has a finite score; which those are."""
        scores, ids = self._scores(lanes, logits, hidden)
        peaks, picks = scores.max(-1)
        if isinstance(law, TopK):
            picks = self._drawn(lanes, scores, ids, picks, law)
        tokens = ids.gather(-1, picks.unsqueeze(-1))[:, 0].tolist()
        alive: list[bool] = peaks.isfinite().tolist()
        for lane, token, lives in zip(lanes, tokens, alive, strict=True):
            if lives:
                lane.chosen.append(token)
        return alive

    def _scores(self, lanes: list[Lane], logits: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Scores, float32, and ids of each lane's candidates, [lanes, top_k].

        `logits` [lanes, rows] of the head, `hidden` [lanes, hidden] normed.
        """
        unary, columns = self.flash2.config.scaled(logits), self.weights.ids
        if not all(lane.row.sampler.plain for lane in lanes):
            samplers, chosen = (
                [lane.row.sampler for lane in lanes],
                [lane.chosen for lane in lanes],
            )
            unary = process_logits(self.weights.over_target(unary), samplers, chosen)
            columns = None
        scores, ids = unary.topk(self.flash2.config.top_k, -1)
        ids = ids if columns is None else columns[ids]
        before = [(lane.chosen or lane.row.tokens)[-1] for lane in lanes]
        bonds = self.flash2.bonds(torch.tensor(before, device=ids.device), hidden, ids)
        return scores + bonds, ids

    def _drawn(
        self, lanes: list[Lane], scores: Tensor, ids: Tensor, best: Tensor, law: TopK
    ) -> Tensor:
        """Candidates drawn at each lane's temperature, the best for greedy ones, int64 [lanes];
        their law goes into `law`.
        """
        heat = [max(lane.row.params.temperature, _COLDEST) for lane in lanes]
        cold = torch.tensor([lane.row.params.greedy for lane in lanes], device=ids.device)
        peaks = scores.amax(-1, keepdim=True)
        cooled = (scores - peaks) / torch.tensor(heat, device=ids.device).unsqueeze(-1)
        # A lane without a finite score ends here: any law will do for it, as long as it is one.
        sure = torch.nn.functional.one_hot(best, scores.shape[-1]).float()
        unsound = cold | ~peaks[:, 0].isfinite()
        probs = torch.where(unsound.unsqueeze(-1), sure, cooled.softmax(-1))
        where = [lane.index for lane in lanes]
        depth = len(lanes[0].chosen)
        law.ids[where, depth], law.probs[where, depth] = ids, probs
        return torch.where(unsound, best, invert_cdf(probs, draws(lanes)))

    def _walker(self) -> Walk:
        return self._walk

    def _walk(self, anchors: Tensor, hidden: Tensor, logits: Tensor) -> tuple[Tensor, None]:
        """A `drafters.dflash_device.Walk`: every lane at once, the best candidate each time."""
        from slipstream.models.cuda.layers import product
        from slipstream.models.cuda.walks import select

        unary, ids = self.flash2.config.scaled(logits).topk(self.flash2.config.top_k, -1)
        if self.weights.ids is not None:
            ids = self.weights.ids[ids]
        projection = self.flash2.projection
        projected = product(hidden.flatten(0, 1), projection.weight, projection.bias)
        before, after = self.flash2.before, self.flash2.after
        return select(anchors, unary, ids, projected=projected, before=before, after=after), None


def create(spec: DrafterSpec, context: DrafterContext) -> DFlash2Drafter:
    """The drafter of a spec `dflash2[:PATH][:draft_len]`.

    Raises `ModelError` for a checkpoint that does not fit the target and where none ships for it,
    `InvalidConfig` for more draft tokens than its block holds.
    """
    flash2 = load_dflash2(weights.folder(spec, context), context.target.model)
    return assembled(flash2, spec, context)


def assembled(flash2: DFlash2, spec: DrafterSpec, context: DrafterContext) -> DFlash2Drafter:
    """A drafter of these weights. Raises `InvalidConfig` for more draft tokens than its block
    holds.
    """
    most = flash2.config.flash.block_size - 1
    if spec.draft_len > most:
        raise InvalidConfig(
            f"draft_len is {spec.draft_len} in drafter {str(spec)!r}; its block holds {most}."
        )
    return DFlash2Drafter(
        flash2,
        spec.draft_len,
        pages=context.pages,
        page_size=context.page_size,
        name=str(spec),
    )
