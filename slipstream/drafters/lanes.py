"""Rows of a draft that is being made: choosing their tokens, and the law these were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from slipstream.sampling.accept import invert_cdf
from slipstream.sampling.probs import argmax, process_logits, shape_probs
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.types import Dense, Draft, DraftLaw, OneHot, Row, TopK


@dataclass(slots=True, kw_only=True, eq=False)
class Lane:
    """One row of the draft: `index` in the batch, at most `width` tokens, `chosen` so far."""

    index: int
    row: Row
    width: int
    chosen: list[int] = field(default_factory=list)


AnyLane = TypeVar("AnyLane", bound=Lane)
_UNIFORMS = Uniforms()


def law_for(
    lanes: Sequence[Lane], *, rows: int, vocab: int, device: torch.device
) -> OneHot | Dense:
    """`OneHot` where every lane is greedy, else a `Dense` to be filled by `choose`."""
    if all(lane.row.params.greedy for lane in lanes):
        return OneHot()
    width = max((lane.width for lane in lanes), default=0)
    return Dense(torch.empty(rows, width, vocab, device=device))


def choose(lanes: list[AnyLane], logits: Tensor, law: DraftLaw) -> list[AnyLane]:
    """Append one token to each lane; lanes without a finite score end here.

    `logits` [lanes, vocab] go through the target's own path: its processing of the row's prefix and
    the row's temperature and truncation. Greedy rows take the argmax. All lanes have chosen equally
    many tokens before.
    """
    scores = process_logits(
        logits.float(), [lane.row.sampler for lane in lanes], [lane.chosen for lane in lanes]
    )
    tokens, peaks = argmax(scores)
    alive = np.flatnonzero(np.isfinite(peaks))
    if len(alive) < len(lanes):
        lanes = [lanes[i] for i in alive]
        scores, tokens = scores[torch.from_numpy(alive)], tokens[alive]
    if isinstance(law, Dense) and lanes:
        probs = shape_probs(scores, [lane.row.params for lane in lanes])
        law.probs[[lane.index for lane in lanes], len(lanes[0].chosen)] = probs
        tokens = invert_cdf(probs, draws(lanes)).cpu().numpy()
    for lane, token in zip(lanes, tokens.tolist(), strict=True):
        lane.chosen.append(token)
    return lanes


def pack_lanes(lanes: Sequence[Lane], law: DraftLaw, *, rows: int) -> Draft:
    """The finished draft of a batch of `rows` rows."""
    width = max((len(lane.chosen) for lane in lanes), default=0)
    if not width:
        return Draft.empty(rows)
    tokens, lens = np.full((rows, width), -1, np.int64), np.zeros(rows, np.int64)
    for lane in lanes:
        lens[lane.index] = len(lane.chosen)
        tokens[lane.index, : len(lane.chosen)] = lane.chosen
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
