"""Answers that go round in circles: a small target often does, greedily, and it teaches little."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_PERIODS, _TOKENS, _LONGEST = 3, 32, 64


def without_loop(answer: Sequence[int]) -> list[int]:
    """`answer` up to where it has gone round three times and for 32 tokens, if it does that.

    That much is kept, for targets loop in what is measured too, and a drafter has to go along; what
    follows is the same again. Periods of up to 64 tokens are seen. Two copies of something long are
    no loop: a function that is copied from the prompt is what drafters are for.
    """
    ids = np.asarray(answer)
    end = len(ids)
    for period in range(1, min(_LONGEST, len(ids) // 2) + 1):
        same = ids[period:] == ids[:-period]
        at = np.arange(1, len(same) + 1)
        run = at - np.maximum.accumulate(np.where(same, 0, at))  # equal pairs up to here
        # A run of n equal pairs is n + period tokens of a loop.
        found = np.flatnonzero(run >= max(_TOKENS, _PERIODS * period) - period)
        if len(found):
            end = min(end, int(found[0]) + period + 1)
    return list(answer[:end])
