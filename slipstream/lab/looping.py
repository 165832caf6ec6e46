"""Does an answer go round in circles? Loops flatter every drafter that copies."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import pairwise

import numpy as np

from slipstream.lab.samples import Sample

MIN_TOKENS = 32
DISTINCT_BIGRAMS = 0.2  # below: degenerate (traps 25)
MAX_PERIOD = 32
MIN_PERIODS = 3


def distinct_bigram_ratio(tokens: Sequence[Hashable]) -> float:
    """Different neighboring pairs / pairs; 1.0 for fewer than two tokens."""
    pairs = list(pairwise(tokens))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def periodic_tail(tokens: Sequence[Hashable]) -> int | None:
    """Period of a repeating tail of at least 32 tokens and 3 periods; None if there is none."""
    codes = {t: i for i, t in enumerate(dict.fromkeys(tokens))}
    ids = np.array([codes[t] for t in tokens])
    for period in range(1, MAX_PERIOD + 1):
        length = max(MIN_TOKENS, MIN_PERIODS * period)
        if length > len(ids):
            return None
        tail = ids[-length:]
        if bool((tail[period:] == tail[:-period]).all()):
            return period
    return None


def is_looping(tokens: Sequence[Hashable]) -> bool:
    """True for 32 tokens or more with under 20 % distinct bigrams, or a periodic tail."""
    if len(tokens) < MIN_TOKENS:
        return False
    return distinct_bigram_ratio(tokens) < DISTINCT_BIGRAMS or periodic_tail(tokens) is not None


def sample_loops(sample: Sample) -> bool:
    """`is_looping` on a sample's token ids, on its words where a backend reports only text."""
    return is_looping(_units(sample))


def long_enough(sample: Sample) -> bool:
    """Whether the answer has the 32 tokens that a judgment takes."""
    return len(_units(sample)) >= MIN_TOKENS


def _units(sample: Sample) -> Sequence[Hashable]:
    return sample.token_ids if sample.token_ids is not None else sample.text.split()
