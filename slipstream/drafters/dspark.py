"""DSpark: DFlash's pass, then a walk in which each token's logits get a bias from the one before.

Source: DeepSeek's DSpark (see `models.dspark`). A draft may end early where the confidence head
thinks little of going on (`stop`). That is decided from the tokens before, never from the one that
would be drawn, so it cannot bias the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from slipstream.drafters import weights
from slipstream.drafters.dflash import DFlashDrafter
from slipstream.drafters.lanes import Lane, LaneLaw, choose
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.errors import InvalidConfig
from slipstream.models.dspark import DSpark, load_dspark
from slipstream.models.layers import rms_norm
from slipstream.target.target import ForwardOutput

if TYPE_CHECKING:
    from slipstream.drafters.dflash_device import Walk


class DSparkDrafter(DFlashDrafter):
    """Differences from DFlash: row i of the block drafts token i + 1 (the anchor's is the first)
    unless the checkpoint says otherwise,
    `spark.bias` joins each row's logits, and a draft ends where the chance that all of it is
    accepted falls under `stop`.
    """

    def __init__(
        self,
        spark: DSpark,
        draft_len: int,
        *,
        stop: float,
        pages: int,
        page_size: int,
        name: str,
    ) -> None:
        super().__init__(spark.flash, draft_len, pages=pages, page_size=page_size, name=name)
        self.spark, self._stop = spark, stop
        self._first = int(not spark.config.from_anchor)

    def _choose(self, lanes: list[Lane], out: ForwardOutput, law: LaneLaw) -> None:
        """Fill the lanes from left to right."""
        assert out.features is not None
        model = self.weights.model
        hidden = rms_norm(out.features[:, 0].contiguous(), model.norm)
        device = hidden.device
        first = self._first
        going = list(range(len(lanes)))
        state = hidden.new_zeros(len(lanes), self.spark.config.rank)
        alive = torch.ones(len(lanes), device=device)
        for i in range(max(lane.width for lane in lanes)):
            going = [g for g in going if lanes[g].width > i]
            if not going:  # those that are wider have ended before
                return
            before = [(lanes[g].chosen or lanes[g].row.tokens)[-1] for g in going]
            tokens = torch.tensor(before, device=device)
            own = hidden[[g * self.reach + first + i for g in going]]
            if self._stop:
                alive[going] = alive[going] * self.spark.survival(tokens, own)
                kept = (alive[going] >= self._stop).nonzero().flatten().tolist()
                going, tokens, own = [going[j] for j in kept], tokens[kept], own[kept]
            if not going:
                return
            bias, fresh = self.spark.bias(tokens, own, state[going])
            state[going] = fresh
            logits = out.logits[[g * self.reach + first + i for g in going]] + bias
            chosen = choose([lanes[g] for g in going], logits, law, self._reduced)
            going = [g for g in going if lanes[g] in chosen]

    def _walker(self) -> Walk:
        return self._walk

    def _walk(
        self, anchors: Tensor, hidden: Tensor, logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """A `drafters.dflash_device.Walk`: every lane to its end; `stop` says what is offered."""
        spark, ids = self.spark, self.weights.ids
        if spark.config.markov == "vanilla" and not self._stop:
            from slipstream.models.cuda.walks import markov

            second = spark.second.weight
            return markov(anchors, logits, first=spark.first, second=second, ids=ids), None
        before, chosen = anchors, []
        state = hidden.new_zeros(len(anchors), self.spark.config.rank)
        alive = torch.ones(len(anchors), device=hidden.device)
        offered = torch.zeros(len(anchors), dtype=torch.int64, device=hidden.device)
        for i in range(logits.shape[1]):
            own = hidden[:, i]
            if self._stop:
                alive = alive * self.spark.survival(before, own)
                offered += alive >= self._stop
            bias, state = self.spark.bias(before, own, state)
            before = (logits[:, i] + bias).argmax(-1)
            before = before if ids is None else ids[before]
            chosen.append(before)
        return torch.stack(chosen, 1), offered if self._stop else None


def create(spec: DrafterSpec, context: DrafterContext) -> DSparkDrafter:
    """The drafter of a spec `dspark[:PATH][:draft_len],stop=...`.

    Raises `ModelError` for a checkpoint that does not fit the target and where none ships for it,
    `InvalidConfig` for more draft tokens than its block holds.
    """
    spark = load_dspark(weights.folder(spec, context), context.target.model)
    return assembled(spark, spec, context)


def assembled(spark: DSpark, spec: DrafterSpec, context: DrafterContext) -> DSparkDrafter:
    """A drafter of these weights. Raises `InvalidConfig` for more draft tokens than its block
    holds.
    """
    most = spark.config.draft_len
    if spec.draft_len > most:
        raise InvalidConfig(
            f"draft_len is {spec.draft_len} in drafter {str(spec)!r}; its block holds {most}."
        )
    return DSparkDrafter(
        spark,
        spec.draft_len,
        stop=spec.number("stop"),
        pages=context.pages,
        page_size=context.page_size,
        name=str(spec),
    )
