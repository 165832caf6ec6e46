"""The logits -> probs path against a plain float64 reference that sorts everything."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sampling.accept import invert_cdf
from slipstream.sampling.few import few, left_over, mass_at, pick
from slipstream.sampling.probs import argmax, draw, is_open, shape_probs, to_probs
from slipstream.sampling.state import RowSampler
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import SamplingParams


def reference(scores: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row, float64, by the book: sort, cut, renormalize."""
    probs = np.zeros(len(scores))
    order = np.argsort(-scores.astype(np.float64), kind="stable")
    if params.greedy:
        probs[order[0]] = 1.0
        return probs
    weights = np.exp((scores[order].astype(np.float64) - scores[order[0]]) / params.temperature)
    if params.top_k:
        weights[params.top_k :] = 0
    weights /= weights.sum()
    if params.top_p < 1:
        weights[np.cumsum(weights) - weights >= params.top_p] = 0
    weights[weights < params.min_p * weights[0]] = 0
    probs[order] = weights / weights.sum()
    return probs


def _scores(seed: int, rows: int, vocab: int, *, scale: float = 3.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(size=(rows, vocab)).astype(np.float32) * scale)


MANY = [
    SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
    for t in (0.2, 1.0, 3.0)
    for k in (0, 1, 5, 400)
    for p in (1.0, 0.9, 0.3)
    for m in (0.0, 0.05)
] + [SamplingParams()]


@pytest.mark.parametrize("vocab", [1, 4, 50, 1000, 5003])
def test_every_combination_matches_the_reference(vocab: int) -> None:
    scores = _scores(vocab, len(MANY), vocab)
    got = shape_probs(scores, MANY)
    for row, params in enumerate(MANY):
        expected = reference(scores[row].numpy(), params)
        assert (got[row].numpy()[expected > 1e-33] > 0).all(), params
        assert (got[row].numpy()[expected < 1e-36] == 0).all(), params
        np.testing.assert_allclose(got[row], expected, atol=3e-6, err_msg=str(params))


@given(
    seed=st.integers(0, 10**6),
    vocab=st.integers(1, 80),
    temperature=st.sampled_from([0.0, 1e-3, 0.2, 0.7, 1.0, 2.0, 50.0]),
    top_k=st.integers(0, 90),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
    min_p=st.sampled_from([0.0, 1e-3, 0.1, 0.9]),
    ties=st.booleans(),
    banned=st.floats(0, 0.9),
)
@settings(max_examples=300, deadline=None)
def test_random_laws_match_the_reference(
    seed: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    ties: bool,
    banned: float,
) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=vocab).astype(np.float32) * 3
    if ties:
        scores = np.round(scores)
    out = rng.random(vocab) < banned
    out[rng.integers(vocab)] = False
    scores[out] = -np.inf
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = shape_probs(torch.from_numpy(scores)[None], [params])[0].numpy()
    expected = reference(scores, params)
    close = np.allclose(got, expected, atol=3e-6)
    # A cut that falls within rounding of a token's edge may go either way.
    assert close or _on_the_edge(scores, params)
    assert got.sum() == pytest.approx(1, abs=1e-5)
    assert (got[out] == 0).all()


def _on_the_edge(scores: np.ndarray, params: SamplingParams) -> bool:
    nudged = [
        reference(scores, replace(params, top_p=min(1.0, params.top_p * (1 + e)), min_p=m))
        for e in (-1e-6, 1e-6)
        for m in (params.min_p * (1 - 1e-6), params.min_p * (1 + 1e-6))
    ]
    return any(not np.allclose(nudged[0], other, atol=3e-6) for other in nudged[1:])


@pytest.mark.parametrize("scale", [0.0, 0.01, 0.5, 3.0, 30.0])
@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_top_p_is_exact_from_flat_to_peaked_at_full_width(scale: float, temperature: float) -> None:
    scores = _scores(7, 2, 49152, scale=scale)
    params = SamplingParams(temperature=temperature, top_p=0.9)
    got = shape_probs(scores, [params, params]).numpy()
    for row in range(2):
        expected = reference(scores[row].numpy(), params)
        assert abs(int((got[row] > 0).sum()) - int((expected > 0).sum())) <= (scale < 0.1)
        np.testing.assert_allclose(got[row], expected, atol=1e-6)


def test_draw_samples_the_law_it_says() -> None:
    params = [p for p in MANY for _ in range(20)]
    scores = _scores(3, len(params), 1000)
    uniforms = np.random.default_rng(5).random(len(params))
    written_out = invert_cdf(shape_probs(scores, params), torch.from_numpy(uniforms))
    drawn = draw(scores, params, uniforms)
    assert (drawn == written_out.numpy()).mean() > 0.999  # rounding may move an edge
    probs = shape_probs(scores, params).numpy()
    assert (probs[np.arange(len(params)), drawn] > 0).all()


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_a_row_is_bitwise_the_same_in_any_batch(rows: int) -> None:
    scores = _scores(11, rows, 49152)
    params = [MANY[(5 * row) % len(MANY)] for row in range(rows)]
    together = shape_probs(scores, params)
    for row in {0, rows // 2, rows - 1}:
        alone = shape_probs(scores[row : row + 1].clone(), params[row : row + 1])
        assert torch.equal(alone[0], together[row])


def test_greedy_and_top_k_ties_go_to_the_lowest_id() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, 2.0, 1.0]])
    assert shape_probs(scores, [SamplingParams()]).tolist() == [[0, 1, 0, 0, 0]]
    two = shape_probs(scores, [SamplingParams(temperature=1.0, top_k=2)])
    assert two.tolist() == [[0, 0.5, 0.5, 0, 0]]
    half = shape_probs(torch.zeros(1, 4), [SamplingParams(temperature=1.0, top_p=0.5)])
    assert half.tolist() == [[0.5, 0.5, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-8])
