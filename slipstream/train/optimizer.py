"""What turns gradients into steps: AdamW, or Muon for the products and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import InvalidConfig

OPTIMIZERS = ("adamw", "muon")
_TABLES = ("markov_w", "codebook", "confidence")
"""Parts of names of weights that are looked up or end in few numbers: no products for Muon."""


class Optimizer:
    """One or two of torch's optimizers under one learning rate.

    Muon (Jordan et al. 2024; the speculators library trains drafters with it) makes the step of a
    product's weight orthogonal; its rate is scaled so that AdamW's value fits both.
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, kind: str, lr: float) -> None:
        if kind not in OPTIMIZERS:
            raise InvalidConfig(f"optimizer is {kind!r}; choose one of {', '.join(OPTIMIZERS)}.")
        products = [n for n, t in tensors.items() if kind == "muon" and _is_product(n, t)]
        rest = [t for n, t in tensors.items() if n not in products]
        self._lr = lr
        self._parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=lr, weight_decay=0.0, betas=(0.9, 0.95), fused=True)
        ]
        if products:
            self._parts.append(
                torch.optim.Muon(
                    [tensors[n] for n in products],
                    lr=lr,
                    weight_decay=0.0,
                    adjust_lr_fn="match_rms_adamw",
                )
            )

    def step(self, share: float) -> None:
        """Apply the gradients at a share of the learning rate, and clear them."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = self._lr * share
            part.step()
            part.zero_grad(set_to_none=True)

    def state(self) -> list[dict[str, Any]]:
        """For a checkpoint."""
        return [part.state_dict() for part in self._parts]

    def restore(self, state: list[dict[str, Any]]) -> None:
        """Go on from a checkpoint."""
        for part, own in zip(self._parts, state, strict=True):
            part.load_state_dict(own)


def _is_product(name: str, tensor: Tensor) -> bool:
    return tensor.ndim == 2 and not any(part in name for part in _TABLES)
