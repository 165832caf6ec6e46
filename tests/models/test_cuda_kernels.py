"""The Triton kernels of the decoder against float64 references, through Triton's interpreter."""

import tests.interpreter  # noqa: F401, I001 - first


import numpy as np
import pytest
import torch


from slipstream.models.cuda.attention import Tiles, attend, scratch_for
from slipstream.models.cuda.chain import joined
from slipstream.models.cuda.linear import Normed, Tile, linear, linear_gated, linear_norm
from slipstream.models.cuda.norm import add_norm, rms_norm, silu_gate
from slipstream.models.cuda.rope import rotate_and_store
from slipstream.models.layers import Norm


def close(found, expected, tolerance):
    found, expected = found.double(), expected.double()
    assert torch.isfinite(found).all()
    assert (found - expected).norm() <= tolerance * expected.norm()


def randn(*shape, dtype, seed=0):
    values = np.random.default_rng(seed).normal(0, 1, shape)
    return torch.from_numpy(values).to(dtype)


def rms(x):
    return (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.mark.parametrize("rows", [1, 5, 16, 20])
@pytest.mark.parametrize(("columns", "inner"), [(48, 96), (64, 128), (80, 72)])
@pytest.mark.parametrize("dressed", [False, True])
def test_linear(rows, columns, inner, dressed):
    x = randn(rows, inner, dtype=torch.float32, seed=1) * 3
    weight = randn(columns, inner, dtype=torch.float32, seed=2)
    bias = randn(columns, dtype=torch.float32, seed=3) if dressed else None
    residual = randn(rows, columns, dtype=torch.float32, seed=4) if dressed else None
    found = linear(x, weight, bias, residual=residual, tile=Tile(16, 32, 4, 2))
    expected = x.double() @ weight.double().t()
    if dressed:
        expected = expected + bias.double() + residual.double()
    close(found, expected, 1e-5)


@pytest.mark.parametrize("rows", [16, 33, 65, 100])
@pytest.mark.parametrize("inner", [64, 72, 128, 256])
def test_tiles_chosen_by_size_serve_every_row(rows, inner):
    x, weight = randn(rows, inner, dtype=torch.float32), randn(80, inner, dtype=torch.float32)
    expected = x.double() @ weight.double().t()
    close(linear(x, weight), expected, 1e-5)
    gate, up = expected.chunk(2, -1)
    found = linear_gated(Normed(x, x, None), weight, None, eps=1e-5)
    close(found, torch.nn.functional.silu(gate) * up, 1e-5)


def test_a_product_made_ready_for_the_next_norm_without_a_stream_before_it():
    x, weight = randn(3, 64, dtype=torch.float32), randn(32, 64, dtype=torch.float32, seed=1)
    norm = randn(32, dtype=torch.float32, seed=2)
    found = linear_norm(x, weight, None, None, norm)
    expected = x.double() @ weight.double().t()
    close(found.x, expected, 1e-5)
    close(found.scaled, expected * norm.double(), 1e-5)
    close(found.squares.sum(1), expected.pow(2).sum(1), 1e-5)


@pytest.mark.parametrize("size", [32, 72])
def test_a_token_and_a_state_are_normed_side_by_side(size):
    embedding, states = randn(9, size, dtype=torch.float32), randn(4, size, dtype=torch.float32)
    ours, theirs = (randn(size, dtype=torch.float32, seed=s) for s in (1, 2))
    tokens = torch.tensor([8, 0, 3, 3])
    found = joined(
        tokens, embedding, states, Norm(ours, ours, 1e-5), state_norm=Norm(theirs, theirs, 1e-5)
    )
    picked = embedding[tokens]
    expected = (picked / rms(picked) * ours.double(), states / rms(states) * theirs.double())
    close(found, torch.cat(expected, 1), 1e-6)


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_a_norm_split_over_two_products_is_the_norm(rows):
    """linear_norm writes the stream and what is due; the gate and the rotation settle it."""
    x, weight = randn(rows, 64, dtype=torch.float32), randn(80, 64, dtype=torch.float32, seed=1)
    residual, norm = randn(rows, 80, dtype=torch.float32, seed=2), randn(80, dtype=torch.float32)
    stream = linear_norm(x, weight, None, residual, norm)
    expected = x.double() @ weight.double().t() + residual.double()
    close(stream.x, expected, 1e-6)
    normed = expected / rms(expected) * norm.double()
    close(stream.scaled / rms(expected), normed, 1e-6)
    gate_up = randn(96, 80, dtype=torch.float32, seed=3)
    bias = randn(96, dtype=torch.float32, seed=4)
    both = normed @ gate_up.double().t() + bias.double()
    gate, up = both.chunk(2, -1)
    found = linear_gated(stream, gate_up, bias, eps=1e-5, tile=Tile(16, 32, 4, 2))
    close(found, torch.nn.functional.silu(gate) * up, 1e-5)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [False, True])
