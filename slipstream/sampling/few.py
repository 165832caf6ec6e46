"""Laws of few tokens, one row at a time on the host: what top_k, top_p or min_p leave.

The laws are those of `sampling.probs.shape_probs`, without writing zeros for a whole vocabulary:
`ids` int64 [kept] ascending and `probs` float32 [kept], rounded before anything is drawn, so that
what is drawn from is what is reported.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from slipstream.sampling.probs import ScoreArray, truncate
from slipstream.types import IntArray, SamplingParams

FewProbs = NDArray[np.floating]


def few(scores: ScoreArray, params: SamplingParams) -> tuple[IntArray, FewProbs]:
    """The law of one row's scores, float32 [vocab], highest finite: ids and probabilities."""
    if params.greedy:
        return np.array([scores.argmax()]), np.ones(1, np.float32)
    ids, probs = truncate(scores, params)
    return ids, probs.astype(np.float32)


def pick(ids: IntArray, probs: FewProbs, uniform: float) -> int:
    """The token whose slice of [0, 1), in the order of `ids`, holds the uniform.

    Scale does not matter; some mass is needed. Never a token of probability 0.
    """
    ends = np.cumsum(probs, dtype=np.float64)
    return int(ids[np.searchsorted(ends, uniform * ends[-1], side="right")])


def mass_at(ids: IntArray, others: IntArray, probs: FewProbs) -> FewProbs:
    """What a law of `others` gives to each of `ids` (ascending): float64 [ids].

    `others` may be in any order and repeat an id, whose probabilities are then added.
    """
    found = np.zeros(len(ids))
    at = np.minimum(np.searchsorted(ids, others), len(ids) - 1)
    both = ids[at] == others
    np.add.at(found, at[both], probs[both])
    return found


def left_over(target: FewProbs, draft: FewProbs) -> FewProbs:
    """`sampling.accept.residual` on the same ids, not normalized."""
    above = np.maximum(target - draft, 0)
    return above if above.any() else target
