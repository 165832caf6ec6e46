"""Logits to probabilities: the one path, used for the target and for draft models alike.

`process_logits` changes scores (penalties, bans), `shape_probs` makes laws of them. `draw` samples
the same laws without writing [n, vocab] probabilities, which is most of the cost at 50,000 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from slipstream.sampling.accept import invert_cdf
from slipstream.sampling.state import RowSampler
from slipstream.types import IntArray, SamplingParams

FloatArray = NDArray[np.float64]
ScoreArray = NDArray[np.float32]

# exp(-80) is 2e-35. Below it float32 turns denormal, which makes exp ten to forty times slower on
# x86, for mass that no float64 sum over a vocabulary would notice. Such tokens get probability 0.
_LOWEST = -80.0
_NEGLIGIBLE = 2e-35
_COLDEST = 1e-30  # a smaller temperature has no float32 reciprocal; the law is one-hot either way
_BLOCK = 256
_CHUNK = 2**18  # elements handled at once: temporaries that stay in a core's cache
_FINITE = np.finfo(np.float32).min  # tokens at -inf are banned, not unlikely
_DROPPED = 1e-12  # share of the mass that top_p's total may miss
_BINS = 256
_MINUS_INFINITY = 0xFF80  # the bits of a bfloat16


def is_open(params: SamplingParams) -> bool:
    """True where every token may be drawn, so that the law is worth writing out."""
    return not (params.greedy or params.top_k or params.top_p < 1 or params.min_p)


def process_logits(
    logits: Tensor, samplers: Sequence[RowSampler], prefixes: Sequence[Sequence[int]]
) -> Tensor:
    """Penalties, bias, bad words, min_tokens and grammar; banned tokens become -inf.

    `logits`: float [n, vocab]; row i belongs to `samplers[i]` and is processed as if `prefixes[i]`
    had been committed. Returns float32 [n, vocab] (`logits` itself where nothing applies).
    """
    scores = logits.float()
    if all(sampler.plain for sampler in samplers):
        return scores
    if scores is logits:
        scores = logits.clone()
    for row, (sampler, prefix) in enumerate(zip(samplers, prefixes, strict=True)):
        if not sampler.plain:
            sampler.process(scores[row], prefix)
    return scores


def to_probs(
    logits: Tensor, samplers: Sequence[RowSampler], prefixes: Sequence[Sequence[int]]
) -> Tensor:
    """`process_logits`, then `shape_probs` with each sampler's params: float32 [n, vocab]."""
    scores = process_logits(logits, samplers, prefixes)
    return shape_probs(scores, [sampler.params for sampler in samplers])


