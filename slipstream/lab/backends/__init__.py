"""Things the lab can measure. `open_backend` picks the one a grid asks for."""

from __future__ import annotations

from slipstream.lab.backends.base import Backend
from slipstream.lab.grid import Grid


def open_backend(grid: Grid) -> Backend:
    """The backend that runs `grid.target`. Raises `ModelError` where it cannot be loaded."""
    from slipstream.lab.backends.embedded import Embedded  # the one door to the engine and to torch

    return Embedded(grid.target, dtype=grid.dtype, threads=grid.threads)
