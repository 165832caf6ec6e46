"""The DFlash2 recipe: DFlash's loss, and the selector's over the likeliest few of each mask.

Source: DFlash2 of inco and z-lab as SpecForge trains it: to the block loss comes the cross-entropy
of the selector's scores over the `top_k` likeliest tokens, the text's own token before each; where
the text's token is not among them the selector learns nothing. Its gradient reaches the layers too.
The convolutions begin as identities and the selector silent: a network that is DFlash's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import InvalidConfig
from slipstream.models.dense import Model
from slipstream.models.dflash import DFlashConfig
from slipstream.models.dflash2 import (
    AFTER,
    BEFORE,
    PROJECTION,
    DFlash2Config,
    bonds,
    save_dflash2,
)
from slipstream.models.layers import Conv, convolved, kernels
from slipstream.models.linear import Linear
from slipstream.train.dflash import DFlashNetwork, block_weights
from slipstream.train.recipe import Batch, agreement, hard, labels

_ALPHA = 1.0  # weight of the selector's cross-entropy beside the block loss
_GROUP, _TOP_K = 16, 16  # as published


def full_config(flash: DFlashConfig, *, rank: int) -> DFlash2Config:
    """A config of published sizes but for the selector's `rank`.

    Raises `InvalidConfig` where the target's width does not allow it.
    """
    c = flash.model
    if not 1 <= rank <= c.vocab_size:
        raise InvalidConfig(f"rank is {rank}; allowed: 1 to {c.vocab_size} for dflash2.")
    if c.hidden_size % _GROUP:
        raise InvalidConfig(
            f"The target's hidden_size is {c.hidden_size}; dflash2 needs a multiple of {_GROUP}."
        )
    seeing = replace(flash, sliding_causal=False)
    return DFlash2Config(seeing, group=_GROUP, rank=rank, top_k=min(_TOP_K, c.vocab_size))


class DFlash2Network(DFlashNetwork):
    """Differences from DFlash: convolutions around the sublayers, and the selector: `logits` are
    the unary ones, `scores` what drafts are taken from.
    """

    recipe = "dflash2"

    def __init__(
        self,
        config: DFlash2Config,
        target: Model,
        *,
        seed: int,
        d_pace: bool = False,
        soft: bool = False,
        vocab: Tensor | None = None,
    ) -> None:
        super().__init__(
            config.flash,
            target,
            seed=seed,
            d_pace=d_pace,
            soft=soft,
            shapes=config.shapes,
            vocab=vocab,
        )
        self.flash2 = config
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                if name.endswith("base_kernel"):
                    tensor.zero_()[:, 0] = 1
                elif name.endswith("kernel_projection.weight") or name == AFTER:
                    tensor.zero_()

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_dflash2(folder, self.flash2, {**tensors, **self.draft_head.stored()})

    def loss(self, batch: Batch) -> Tensor:
        """Block loss and selector's cross-entropy over one sum of weights; see the module."""
        wanted, there = labels(batch, self.draft_len)
        hidden = self.hidden(batch)[:, :, 1:].contiguous()
        logits = self.draft_head.logits(hidden)
        columns, known = self.draft_head.columns(wanted)
        each = self._each(batch, self.flash2.scaled(logits), columns)
        weight = block_weights(each, there & known, d_pace=self._d_pace)
        ids, scores = self._scores(batch, hidden, logits)
        found = ids == wanted[..., None]
        gold = found.int().argmax(-1)
        picked = hard(scores, gold) * found.any(-1)
        total = ((each + _ALPHA * picked) * weight).sum()
        return total / weight.sum().clamp(min=1e-6)

    def agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Network`: whether the walk takes the text's token where it took those before."""
        with torch.no_grad():
            ids, scores = self.scores(batch)
            said = ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
            return agreement(said, batch)

    def scores(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Likeliest tokens of each mask, [texts, blocks, draft_len, top_k], and their scores given
        the text's own token before.
        """
        hidden = self.hidden(batch)[:, :, 1:].contiguous()
        return self._scores(batch, hidden, self.draft_head.logits(hidden))

    def _scores(self, batch: Batch, hidden: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        columns = logits.detach().topk(self.flash2.top_k, -1).indices
        ids = self.draft_head.tokens(columns)
        before = batch.tokens_at(batch.places(0, self.draft_len))
        bond = bonds(
            F.embedding(before, self.tensors[BEFORE]),
            hidden @ self.tensors[PROJECTION].t(),
            F.embedding(ids, self.tensors[AFTER]),
        )
        return ids, self.flash2.scaled(logits.gather(-1, columns)) + bond

    def _around(self, name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        projection = Linear(self.tensors[f"{name}.kernel_projection.weight"], None, False)
        base = self.tensors[f"{name}.base_kernel"].flatten(0, 1)
        block = self.config.block_size
        before, behind = kernels(x.flatten(0, 1), Conv(base, projection, self.flash2.group))
        mixed = sublayer(convolved(x.flatten(0, 1), before, block).view(x.shape))
        return convolved(mixed.flatten(0, 1), behind, block).view(x.shape)