def shape_probs(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, top_k, top_p, min_p, softmax over processed scores.

    `scores`: float32 [n, vocab], a finite maximum in each row; one params a row. Returns float32
    [n, vocab]. top_k keeps k tokens, top_p the smallest set of the likeliest tokens that holds the
    mass (of what top_k left), min_p those of at least that share of the likeliest; ties go to the
    lowest id. Greedy rows are one-hot at the argmax.
    """
    probs = torch.zeros_like(scores)
    open_rows = [row for row, one in enumerate(params) if is_open(one)]
    for rows, weights in _softmax_weights(scores, params, open_rows):
        probs[rows] = weights / _totals(weights).float().unsqueeze(-1)
    table = _on_host(scores)
    for row, one in enumerate(params):
        if not is_open(one):
            ids, kept = _narrow(table[row], one)
            probs[row, torch.from_numpy(ids)] = torch.from_numpy(kept).to(probs)
    return probs


def draw(scores: Tensor, params: Sequence[SamplingParams], uniforms: FloatArray) -> IntArray:
    """One token from each row's law by inverting its CDF in vocabulary order, int64 [n].

    The law is `shape_probs(scores, params)`; `uniforms` float64 [n] in [0, 1).
    """
    tokens = np.empty(len(params), np.int64)
    open_rows = [row for row, one in enumerate(params) if is_open(one)]
    for rows, weights in _softmax_weights(scores, params, open_rows):
        tokens[rows] = invert_cdf(weights, torch.from_numpy(uniforms[rows])).cpu().numpy()
    if len(open_rows) == len(params):
        return tokens
    table = _on_host(scores)
    for row, one in enumerate(params):
        if not is_open(one):
            ids, kept = _narrow(table[row], one)
            ends = np.cumsum(kept)
            tokens[row] = ids[np.searchsorted(ends, uniforms[row] * ends[-1], side="right")]
    return tokens


def argmax(scores: Tensor) -> tuple[IntArray, ScoreArray]:
    """Likeliest token of each row, ties to the lowest id, and its score (NaN where a row has one).

    `scores`: float32 or bfloat16 [n, vocab]. Returns int64 [n] and float32 [n] on the host.
    """
    if scores.device.type != "cpu":
        peaks, tokens = scores.max(-1)
        return tokens.cpu().numpy(), peaks.float().cpu().numpy()
    if scores.dtype == torch.bfloat16:
        return _argmax_by_bits(scores)
    table = scores.numpy()  # numpy's argmax is fifteen times faster than torch's on a CPU
    best = table.argmax(-1)
    return best, table[np.arange(len(table)), best]


def _argmax_by_bits(scores: Tensor) -> tuple[IntArray, ScoreArray]:
    """`argmax` of bfloat16 [n, vocab] without a float32 copy, which costs five times as much.

    Read as int16, positive numbers are ordered as they are and lie above all negative ones; NaNs
    lie above infinity, or, with a sign, above minus infinity among the unsigned.
    """
    bits = scores.view(torch.int16).numpy()
    best = bits.argmax(-1)
    peaks = bits[np.arange(len(bits)), best].astype(np.int32)
    values: ScoreArray = (peaks << 16).view(np.float32)
    values[bits.view(np.uint16).max(-1, initial=0) > _MINUS_INFINITY] = np.nan
    for row in np.flatnonzero(peaks <= 0):  # below zero the order is the other way round
        own = scores[row].float().numpy()
        best[row] = own.argmax()
        values[row] = own[best[row]]
    return best, values


def truncate(scores: ScoreArray, params: SamplingParams) -> tuple[IntArray, FloatArray]:
    """Tokens that survive top_k, top_p, min_p, in vocabulary order, and their probabilities.

    `scores`: float32 [vocab] of one row, highest finite.
    """
    ids, depths, total = _candidates(scores, params)
    weights = np.exp(depths)
    if params.top_p < 1:
        whole = float(weights.sum()) if total is None else total
        # Tokens that hold less than half of 1 - top_p in all: the nucleus cannot need them.
        worth = np.flatnonzero(weights >= 0.5 * (1 - params.top_p) * whole / len(weights))
        ids, depths, weights = ids[worth], depths[worth], weights[worth]
        inside = _nucleus(depths, weights, params.top_p * whole)
        ids, weights = ids[inside], weights[inside]
    likely = weights >= max(params.min_p, _NEGLIGIBLE)
    ids, weights = ids[likely], weights[likely]
    return ids, weights / weights.sum()


def _candidates(
    scores: ScoreArray, params: SamplingParams
) -> tuple[IntArray, FloatArray, float | None]:
    """Tokens that may survive: ids ascending, their log-weights, and the total weight of the law.

    Log-weights are (score - highest) / temperature. Candidates lie above a floor that is provably
    below the cut. The total is None where it is the candidates' own.
    """
    highest, heat, vocab = scores.max(), _heat(params), len(scores)
    ids = np.flatnonzero(scores >= _floor(scores, params, float(highest)))
    if params.top_p < 1 and not params.top_k and len(ids) > vocab // 8:
        # A nearly flat law: weigh everything in float32, then drop what holds less than 1 - top_p
        # in all, as the nucleus cannot need it.
        shallow = np.maximum((scores - highest) * np.float32(1 / heat), np.float32(_LOWEST))
        weights = np.exp(shallow)
        ids = np.flatnonzero(weights >= (1 - params.top_p) / vocab)
        return ids, shallow[ids].astype(np.float64), float(weights.sum(dtype=np.float64))
    if params.top_k and len(ids) > params.top_k:
        ids = np.sort(ids[np.argsort(-scores[ids], kind="stable")[: params.top_k]])
    return ids, (scores[ids].astype(np.float64) - highest) / heat, None


def _nucleus(
    depths: NDArray[np.floating], weights: NDArray[np.floating], wanted: float
) -> IntArray:
    """Indices, ascending, of the smallest set of likeliest tokens whose weight reaches `wanted`.

    Of many, a histogram over log-weight finds the bin where the mass is reached; only that bin is
    sorted.
    """
    if len(depths) <= _BINS:
        order = np.argsort(-depths, kind="stable")
        heavy = weights[order]
        return np.sort(order[heavy.cumsum() - heavy < wanted])
    width = max(1e-6, -float(depths.min()) / (_BINS - 1))
    bins = (depths * (-1 / width)).astype(np.int64)
    ends = np.cumsum(np.bincount(bins, weights))
    edge = min(int(np.searchsorted(ends, wanted)), len(ends) - 1)
    members = np.flatnonzero(bins == edge)
    members = members[np.argsort(-depths[members], kind="stable")]
    before = np.cumsum(weights[members]) - weights[members] + (ends[edge - 1] if edge else 0.0)
    keep = bins < edge
    keep[members[before < wanted]] = True
    return np.flatnonzero(keep)


def _floor(scores: ScoreArray, params: SamplingParams, highest: float) -> np.float32:
    """A score below which no token matters, as high as it is cheap to know."""
    if params.top_k:
        return max(_kth_lower_bound(scores, params.top_k), _FINITE)
    share = params.min_p if params.top_p == 1 else _DROPPED / len(scores)
    floor = np.float32(highest + _heat(params) * math.log(share))
    return max(np.nextafter(floor, np.float32(-np.inf)), _FINITE)


def _kth_lower_bound(scores: ScoreArray, k: int) -> np.float32:
    """At most the k-th highest score: the k-th highest of block maxima, as k blocks reach it."""
    block = min(_BLOCK, len(scores) // k)
    if block < 1:
        return np.float32(-np.inf)
    count = len(scores) // block
    peaks = scores[: count * block].reshape(block, count).max(0)  # strided blocks: vectorized
    bound: np.float32 = np.partition(peaks, count - k)[count - k]
    return bound


def _narrow(scores: ScoreArray, params: SamplingParams) -> tuple[IntArray, FloatArray]:
    if params.greedy:
        return np.array([scores.argmax()]), np.ones(1)
    return truncate(scores, params)


def _heat(params: SamplingParams) -> float:
    return max(params.temperature, _COLDEST)


def _softmax_weights(
    scores: Tensor, params: Sequence[SamplingParams], rows: list[int]
) -> Iterator[tuple[list[int], Tensor]]:
    """exp((score - highest) / temperature), a few rows at a time; negligible weights are zero."""
    step = max(1, _CHUNK // scores.shape[1])
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        run = part[-1] - part[0] == len(part) - 1
        own = scores[part[0] : part[-1] + 1] if run else scores[part]
        heat = torch.tensor([1 / _heat(params[row]) for row in part], dtype=torch.float32)
        cooled = own - own.amax(-1, keepdim=True)
        cooled.mul_(heat.to(scores.device).unsqueeze(-1)).clamp_(min=_LOWEST).exp_()
        yield part, F.threshold(cooled, _NEGLIGIBLE, 0.0, inplace=True)


def _totals(weights: Tensor) -> Tensor:
    """Row sums, float64 [n].

    Blocks of fixed size keep the order of additions, and so the last bit, the same in any batch.
    """
    vocab = weights.shape[1]
    body = vocab - vocab % _BLOCK
    blocks = weights[:, :body].view(len(weights), -1, _BLOCK).sum(-1).double().sum(-1)
    tail: Tensor = weights[:, body:].double().sum(-1)
    return blocks + tail


def _on_host(scores: Tensor) -> ScoreArray:
    table: ScoreArray = scores.cpu().numpy()
    return table
