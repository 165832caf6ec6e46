"""The DSpark recipe: DFlash's blocks with the Markov and confidence heads in the loss.

Source: DeepSeek's DSpark: per draft token 0.1 of the cross-entropy, 0.9 of the distance between the
draft's and the target's law (L1), and the confidence head's error against the chance of acceptance,
1 - L1 / 2; weights fall as exp(-k / 4) from the first token on, and end with the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.dense import Model
from slipstream.models.dspark import DSparkConfig, markov, save_dspark
from slipstream.train.dflash import DFlashNetwork
from slipstream.train.recipe import labels

_GAMMA, _CE, _L1 = 4.0, 0.1, 0.9


class DSparkNetwork(DFlashNetwork):
    """Differences from DFlash: every row drafts, heads behind the rows, another loss. `needs` ends
    in the last layer's output, which gives the target's law.
    """

    recipe = "dspark"

    def __init__(self, config: DSparkConfig, target: Model, *, seed: int) -> None:
        super().__init__(config.flash, target, seed=seed, shapes=config.shapes)
        self.spark, self.draft_len = config, config.flash.block_size
        self.needs = (*config.flash.taps, target.config.num_layers)
        with torch.no_grad():
            # The bias starts at nothing: a backbone that can draft comes first.
            self.tensors["markov_head.markov_w2.weight"].zero_()

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_dspark(folder, self.spark, tensors)

    def logits(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """[anchors, block, vocab]: what each row drafts, the text's own tokens before it."""
        return self._walk(features, tokens, anchors)[0]

    def loss(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Weighted mean over anchors and draft tokens; see the module."""
        wanted, there = labels(tokens, anchors, self.draft_len + 1)
        logits, confidence = self._walk(features, tokens, anchors)
        each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
        at = anchors[:, None] + torch.arange(self.draft_len, device=anchors.device)
        law = self._law(features[at.clamp(max=len(tokens) - 1), -1])
        distance = (logits.softmax(-1) - law).abs().sum(-1)
        total = _CE * each.view(wanted.shape) + _L1 * distance
        if confidence is not None:
            accepted = (1 - distance.detach() / 2).clamp(0, 1)
            total = total + F.binary_cross_entropy_with_logits(
                confidence, accepted, reduction="none"
            )
        weight = torch.exp(-torch.arange(self.draft_len, device=anchors.device) / _GAMMA) * there
        return (total * weight).sum() / weight.sum().clamp(min=1e-6)

    def _walk(
        self, features: Tensor, tokens: Tensor, anchors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [anchors, block, vocab] and the confidence head's, [anchors, block]."""
        hidden = self.hidden(features, tokens, anchors)
        first = self.tensors["markov_head.markov_w1.weight"]
        second = self.tensors["markov_head.markov_w2.weight"]
        state = hidden.new_zeros(len(anchors), self.spark.rank)
        read, embedded = [], []
        for i in range(self.draft_len):
            before = tokens[(anchors + i).clamp(max=len(tokens) - 1)]
            embedded.append(F.embedding(before, first))
            one, state = markov(self.spark.markov, embedded[-1], hidden[:, i], state, self._mixed)
            read.append(one)
        logits = self.head(hidden) + torch.stack(read, 1) @ second.t()
        if not self.spark.confident:
            return logits, None
        both = torch.cat((hidden, torch.stack(embedded, 1)), -1)
        return logits, self._linear(both, "confidence_head.proj")[..., 0]

    def _mixed(self, x: Tensor) -> Tensor:
        name = {"gated": "gate_proj", "rnn": "joint_proj"}[self.spark.markov]
        return self._linear(x, f"markov_head.{name}")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def _law(self, last: Tensor) -> Tensor:
        """The target's next-token probabilities at last-layer outputs [..., hidden]."""
        norm = self._target.norm
        with torch.no_grad():
            normed = torch.rms_norm(last.float(), [last.shape[-1]], norm.weight.float(), norm.eps)
            return self.head(normed).softmax(-1)