def test_a_vanishing_temperature_is_the_argmax_not_nan(temperature: float) -> None:
    scores = _scores(2, 3, 64)
    for params in (
        SamplingParams(temperature=temperature),
        SamplingParams(temperature=temperature, top_p=0.9),
        SamplingParams(temperature=temperature, top_k=3, min_p=0.1),
    ):
        probs = shape_probs(scores, [params] * 3)
        assert torch.equal(probs, shape_probs(scores, [SamplingParams()] * 3))


def test_huge_logits_and_banned_tokens() -> None:
    scores = torch.tensor([[3e38, -3e38, float("-inf"), 3e38]])
    probs = shape_probs(scores, [SamplingParams(temperature=1.0)])
    assert probs.tolist() == [[0.5, 0, 0, 0.5]]


def test_argmax_shows_nan_and_infinity() -> None:
    scores = torch.tensor([[1.0, float("nan")], [float("inf"), 0.0], [float("-inf")] * 2])
    assert not np.isfinite(argmax(scores)[1]).any()


def test_to_probs_reads_bf16_and_leaves_logits_alone() -> None:
    vocabulary = Vocabulary(16, (0,))
    params = SamplingParams(temperature=1.0, logit_bias={3: 5.0})
    sampler = RowSampler(params, vocabulary, [1, 2])
    logits = _scores(1, 2, 16)
    before = logits.clone()
    got = to_probs(logits, [sampler] * 2, [[], [4]])
    assert torch.equal(logits, before)
    shifted = before.clone()
    shifted[:, 3] += 5.0
    torch.testing.assert_close(got, torch.softmax(shifted, -1))
    assert to_probs(logits.bfloat16(), [sampler] * 2, [[], [4]]).dtype == torch.float32


@pytest.mark.parametrize("kind", ["mixed", "negative", "zeros", "flat"])
def test_argmax_of_bfloat16_is_that_of_its_floats(kind: str) -> None:
    rng = np.random.default_rng(1)
    scores = torch.from_numpy(rng.normal(size=(40, 300)).astype(np.float32)).bfloat16()
    if kind == "negative":
        scores = -scores.abs() - 1
    elif kind == "zeros":
        scores = -(scores.abs() * (scores > 0))  # zeros of either sign at the top
    elif kind == "flat":
        scores = scores.round()
    scores[3, 7], scores[4, :] = float("-inf"), float("-inf")
    tokens, peaks = argmax(scores)
    expected, tops = argmax(scores.float())
    assert tokens.tolist() == expected.tolist()
    assert peaks.tolist() == tops.tolist()


@pytest.mark.parametrize("sign", [1, -1])
def test_argmax_of_bfloat16_says_where_a_nan_or_infinity_is(sign: int) -> None:
    scores = torch.ones(4, 50, dtype=torch.bfloat16)
    scores.view(torch.int16)[1, 9] = 0x7FC0 if sign > 0 else -0x40  # quiet NaNs
    scores[2, 9] = math.inf
    assert scores[1, 9].isnan()
    assert np.isfinite(argmax(scores)[1]).tolist() == [True, False, False, True]


@settings(deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([p for p in MANY if not is_open(p)]))
def test_a_law_of_few_tokens_is_the_same_law(seed: int, params: SamplingParams) -> None:
    scores = _scores(seed, 2, 700)
    scores[1] = scores[1].round()  # ties
    whole = shape_probs(scores, [params, params])
    for row in range(2):
        ids, probs = few(scores[row].numpy(), params)
        assert probs.dtype == np.float32
        assert ids.tolist() == whole[row].nonzero().flatten().tolist()
        assert probs.tolist() == whole[row, ids].tolist()
        # Not a quarter: tied tokens have an edge there, and sums of blocks round to either side.
        for uniform in (0.0, 0.2371, 0.7083):
            (dense,) = invert_cdf(
                whole[row : row + 1], torch.tensor([uniform], dtype=torch.float64)
            ).tolist()
            assert pick(ids, probs, uniform) == dense
        assert whole[row, pick(ids, probs, 1 - 2.0**-53)] > 0


def test_mass_at_adds_what_repeats_and_knows_nothing_else() -> None:
    ids, others = np.array([2, 5, 9]), np.array([9, 0, 5, 0, 9, 11])
    found = mass_at(ids, others, np.array([0.25, 0.1, 0.5, 0.0, 0.125, 0.025]))
    assert found.tolist() == [0.0, 0.5, 0.375]


def test_nothing_left_over_is_the_target_itself() -> None:
    target = np.array([0.25, 0.75])
    assert left_over(target, np.array([0.5, 0.25])).tolist() == [0.0, 0.5]
    assert left_over(target, target).tolist() == target.tolist()
