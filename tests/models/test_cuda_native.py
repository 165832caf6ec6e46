"""The kernels in CUDA C++: which shapes they take, and, on a GPU, what they compute."""

import sys
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    import tests.interpreter  # noqa: F401 - before any kernel

from torch.nn import functional as F

from slipstream.models.cuda.attention import Tiles, attend, scratch_for
from slipstream.models.cuda.native import available, can_compile
from slipstream.models.cuda.norm import add_norm
from slipstream.models.cuda.verify import fills, fits, serves
from slipstream.models.cuda.wide import Cut, choose, cut_for, wgmma, wide

H200 = 132
"""Multiprocessors."""
CUDA = torch.device("cuda", 0)
needs_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and available(CUDA)), reason="no CUDA device of capability 9.0"
)


@pytest.mark.parametrize(
    ("columns", "inner", "gated", "cut"),
    [
        (24576, 4096, True, Cut(192)),  # the products of a dense 8B
        (6144, 4096, False, Cut(96, 2)),
        (4096, 4096, False, Cut(64, 2)),
        (4096, 12288, False, Cut(64, 2)),
        (4096, 4096, True, None),  # a gate needs whole sums, and whole it is too small
        (151936, 4096, False, None),  # a head: many tiles for every program
        (1536, 576, False, None),  # a 135M's
        (4096, 4100, False, None),  # not whole tiles
    ],
)
def test_a_weight_is_cut_into_one_program_a_multiprocessor(columns, inner, gated, cut):
    assert choose(columns, inner, gated=gated, at_once=H200) == cut


def test_every_cut_covers_the_weight_and_fills_the_chip():
    for columns in range(512, 40000, 512):
        for inner in (1024, 2560, 4096, 5120, 12288, 17408):
            cut = choose(columns, inner, gated=False, at_once=H200)
            if cut is not None:
                assert columns % cut.tile == 0
                assert cut.tile % (8 * cut.split) == 0
                assert inner % (64 * cut.split) == 0
                assert 118 < columns // cut.tile * cut.split <= H200


def test_the_multiplication_names_every_sum_once():
    text = wgmma(48)
    assert "m64n48k16" in text
    assert [f'"+f"(d[{i}])' in text for i in range(25)] == [True] * 24 + [False]
    assert "%24, %25, p" in text
    assert "%26, 0" in text


def test_a_product_that_does_not_fit_is_refused():
    x, weight = torch.zeros(20, 128), torch.zeros(96, 128)
    for cut in (Cut(64), Cut(48, 4)):
        with pytest.raises(ValueError, match="cannot be cut"):
            wide(x, weight, cut)


@pytest.mark.parametrize(
    ("tokens", "group", "page_size", "fitting"),
    [(8, 4, 64, True), (1, 4, 64, True), (9, 4, 64, False), (4, 5, 64, False), (8, 4, 8, False)],
)
def test_tiles_that_verify_attention_takes(tokens, group, page_size, fitting):
    assert fits(tokens, group, page_size) == fitting


def test_programs_that_fill_the_chip():
    assert [n for n in (64, 118, 119, 128, 132, 133, 160, 256) if fills(n, H200)] == [
        119, 128, 132, 256,
    ]  # fmt: skip


def test_without_a_compiler_the_other_kernels_serve(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda", None)
    assert not can_compile.__wrapped__()


def test_elsewhere_the_other_kernels_serve():
    x, weight = torch.zeros(32, 4096, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    assert cut_for(x, weight.expand(6144, 4096)) is None
    assert not serves(x, torch.zeros(64, 16, 128), tiles_of([(0, 8)], [[0]], "cpu"), 64)


def tiles_of(rows, pages, device):
    lengths = torch.tensor([n for _, n in rows], dtype=torch.int32)

    def ints(values):
        return torch.as_tensor(values, dtype=torch.int32).to(device)

    return Tiles(
        row=ints(range(len(rows))),
        first=ints([0] * len(rows)),
        start=ints([s for s, _ in rows]),
        length=ints(lengths),
        token=ints(lengths.cumsum(0) - lengths),
        pages=ints(pages),
        tokens=8,
        splits=2,
    )


@needs_hopper
@pytest.mark.parametrize("rows", [17, 64, 65, 128])
@pytest.mark.parametrize("columns", [4096, 6144, 24576])
def test_products_are_those_of_float64(rows, columns):
    gated = columns == 24576
    x = torch.randn(rows, 4096, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(columns, 4096, device=CUDA, dtype=torch.bfloat16) / 64
    cut = cut_for(x, weight, gated=gated)
    assert cut is not None
    expected = x.double() @ weight.double().t()
    if gated:
        gate, up = expected.chunk(2, 1)
        expected = F.silu(gate) * up
    found = wide(x, weight, cut, gated=gated).double()
    assert (found - expected).norm() < 3e-3 * expected.norm()


@needs_hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("longest", [40, 700])
def test_verify_attention_is_that_of_float64(causal, longest):
    torch.manual_seed(longest)
    kv, group, dim, page = 8, 4, 128, 64
    lengths = [8, 1, 5, 8, 0, 3, 8, 8, 2, 8, 7, 8, 8, 4, 8, 8]
    rows = [(int(torch.randint(0, longest, ())), n) for n in lengths]
    width = longest // page + 2
    pages = torch.randperm(16 * width).view(16, width)
    storage = torch.randn(16 * width * page, 2 * kv, dim, device=CUDA, dtype=torch.bfloat16)
    qkv = torch.randn(sum(lengths), (group + 2) * kv * dim, device=CUDA, dtype=torch.bfloat16)
    tiles = tiles_of(rows, pages, CUDA)
    assert serves(qkv, storage, tiles, page)
    scratch = scratch_for(16, kv=kv, dim=dim, group=group, tokens=8, splits=2, device=CUDA)
    found = attend(qkv, storage, tiles, scratch=scratch, page_size=page, causal=causal)
    token = 0
    for (start, length), table in zip(rows, pages.tolist(), strict=True):
        if not length:
            continue
        slots = [table[t // page] * page + t % page for t in range(start + length)]
        keys, values = storage[slots].double().transpose(0, 1).split(kv)
        queries = qkv[token : token + length, : group * kv * dim].double()
        queries = queries.view(length, group, kv, dim).permute(2, 1, 0, 3)
        scores = queries @ keys[:, None].transpose(2, 3) / dim**0.5
        if causal:
            unseen = torch.ones(length, start + length, device=CUDA).triu(start + 1).bool()
            scores = scores.masked_fill(unseen, -torch.inf)
        expected = (scores.softmax(-1) @ values[:, None]).permute(2, 1, 0, 3).reshape(length, -1)
        own = found[token : token + length].double()
        assert (own - expected).norm() < 5e-3 * expected.norm()
        token += length


@needs_hopper
def test_kernels_that_start_early_read_what_the_one_in_front_wrote():
    """Norms and products in turns: one after another and overlapping, to the last bit."""
    norm = torch.ones(4096, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16) / 64
    first = torch.randn(128, 4096, device=CUDA, dtype=torch.bfloat16)

    def chain(between: Callable[[], object]) -> torch.Tensor:
        stream, delta = first, torch.zeros_like(first)
        for _ in range(24):
            normed = add_norm(stream, delta, norm, 1e-6)
            between()
            stream, delta = normed.x, wide(normed.scaled, weight, Cut(64, 2))
            between()
        return stream

    expected = chain(torch.cuda.synchronize)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(lambda: None)
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)