def test_rotation_and_the_cache_write(late, normed, rotated):
    rows, queries, kv, dim, hidden = 5, 6, 2, 16, 80
    heads = queries + 2 * kv
    x = randn(rows, hidden, dtype=torch.float32)
    residual = torch.zeros(rows, hidden)
    eye, ones = torch.eye(hidden), torch.ones(hidden)
    stream = linear_norm(x, eye, None, residual, ones) if late else None
    weight, bias = (
        randn(heads * dim, hidden, dtype=torch.float32),
        randn(heads * dim, dtype=x.dtype),
    )
    normal = x.double() / rms(x) if late else x.double()
    expected = normal @ weight.double().t() + (bias.double() if late else 0)
    expected = expected.view(rows, heads, dim).clone()
    norms = randn(queries + kv, dim, dtype=torch.float32, seed=3) if normed else None
    if normed:
        turned = expected[:, : queries + kv]
        expected[:, : queries + kv] = turned / rms(turned) * norms.double()
    angles = torch.rand(40, dim // 2, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([3, 4, 39, 0, 7], dtype=torch.int32)
    if rotated:
        low, high = expected[:, : queries + kv].chunk(2, -1)
        c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
        turned = torch.cat((low * c - high * s, high * c + low * s), -1)
        expected[:, : queries + kv] = turned
    qkv = x @ weight.t()
    slots = torch.tensor([9, 0, 4, -1, 2], dtype=torch.int32)
    storage = torch.zeros(10, 2 * kv, dim)
    tables = torch.cat((cos, cos), -1).float(), torch.cat((-sin, sin), -1).float()
    rotate_and_store(
        qkv,
        tables if rotated else None,
        norms=norms,
        eps=1e-5,
        positions=positions,
        slots=slots,
        storage=storage,
        kv=kv,
        source=stream,
        bias=bias if late else None,
    )
    close(qkv.view(rows, heads, dim)[:, :queries], expected[:, :queries], 1e-5)
    kept = torch.zeros_like(storage).double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            kept[slot] = expected[token, queries:]
    close(storage, kept, 1e-5)


def test_norm():
    x, delta = randn(7, 72, dtype=torch.float32), randn(7, 72, dtype=torch.float32, seed=2)
    weight = randn(72, dtype=torch.float32, seed=1)
    close(rms_norm(x, weight, 1e-5), x.double() / rms(x) * weight, 1e-6)
    total = x.double() + delta
    found = add_norm(x, delta, weight, 1e-5)
    close(found.x, total, 1e-6)
    close(found.scaled, total / rms(total) * weight, 1e-6)
    gate, up = x.double().chunk(2, -1)
    close(silu_gate(x), torch.nn.functional.silu(gate) * up, 1e-6)


def reference(qkv, storage, rows, *, kv, page_size, causal, window, sinks):
    """Attention in float64, query by query."""
    dim = storage.shape[2]
    queries = qkv.shape[1] // dim - 2 * kv
    out = torch.zeros(len(qkv), queries, dim, dtype=torch.float64)
    token = 0
    for start, length, pages in rows:
        for j in range(length):
            position = start + j
            seen = range(start + length)
            if causal:
                seen = [t for t in seen if t <= position]
            if window is not None:
                seen = [t for t in seen if t > position - window]
            slots = [pages[t // page_size] * page_size + t % page_size for t in seen]
            for head in range(queries):
                q = qkv[token, head * dim : (head + 1) * dim].double()
                keys = storage[slots, head % kv].double()
                values = storage[slots, kv + head % kv].double()
                scores = keys @ q / dim**0.5
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: len(slots)]
                out[token, head] = weights @ values
            token += 1
    return out.reshape(len(qkv), -1)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("splits", [1, 2, 8, 16])
@pytest.mark.parametrize("kind", ["verify", "prompt", "window", "sinks", "block", "sliding block"])
def test_attention_over_ragged_batches(seed, splits, kind):
    rng = np.random.default_rng(seed)
    kv, group = [(1, 4), (2, 3), (2, 1), (3, 3)][seed % 4]
    dim, page_size = 32, [4, 64][seed % 2]
    longest = 23 if kind == "prompt" else 8
    rows, free = [], iter(rng.permutation(60).tolist())
    for _ in range(3):
        start, length = int(rng.integers(0, 70)), int(rng.integers(1, longest + 1))
        rows.append((start, length, [next(free) for _ in range(-(-(start + length) // page_size))]))
    tokens = sum(length for _, length, _ in rows)
    heads = kv * group
    qkv = randn(tokens, (heads + 2 * kv) * dim, dtype=torch.float32, seed=seed)
    storage = randn(60 * page_size, 2 * kv, dim, dtype=torch.float32, seed=seed + 1)
    per_tile = longest if kind != "prompt" else 5
    tiles = [(i, f) for i, (_, n, _) in enumerate(rows) for f in range(0, n, per_tile)]
    width = max(len(pages) for _, _, pages in rows)
    table = torch.tensor([p + [0] * (width - len(p)) for _, _, p in rows], dtype=torch.int32)
    lengths = torch.tensor([n for _, n, _ in rows], dtype=torch.int32)

    def ints(values):
        return torch.tensor(values, dtype=torch.int32)

    layout = Tiles(
        row=ints([i for i, _ in tiles]),
        first=ints([f for _, f in tiles]),
        start=ints([s for s, _, _ in rows]),
        length=lengths,
        token=(lengths.cumsum(0) - lengths).int(),
        pages=table,
        tokens=per_tile,
        splits=splits,
    )
    scratch = scratch_for(
        len(tiles),
        kv=kv,
        dim=dim,
        group=group,
        tokens=per_tile,
        splits=splits,
        device=torch.device("cpu"),
    )
    scratch.out.fill_(float("nan"))
    options = {
        "causal": "block" not in kind,
        "window": 13 if kind in ("window", "sliding block") else None,
        "sinks": randn(heads, dtype=torch.float32, seed=9) if kind == "sinks" else None,
    }
    out = attend(qkv, storage, layout, scratch=scratch, page_size=page_size, **options)
    assert not scratch.tickets.any()  # ready for the next launch
    expected = reference(qkv, storage, rows, kv=kv, page_size=page_size, **options)
    close(out, expected, 1e-5)
