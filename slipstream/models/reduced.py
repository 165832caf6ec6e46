"""Drafters that know only some of the target's tokens: `lm_head`, `d2t`, `t2d` of checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import ModelError

SPARE = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors some publishers add that say nothing new: the mapping once more, parts of the target."""


def target_ids(d2t: Tensor) -> Tensor:
    """The target's token of each draft token, int64 [draft_vocab], from the stored offsets."""
    return d2t.long() + torch.arange(len(d2t), device=d2t.device)


def widened(logits: Tensor, ids: Tensor | None, vocab: int | None) -> Tensor:
    """Logits of a reduced vocabulary over the target's, [N, vocab]; -inf where there is no row.

    `ids` int64: the target's token of each column, None where they are the target's own. `vocab`
    None: as they are.
    """
    if ids is None or vocab is None:
        return logits
    whole = logits.new_full((len(logits), vocab), float("-inf"))
    return whole.index_copy_(1, ids, logits)


def check_mapping(d2t: Tensor, t2d: Tensor | None, vocab: int, source: str) -> None:
    """Raise `ModelError` where a reduced vocabulary does not map into the target's.

    `d2t`, integers [draft_vocab]: offsets from a draft token to the target's; `t2d` [vocab]:
    whether the target's token has a draft token.
    """
    ids = target_ids(d2t.cpu())
    bad = ((ids < 0) | (ids >= vocab)).nonzero().flatten().tolist()
    if bad:
        raise ModelError(
            f"{source} maps draft token {bad[0]} to {int(ids[bad[0]])} (d2t); this target's tokens "
            f"are 0 to {vocab - 1}."
        )
    if len(ids.unique()) != len(ids):
        raise ModelError(f"{source} maps two draft tokens to one token (d2t); it is broken.")
    if t2d is not None and not torch.equal(t2d.bool().nonzero().flatten(), ids.sort().values):
        raise ModelError(f"{source} has a t2d that does not name the tokens d2t maps to.")


def named(d2t: Tensor, vocab: int) -> Tensor:
    """The `t2d` of a `d2t`: bool [vocab]."""
    known = torch.zeros(vocab, dtype=torch.bool)
    known[target_ids(d2t.cpu())] = True
    return known
