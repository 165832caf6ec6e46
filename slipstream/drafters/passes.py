"""Passes over one position a row, each one position further on: laid out once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.models.attention import Segment
from slipstream.models.config import ModelConfig
from slipstream.models.rope import RopeTable
from slipstream.target.batch import lay_out, place


@dataclass(frozen=True, slots=True)
class Pass:
    """Where one pass reads and writes: `slots` int64 [rows]; `rope` [rows, 1, head_dim] twice;
    `segments`: one list a layer.
    """

    slots: Tensor
    rope: tuple[Tensor, Tensor]
    segments: list[list[Segment]]


class Passes:
    """`count` passes over rows whose first position and pages are given.

    `order`: the caller's rows in the order in which the passes hold them. Only for layers without a
    window that cuts: there a pass sees one more position than the one before and nothing else.
    """

    def __init__(
        self,
        rows: Sequence[tuple[Sequence[int], int]],
        count: int,
        *,
        page_size: int,
        config: ModelConfig,
        rope: RopeTable,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        last = [
            place(i, 1, start + count - 1, pages, page_size)
            for i, (pages, start) in enumerate(rows)
        ]
        flat = lay_out(last, config, dtype, device)
        self.order = [p.order for p in flat.rows]
        back = np.arange(count - 1, -1, -1)
        positions = flat.positions - back[:, None]
        slots = [
            p.slots[p.start - back] if p.slots is not None else p.own_slots() - back
            for p in flat.rows
        ]
        self._slots = torch.from_numpy(np.stack(slots, 1)).to(device)
        self._rope = [
            part.view(*positions.shape, *part.shape[1:])
            for part in rope.rows(
                torch.from_numpy(positions.reshape(-1)).to(device), int(positions.max())
            )
        ]
        self._segments = [flat.plans[i] for i in flat.plan_of]
        self._at, self._count = 0, count

    def next(self) -> Pass:
        """The next pass; there are no more than `count`."""
        at, back = self._at, self._count - 1 - self._at
        self._at += 1
        cos, sin = self._rope
        segments = [[_earlier(s, back) for s in own] for own in self._segments]
        return Pass(self._slots[at], (cos[at], sin[at]), segments)


def _earlier(s: Segment, back: int) -> Segment:
    """The segment when its rows, of one query each, ended `back` positions earlier."""
    # What a row sees ends at its own position, so the mask moves along with it.
    return s._replace(
        length=s.length - back,
        mask=None if s.mask is None else s.mask[..., back:],
        slots=None if s.slots is None else s.slots[: s.length - back],
    )
