"""The accept rule and the residual, as pure functions an exact test can multiply out.

Source: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding"
(ICML 2023), appendix A.1; Chen et al., "Accelerating large language model decoding with
speculative sampling" (2023), theorem 1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 256
_BELOW_ONE = 1 - 2.0**-53


def accept_probs(draft_probs: Tensor, target_probs: Tensor, tokens: Tensor) -> Tensor:
    """Probability that each draft token is kept: min(1, target / draft).

    `draft_probs`, `target_probs`: float [..., vocab]; `tokens`: int64 [...]. Returns float [...].
    A token the drafter could not have drawn (draft probability 0) is kept iff the target allows it.
    """
    draft = draft_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    target = target_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    ratio = torch.where(draft > 0, target / draft, (target > 0).to(target.dtype))
    return ratio.clamp(max=1)


def accepts(draft: Tensor, target: Tensor, uniforms: Tensor) -> Tensor:
    """The draw that goes with `accept_probs`, without the division: uniform * draft < target.

    `draft`, `target`: the two probabilities of the draft token, float [n]; `uniforms`: float64 [n]
    in [0, 1). Returns bool [n]. A token of target probability 0 is never kept.
    """
    return uniforms * draft.double() < target.double()


def residual(draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """The law of the recovered token: what target has above draft, normalized.

    Both float [..., vocab]; so is the result. Where nothing is left (the two laws are equal, so a
    rejection has probability 0 and is rounding), it is `target_probs`.
    """
    above = (target_probs - draft_probs).clamp_(min=0)
    mass = above.sum(-1, keepdim=True)
    return torch.where(mass > 0, above / mass, target_probs)


def invert_cdf(probs: Tensor, uniforms: Tensor) -> Tensor:
    """The token whose slice of [0, 1), in vocabulary order, holds the uniform.

    `probs`: non-negative float [n, vocab] with some mass in each row (scale does not matter);
    `uniforms`: float64 [n] in [0, 1). Returns int64 [n]; never a token of probability 0.
    Sums run over blocks first, then inside one block: a full float64 running sum costs ten times
    as much.
    """
    n, vocab = probs.shape
    block = min(_BLOCK, vocab)
    padded = F.pad(probs, (0, -vocab % block)) if vocab % block else probs
    blocks = padded.reshape(n, padded.shape[1] // block, block)
    ends = blocks.sum(-1).double().cumsum(-1)
    wanted = uniforms.to(ends.device).unsqueeze(-1) * ends[:, -1:]
    index = (ends <= wanted).sum(-1)
    rows = torch.arange(n, device=probs.device)
    running = blocks[rows, index].double().cumsum(-1)
    # Block sums round differently from the running sum inside: stay below its end.
    before = F.pad(ends, (1, 0))[rows, index].unsqueeze(-1)
    inside = torch.minimum(wanted - before, running[:, -1:] * _BELOW_ONE)
    return index * block + (running <= inside).sum(-1)
