"""The MTP recipe: several recursive steps of one head, cross-entropy on the target's own tokens.

Source: FastMTP as the speculators library trains it: steps weighted by 0.6 to the s-th. With `soft`
it is the cross-entropy to the target's law instead. Tokens that a reduced head lacks teach nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipstream.models.dense import Model
from slipstream.models.mtp import MtpConfig, save_mtp
from slipstream.train.chain import ChainNetwork
from slipstream.train.head import normalized, trained
from slipstream.train.recipe import Batch, hard, labels, soft, target_law, weighted

_DECAY = 0.6


class MtpNetwork(ChainNetwork):
    """One decoder layer behind the target's last; what is fed back has gone through its norm."""

    recipe = "mtp"

    def __init__(
        self,
        config: MtpConfig,
        target: Model,
        *,
        steps: int,
        seed: int,
        soft: bool = False,
        vocab: Tensor | None = None,
    ) -> None:
        super().__init__(
            config.model,
            trained(config.shapes),
            target,
            prefix=config.prefix,
            draft_len=steps,
            seed=seed,
            vocab=vocab,
        )
        self.config = config
        self.needs: tuple[int, ...] = (config.depth,)
        self._soft = soft

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_mtp(folder, self.config, {**tensors, **self.draft_head.stored()})

    def start(self, features: Tensor) -> Tensor:
        """The target's last states after its final norm."""
        norm, x = self.target.norm, features[..., 0, :].float()
        return torch.rms_norm(x, [x.shape[-1]], norm.weight.float(), norm.eps)

    def enter(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Token and state are joined to a stream of the layer's own."""
        prefix = self.config.prefix
        both = (self.norm(embedded, f"{prefix}enorm"), self.norm(states, f"{prefix}hnorm"))
        x = torch.cat(both, -1) @ self.get(f"{prefix}eh_proj").t()
        return x, self.norm(x, f"{prefix}input_layernorm")

    def out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The normed output, for both."""
        normed = self.norm(x, f"{self.config.prefix}shared_head.norm")
        return normed, normed

    def loss(self, batch: Batch) -> Tensor:
        """Weighted mean over anchors and steps; see the module."""
        wanted, there = labels(batch, self.draft_len)
        columns, known = self.draft_head.columns(wanted)
        there = there & known
        if not self._soft:
            return weighted(hard(self.logits(batch), columns), _DECAY, there)
        at, each = batch.places(0, self.draft_len), []
        for i, normed in enumerate(self.unrolled(batch)):
            law = self.draft_head.cut(target_law(self.target, batch.features_at(at[..., i], -1)))
            each.append(soft(self.draft_head.logits(normed), normalized(law)))
        return weighted(torch.stack(each, -1), _DECAY, there)
