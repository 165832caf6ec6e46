"""What every recipe is to the trainer, and what recipes share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


class Network(Protocol):
    """A drafter in training: float32 tensors by checkpoint name and its behavior on one text.

    Anchors are positions of the text; the k-th draft token behind an anchor stands for the token at
    anchor + k. Features [tokens, len(needs), hidden] are the target's at `needs`.
    """

    recipe: str
    needs: tuple[int, ...]
    draft_len: int
    tensors: dict[str, Tensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        ...

    def loss(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """The training loss of some anchors of one text, a scalar."""
        ...

    def agreement(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Bool [anchors, draft_len] twice: where the draft token is the text's, and where the text
        goes on that far.
        """
        ...

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors as a checkpoint in the published layout."""
        ...


def labels(tokens: Tensor, anchors: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The tokens behind each anchor, [anchors, block - 1], and which of them exist."""
    at = anchors[:, None] + torch.arange(1, block, device=tokens.device)
    there = at < len(tokens)
    return tokens[at.clamp(max=len(tokens) - 1)], there


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
