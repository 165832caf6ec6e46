"""Kernels of DFlash2 and DSpark against the stock operations, through Triton's interpreter."""

import tests.interpreter  # noqa: F401, I001 - first

import pytest
import torch

from slipstream.models.cuda import walks
from slipstream.models.cuda.mix import mixed
from slipstream.models.dflash2 import bonds
from slipstream.models.layers import Conv, convolved, kernels
from slipstream.models.linear import Linear


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.parametrize("side", [0, 1])
def test_convolutions_along_blocks(taps, side):
    size, group, block, rows = 40, 8, 5, 15
    delta = Linear(randn(2 * taps * size // group, size, seed=1) / 6, None, False)
    conv = Conv(randn(2 * taps, size, seed=2), delta, group)
    source, x, residual = (randn(rows, size, seed=s) for s in (3, 4, 5))
    x[7] = float("nan")  # stays in its block
    expected = convolved(x, kernels(source, conv)[side], block) + residual
    added = source @ delta.weight.t()
    found = mixed(x, added, conv, side=side, block=block, residual=residual)
    assert torch.allclose(found, expected, atol=1e-5, equal_nan=True)
    assert not found[10:].isnan().any()
    bare = mixed(x, added, conv, side=side, block=block)
    assert torch.allclose(bare, expected - residual, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("top", "rank"), [(4, 6), (16, 16)])
def test_the_selector_s_walk(top, rank):
    rows, draft_len, vocab = 3, 5, 50
    anchors = torch.tensor([[7, 0], [49, 0], [0, 0]])[:, 0]  # strided, as a block's anchors are
    before, after = randn(vocab, rank, seed=1), randn(vocab, rank, seed=2)
    projected = randn(rows * draft_len, rank, seed=3)
    unary, ids = randn(rows, draft_len, vocab, seed=4).topk(top, -1)
    found = walks.select(anchors, unary, ids, projected=projected, before=before, after=after)
    for row in range(rows):
        token = anchors[row]
        for i in range(draft_len):
            own, state = ids[row, i], projected[row * draft_len + i]
            scores = unary[row, i] + bonds(before[token], state, after[own])
            token = own[scores.argmax()]
            assert found[row, i] == token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mapped", [False, True])
def test_the_markov_walk(dtype, mapped, monkeypatch):
    monkeypatch.setattr(walks, "PART", 16)
    rows, draft_len, columns, rank, vocab = 3, 4, 50, 20, 120
    ids = torch.arange(columns) * 2 + 1 if mapped else None
    anchors = torch.tensor([[7, 0], [49, 0], [0, 0]])[:, 0]
    first, second = (randn(n, rank, seed=n).to(dtype) for n in (vocab, columns))
    # In bfloat16 many scores are equal, and the first of them wins.
    logits = randn(rows, draft_len, columns, seed=3).round().to(dtype)
    found = walks.markov(anchors, logits, first=first, second=second, ids=ids)
    for row in range(rows):
        token = anchors[row]
        for i in range(draft_len):
            bias = (first[token].float() @ second.float().t()).to(dtype)
            best = (logits[row, i] + bias).argmax()
            token = best if ids is None else ids[best]
            assert found[row, i] == token
