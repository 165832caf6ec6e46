"""Accept rule, residual and CDF inversion as pure functions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.sampling.accept import accept_probs, accepts, invert_cdf, residual


def _laws(seed: int, rows: int, vocab: int, *, zeros: float = 0.3) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    weights = rng.random((rows, vocab)) * (rng.random((rows, vocab)) > zeros)
    weights[np.arange(rows), rng.integers(vocab, size=rows)] += 0.1
    return torch.from_numpy(weights / weights.sum(-1, keepdims=True))


@given(st.integers(0, 10**6), st.integers(2, 40))
@settings(max_examples=50, deadline=None)
def test_accept_and_residual_make_up_the_target(seed: int, vocab: int) -> None:
    draft, target = _laws(seed, 1, vocab)[0], _laws(seed + 1, 1, vocab)[0]
    tokens = torch.arange(vocab)
    kept = draft * accept_probs(draft.expand(vocab, -1), target.expand(vocab, -1), tokens)
    law = kept + (1 - kept.sum()) * residual(draft, target)
    torch.testing.assert_close(law, target, atol=1e-14, rtol=0)


def test_accept_probs_by_hand() -> None:
    draft = torch.tensor([0.5, 0.5, 0.0, 0.0])
    target = torch.tensor([0.25, 0.0, 0.75, 0.0])
    kept = accept_probs(draft.expand(4, 4), target.expand(4, 4), torch.arange(4))
    assert kept.tolist() == [0.5, 0.0, 1.0, 0.0]


def test_accepts_is_accept_probs_without_the_division() -> None:
    draft, target = _laws(3, 4000, 4), _laws(4, 4000, 4)
    tokens = torch.arange(4000) % 4
    at = torch.arange(4000)
    drawable = draft[at, tokens] > 0
    uniforms = torch.from_numpy(np.random.default_rng(0).random(4000))
    expected = uniforms < accept_probs(draft, target, tokens)
    got = accepts(draft[at, tokens], target[at, tokens], uniforms)
    assert torch.equal(got[drawable], expected[drawable])


def test_a_token_the_target_forbids_is_never_kept() -> None:
    zero = torch.zeros(1)
    assert not accepts(torch.ones(1), zero, torch.zeros(1, dtype=torch.float64))
    assert not accepts(zero, zero, torch.zeros(1, dtype=torch.float64))


def test_residual_of_equal_laws_is_the_target() -> None:
    law = _laws(0, 3, 8)
    assert torch.equal(residual(law, law.clone()), law)


def test_residual_leaves_its_arguments_alone() -> None:
    draft, target = _laws(0, 3, 8), _laws(1, 3, 8)
    before = draft.clone(), target.clone()
    residual(draft, target)
    assert torch.equal(draft, before[0])
    assert torch.equal(target, before[1])


@pytest.mark.parametrize("vocab", [1, 2, 7, 255, 256, 257, 1000, 5120])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_invert_cdf_against_the_running_sum(vocab: int, dtype: torch.dtype) -> None:
    probs = _laws(vocab, 200, vocab).to(dtype)
    uniforms = np.random.default_rng(1).random(200)
    got = invert_cdf(probs, torch.from_numpy(uniforms))
    ends = probs.double().cumsum(-1).numpy()
    for row, token in enumerate(got.tolist()):
        wanted = uniforms[row] * ends[row, -1]
        slack = 1e-6 if dtype == torch.float32 else 1e-14
        below = ends[row, token - 1] if token else 0.0
        assert below - slack <= wanted <= ends[row, token] + slack
        assert probs[row, token] > 0


@pytest.mark.parametrize("vocab", [4, 300, 1024])
def test_invert_cdf_never_picks_a_token_without_mass(vocab: int) -> None:
    """Uniforms that sit on the boundaries, where rounding would show."""
    rng = np.random.default_rng(vocab)
    probs = torch.zeros(500, vocab)
    for row in range(500):
        some = rng.choice(vocab, 2)
        probs[row, some] = torch.tensor(rng.random(2), dtype=torch.float32) + 1e-3
    edges = probs.double().cumsum(-1) / probs.double().sum(-1, keepdim=True)
    for uniforms in (
        torch.zeros(500, dtype=torch.float64),
        torch.full((500,), 1 - 2.0**-53, dtype=torch.float64),
        edges[:, vocab // 2].clamp(max=1 - 2.0**-53),
    ):
        tokens = invert_cdf(probs, uniforms)
        assert (probs.gather(-1, tokens.unsqueeze(-1)) > 0).all()


def test_invert_cdf_is_scale_free_and_in_vocabulary_order() -> None:
    probs = torch.tensor([[1.0, 0.0, 2.0, 1.0]]).expand(4, 4)
    uniforms = torch.tensor([0.0, 0.25, 0.7499, 0.75], dtype=torch.float64)
    assert invert_cdf(probs, uniforms).tolist() == [0, 2, 2, 3]
