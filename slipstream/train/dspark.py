"""The DSpark recipe: DFlash's blocks with the Markov and confidence heads in the loss.

Source: DeepSeek's DSpark: per draft token 0.1 of the cross-entropy, 0.9 of the distance between the
draft's and the target's law (L1), and the confidence head's error against the chance of acceptance,
1 - L1 / 2; weights fall as exp(-k / 4) from the first token on, and end with the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.dense import Model
from slipstream.models.dspark import DSparkConfig, markov, save_dspark
from slipstream.train.dflash import DFlashNetwork
from slipstream.train.recipe import Batch, hard, labels, target_law, weighted

_GAMMA, _CE, _L1 = 4.0, 0.1, 0.9


class DSparkNetwork(DFlashNetwork):
    """Differences from DFlash: every row drafts, heads behind the rows, another loss. `needs` ends
    in the last layer's output, which gives the target's law.
    """

    recipe = "dspark"
    by_head_row: tuple[str, ...] = ("markov_head.markov_w2.weight",)

    def __init__(
        self, config: DSparkConfig, target: Model, *, seed: int, vocab: Tensor | None = None
    ) -> None:
        super().__init__(config.flash, target, seed=seed, shapes=config.shapes, vocab=vocab)
        self.spark, self.draft_len = config, config.flash.block_size
        self.needs = (*config.flash.taps, target.config.num_layers)
        with torch.no_grad():
            # The bias starts at nothing: a backbone that can draft comes first.
            self.tensors["markov_head.markov_w2.weight"].zero_()

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_dspark(folder, self.spark, {**tensors, **self.draft_head.stored()})

    def logits(self, batch: Batch) -> Tensor:
        """[texts, blocks, draft_len, head's rows]: what each row drafts after the text's tokens."""
        return self._walk(batch)[0]

    def loss(self, batch: Batch) -> Tensor:
        """Weighted mean over anchors and draft tokens; see the module."""
        wanted, there = labels(batch, self.draft_len)
        logits, confidence = self._walk(batch)
        logits = logits.float()
        last = batch.features_at(batch.places(0, self.draft_len), -1)
        law = self.draft_head.cut(target_law(self._target, last))
        missed = 1 - law.sum(-1)  # by a reduced head
        distance = (logits.softmax(-1) - law).abs().sum(-1) + missed
        columns, known = self.draft_head.columns(wanted)
        total = _CE * hard(logits, columns) * known + _L1 * distance
        if confidence is not None:
            accepted = (1 - distance.detach() / 2).clamp(0, 1)
            total = total + F.binary_cross_entropy_with_logits(
                confidence.float(), accepted, reduction="none"
            )
        return weighted(total, math.exp(-1 / _GAMMA), there)

    def _walk(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Logits [texts, blocks, draft_len, head's rows], and the confidence head's."""
        hidden = self.hidden(batch)
        first = self.tensors["markov_head.markov_w1.weight"]
        second = self.tensors["markov_head.markov_w2.weight"]
        embedded = F.embedding(batch.tokens_at(batch.places(0, self.draft_len)), first)
        state = hidden.new_zeros(*batch.anchors.shape, self.spark.rank)
        read = []
        for i in range(self.draft_len):
            one, state = markov(
                self.spark.markov, embedded[:, :, i], hidden[:, :, i], state, self._mixed
            )
            read.append(one)
        logits = self.draft_head.logits(hidden) + torch.stack(read, 2) @ second.t()
        if not self.spark.confident:
            return logits, None
        both = torch.cat((hidden, embedded), -1)
        return logits, self._linear(both, "confidence_head.proj")[..., 0]

    def _mixed(self, x: Tensor) -> Tensor:
        name = {"gated": "gate_proj", "rnn": "joint_proj"}[self.spark.markov]
        return self._linear(x, f"markov_head.{name}")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])
