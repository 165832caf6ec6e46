"""How attention walks along a cache: positions at once, reads in flight, warps."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Reading:
    """Positions a program reads at once, how many such reads are in flight, and its warps."""

    positions: int
    stages: int
    warps: int = 4


def reading_for(splits: int, block: int) -> Reading:
    """Measured on one NVIDIA H200 (docs/gpu.md): many programs take small bites, few large ones."""
    shape = Reading(32, 5, 2) if splits <= 4 else Reading(64, 2)
    return shape if block <= 32 else replace(shape, warps=8 if block >= 128 else 4)
