"""Rows of a draft that is being made: choosing their tokens, and the law these were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.models.reduced import widened
from slipstream.sampling.accept import invert_cdf
from slipstream.sampling.few import FewProbs, few, pick
from slipstream.sampling.probs import argmax, is_open, process_logits, shape_probs
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.types import Dense, Draft, DraftLaw, IntArray, OneHot, Row, TopK


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """One row of the draft: `index` in the batch, at most `width` tokens, `chosen` so far."""

    index: int
    row: Row
    width: int
    chosen: list[int] = field(default_factory=list)


AnyLane = TypeVar("AnyLane", bound=Lane)
_UNIFORMS = Uniforms()


@dataclass(slots=True)
class Kept:
    """The law of a draft in the making whose rows keep few tokens: row, depth, ids and
    probabilities of each draft token chosen so far.
    """

    parts: list[tuple[int, int, IntArray, FewProbs]] = field(default_factory=list)

    def packed(self, rows: int, width: int) -> TopK:
        """As the verifier takes it, on the host: as wide as the longest, the rest of no
        probability.
        """
        most = max((len(ids) for _, _, ids, _ in self.parts), default=1)
        ids, probs = (
            np.zeros((rows, width, most), np.int64),
            np.zeros((rows, width, most), np.float32),
        )
        for row, depth, own, kept in self.parts:
            ids[row, depth, : len(own)], probs[row, depth, : len(own)] = own, kept
        return TopK(torch.from_numpy(ids), torch.from_numpy(probs))


@dataclass(frozen=True, slots=True)
class Reduced:
    """The target's tokens that a drafter's columns of logits stand for: `ids` int64 [columns], and
    the same on the host; `vocab`: how many the target has.
    """

    ids: Tensor
    host: IntArray
    vocab: int

    @classmethod
    def of(cls, ids: Tensor | None, vocab: int) -> Reduced | None:
        """None where the columns are the target's own tokens."""
        return None if ids is None else cls(ids, ids.cpu().numpy(), vocab)


LaneLaw = DraftLaw | Kept


def law_for(
    lanes: Sequence[Lane], *, rows: int, vocab: int, device: torch.device
) -> OneHot | Dense | Kept:
    """What `choose` fills: `OneHot` where every lane is greedy, a `Dense` where one may draw any
    token of `vocab`, else a `Kept`.
    """
    if all(lane.row.params.greedy for lane in lanes):
        return OneHot()
    if not any(is_open(lane.row.params) for lane in lanes):
        return Kept()
    width = max((lane.width for lane in lanes), default=0)
    return Dense(torch.empty(rows, width, vocab, device=device))


def choose(
    lanes: list[AnyLane], logits: Tensor, law: LaneLaw, reduced: Reduced | None = None
) -> list[AnyLane]:
    """Append one token to each lane; lanes without a finite score end here.

    `logits` [lanes, columns] go through the target's own path: its processing of the row's prefix
    and the row's temperature and truncation. Greedy rows take the argmax. All lanes have chosen
    equally many tokens before. `reduced`: what the columns stand for; they are spread over the
    target's vocabulary only where something needs that.
    """
    if not all(lane.row.sampler.plain for lane in lanes) or isinstance(law, Dense):
        if reduced is not None:
            logits, reduced = widened(logits, reduced.ids, reduced.vocab), None
        logits = process_logits(
            logits, [lane.row.sampler for lane in lanes], [lane.chosen for lane in lanes]
        )
    picks, peaks = argmax(logits)
    alive = np.flatnonzero(np.isfinite(peaks))
    if len(alive) < len(lanes):
        lanes, picks = [lanes[i] for i in alive], picks[alive]
        logits = logits[torch.from_numpy(alive).to(logits.device)]
    if isinstance(law, Dense) and lanes:
        probs = shape_probs(logits, [lane.row.params for lane in lanes])
        law.probs[[lane.index for lane in lanes], len(lanes[0].chosen)] = probs
        picks = invert_cdf(probs, draws(lanes)).cpu().numpy()
    elif isinstance(law, Kept) and lanes:
        picks = _drawn(lanes, logits, law, reduced)
    elif reduced is not None:
        picks = reduced.host[picks]
    for lane, token in zip(lanes, picks.tolist(), strict=True):
        lane.chosen.append(token)
    return lanes


def _drawn(lanes: Sequence[Lane], logits: Tensor, law: Kept, reduced: Reduced | None) -> IntArray:
    """A token of each lane from its law of few tokens, which goes into `law`: int64 [lanes]."""
    table, uniforms = logits.float().cpu().numpy(), draws(lanes).numpy()
    tokens = np.empty(len(lanes), np.int64)
    for i, lane in enumerate(lanes):
        ids, probs = few(table[i], lane.row.params)
        if reduced is not None:
            ids = reduced.host[ids]
        law.parts.append((lane.index, len(lane.chosen), ids, probs))
        tokens[i] = pick(ids, probs, uniforms[i])
    return tokens


def pack_lanes(lanes: Sequence[Lane], law: LaneLaw, *, rows: int) -> Draft:
    """The finished draft of a batch of `rows` rows."""
    width = max((len(lane.chosen) for lane in lanes), default=0)
    if not width:
        return Draft.empty(rows)
    tokens, lens = np.full((rows, width), -1, np.int64), np.zeros(rows, np.int64)
    for lane in lanes:
        lens[lane.index] = len(lane.chosen)
        tokens[lane.index, : len(lane.chosen)] = lane.chosen
    if isinstance(law, Kept):
        return Draft(tokens, lens, law.packed(rows, width))
    if isinstance(law, Dense):
        law = Dense(law.probs[:, :width])
    elif isinstance(law, TopK):
        law = TopK(law.ids[:, :width], law.probs[:, :width])
    return Draft(tokens, lens, law)


def draws(lanes: Sequence[Lane]) -> Tensor:
    """The uniform of each lane's next draft token, float64 [lanes] on the host."""
    seeds = np.array([lane.row.seed for lane in lanes], np.int64)
    at = np.array([len(lane.row.tokens) + len(lane.chosen) for lane in lanes], np.int64)
    return torch.from_numpy(_UNIFORMS(seeds, at, Purpose.DRAFT))
