"""What every recipe is to the trainer, and what recipes share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.dense import Model
from slipstream.train.head import DraftHead, target_logits


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side, and where blocks of draft tokens begin in them.

    `tokens` int64 [texts, longest], zeros behind a text's end; `lengths` int64 [texts]; `anchors`
    int64 [texts, blocks], positions from 1 on; `features` [texts, longest, len(needs), hidden], the
    target's at a network's `needs`.
    """

    tokens: Tensor
    lengths: Tensor
    anchors: Tensor
    features: Tensor

    def places(self, first: int, count: int) -> Tensor:
        """Positions anchor + first and following, kept inside: int64 [texts, blocks, count]."""
        steps = torch.arange(first, first + count, device=self.tokens.device)
        at = self.anchors[..., None] + steps
        return at.minimum(self.lengths[:, None, None] - 1)

    def tokens_at(self, places: Tensor) -> Tensor:
        """Tokens at positions [texts, ...]."""
        return self.tokens.gather(1, places.flatten(1)).view(places.shape)

    def features_at(self, places: Tensor, which: int) -> Tensor:
        """One of the features at positions [texts, ...]: [texts, ..., hidden]."""
        one = self.features[:, :, which]
        at = places.flatten(1)[..., None].expand(-1, -1, one.shape[-1])
        return one.gather(1, at).view(*places.shape, -1)


class Network(Protocol):
    """A drafter in training: float32 tensors by checkpoint name and its behavior on texts.

    The k-th draft token behind an anchor stands for the token at anchor + k. `by_head_row`: tensors
    with one row for each row of the head.
    """

    recipe: str
    needs: tuple[int, ...]
    draft_len: int
    tensors: dict[str, Tensor]
    draft_head: DraftHead
    by_head_row: tuple[str, ...]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        ...

    def loss(self, batch: Batch) -> Tensor:
        """The training loss of a batch, a scalar."""
        ...

    def agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Bool [texts, blocks, draft_len] twice: where the draft token is the text's, and where the
        text goes on that far.
        """
        ...

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors as a checkpoint in the published layout."""
        ...


def labels(batch: Batch, count: int) -> tuple[Tensor, Tensor]:
    """The `count` tokens behind each anchor, [texts, blocks, count], and which of them exist."""
    there = batch.anchors[..., None] + torch.arange(1, count + 1, device=batch.tokens.device)
    wanted = batch.tokens_at(batch.places(1, count))
    return wanted, there < batch.lengths[:, None, None]


def agreement(said: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """`Network.agreement` of draft tokens [texts, blocks, draft_len]."""
    wanted, there = labels(batch, said.shape[-1])
    return (said == wanted) & there, there


def weighted(each: Tensor, decay: float, there: Tensor) -> Tensor:
    """Mean of losses [texts, blocks, steps], the s-th step weighing decay^s; a scalar."""
    weight = decay ** torch.arange(each.shape[-1], device=each.device) * there
    return (each * weight).sum() / weight.sum().clamp(min=1e-6)


def hard(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy of each of the labels, in their shape, float32."""
    each = F.cross_entropy(logits.flatten(0, -2).float(), wanted.flatten(), reduction="none")
    return each.view(wanted.shape)


def soft(logits: Tensor, law: Tensor) -> Tensor:
    """Cross-entropy to laws [..., vocab], in their leading shape, float32."""
    return -(law * logits.float().log_softmax(-1)).sum(-1)


def target_law(target: Model, last: Tensor) -> Tensor:
    """The target's next-token probabilities at last-layer outputs [..., hidden], float32."""
    with torch.no_grad():
        normed = torch.rms_norm(
            last.float(), [last.shape[-1]], target.norm.weight.float(), target.norm.eps
        )
        return target_logits(target, normed).float().softmax(-1)


def initial(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """First values: norms of ones, biases of zeros, products that keep sizes about as they are."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    scale = 1 / math.sqrt(shape[1])
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        scale /= 2
    return torch.randn(shape, generator=generator) * scale
