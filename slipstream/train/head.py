"""The head a drafter is trained with: the target's own, or its rows of frequent tokens.

Few of a vocabulary's tokens make up nearly all that a target says, and a small drafter spends most
of its time in the head. Source: frequency-ranked heads (FR-Spec, arXiv 2502.14856), EAGLE-3's
`d2t`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.models.dense import Model
from slipstream.models.reduced import target_ids

STORED = ("lm_head.weight", "d2t")
"""Names of what a reduced head adds to a checkpoint; it is not trained."""


class DraftHead:
    """`vocab`: ids int64 of the target's tokens it has a row for, ascending; None for all."""

    def __init__(self, target: Model, vocab: Tensor | None) -> None:
        self._target = target
        self.vocab = None if vocab is None else vocab.to(target.device)
        if self.vocab is not None:
            self._rows = target.head.weight[self.vocab]
            size = target.config.vocab_size
            self._column = torch.full((size,), -1, device=target.device)
            self._column[self.vocab] = torch.arange(len(self.vocab), device=target.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Of normed states [..., hidden]: [..., rows], in the head's dtype."""
        if self.vocab is None:
            return target_logits(self._target, hidden)
        return hidden.to(self._rows.dtype) @ self._rows.t()

    def tokens(self, columns: Tensor) -> Tensor:
        """The target's tokens of columns of `logits`."""
        return columns if self.vocab is None else self.vocab[columns]

    def columns(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Columns of the target's tokens, 0 for those without, and which have one."""
        if self.vocab is None:
            return tokens, torch.ones_like(tokens, dtype=torch.bool)
        found = self._column[tokens]
        return found.clamp(min=0), found >= 0

    def cut(self, law: Tensor) -> Tensor:
        """The columns of the target's law [..., vocab]; they add up to less than 1."""
        return law if self.vocab is None else law[..., self.vocab]

    def rows(self, stored: Tensor, d2t: Tensor | None) -> Tensor:
        """A checkpoint's rows [its head's, width] in this head's order; zeros for tokens that the
        checkpoint's head lacks. `d2t`: its offsets, None where it has the target's vocabulary.
        """
        size = self._target.config.vocab_size
        ids = torch.arange(size) if d2t is None else target_ids(d2t.cpu())
        if len(ids) != len(stored):
            return stored  # not a tensor of such rows: its shape will be refused
        whole = stored.new_zeros(size, *stored.shape[1:])
        whole[ids] = stored
        return whole if self.vocab is None else whole[self.vocab.cpu()]

    def stored(self) -> dict[str, Tensor]:
        """What a checkpoint holds of a reduced head, by name (`models.reduced`)."""
        if self.vocab is None:
            return {}
        offsets = self.vocab - torch.arange(len(self.vocab), device=self.vocab.device)
        return {"lm_head.weight": self._rows.bfloat16(), "d2t": offsets}


def trained(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint that training changes."""
    return {name: shape for name, shape in shapes.items() if name not in STORED}


def normalized(law: Tensor) -> Tensor:
    """A cut law as a law again."""
    return law / law.sum(-1, keepdim=True).clamp(min=1e-9)


def target_logits(target: Model, hidden: Tensor) -> Tensor:
    """The target's own head over normed states [..., hidden], in the head's dtype."""
    weight = target.head.weight
    return hidden.to(weight.dtype) @ weight.t()
