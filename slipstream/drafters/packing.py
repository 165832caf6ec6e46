"""Lists of draft tokens into a `Draft`, for drafters that choose without randomness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream.types import Draft, OneHot


def pack(proposals: Sequence[Sequence[int]]) -> Draft:
    """One-hot draft of `proposals[i]` tokens for row i; rows without any cost nothing."""
    lens = [len(p) for p in proposals]
    width = max(lens, default=0)
    if not width:
        return Draft.empty(len(lens))
    tokens = np.array([[*p, *[-1] * (width - len(p))] for p in proposals], np.int64)
    return Draft(tokens, np.array(lens, np.int64), OneHot())
