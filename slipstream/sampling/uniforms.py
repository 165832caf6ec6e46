"""Uniform numbers without a stream: each one is a function of (request seed, position, purpose).

A stream would tie a request's tokens to the batch it ran in, to how much was drafted and to
preemption. Keyed numbers do not: the same seed gives the same tokens alone or among sixteen.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from slipstream.types import IntArray

FloatArray = NDArray[np.float64]
_Words = NDArray[np.uint64]

_WEYL = np.uint64(0x9E3779B97F4A7C15)
_S30, _S27, _S31, _S11 = (np.uint64(s) for s in (30, 27, 31, 11))
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Purpose(Enum):
    """What a uniform decides. The value is mixed into the key, so that no two uses share one."""

    DRAFT = 0xD1B54A32D192ED03  # the drafter's own draw of a draft token
    ACCEPT = 0x8CB92BA72F3D8DD7  # keep or reject a draft token
    NEXT = 0xABC98388FB8FAC03  # the token drawn from the target (one-hot laws), recovered or bonus


class Uniforms:
    """Counter-based uniforms: the SplitMix64 finalizer over seed, position and purpose.

    Two keyed words, one of the seed and one of the position, are mixed apart and then together, so
    that neighboring seeds or positions share no visible structure. Source: Steele, Lea, Flood,
    "Fast splittable pseudorandom number generators" (OOPSLA 2014), the mix13 constants.
    """

    def __call__(self, seeds: IntArray, positions: IntArray, purpose: Purpose) -> FloatArray:
        """One number in [0, 1) for each pair; seeds and positions int64 [n], result float64 [n]."""
        salt = np.uint64(purpose.value)
        # Arrays of uint64 wrap modulo 2**64, which is what is wanted.
        seed_word = _mix(seeds.astype(np.uint64) + salt)
        position_word = _mix((positions.astype(np.uint64) + salt) * _WEYL)
        words = _mix(seed_word + _WEYL * position_word)
        return (words >> _S11).astype(np.float64) * 2.0**-53


def _mix(words: _Words) -> _Words:
    words = (words ^ (words >> _S30)) * _M1
    words = (words ^ (words >> _S27)) * _M2
    return words ^ (words >> _S31)
