"""Which rows of a forward hold features of tokens that were committed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from slipstream.engine.scheduler import Batch
from slipstream.engine.sequence import Sequence
from slipstream.types import Draft, Span


@dataclass(frozen=True, slots=True)
class Fed:
    """A row of a forward: `length` tokens from position `start` on, drafts included."""

    row: Sequence
    start: int
    length: int


def fed_rows(batch: Batch, draft: Draft) -> list[Fed]:
    """The rows of a forward in its order, before anything of it is committed."""
    rows = [Fed(row, row.computed, 1 + int(draft.lens[i])) for i, row in enumerate(batch.decoding)]
    return rows + [Fed(c.row, c.row.computed, c.length) for c in batch.in_order]


def spans(fed: Seq[Fed], features: Tensor) -> list[Span]:
    """What of `features` [all tokens, taps, hidden] belongs to tokens now in the cache."""
    found, at = [], 0
    for f in fed:
        if f.row.computed > f.start:
            found.append(Span(f.row, f.start, features[at : at + f.row.computed - f.start]))
        at += f.length
    return found
