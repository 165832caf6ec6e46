"""Padded forwards in Triton's interpreter: what unpadded ones compute, whatever pads them."""

import tests.interpreter  # noqa: F401, I001 - first

import itertools

import pytest
import torch

from slipstream.models.tiny import tiny_model
from slipstream.target import device, padded
from slipstream.target.batch import Placement
from slipstream.target.device import arrange
from slipstream.target.padded import Shape, paying, sizes
from tests.target.ragged import PAGE, Ragged, noted, targets

torch.set_num_threads(1)
ONE = {"layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL = tiny_model("llama", **ONE)
MODELS = {
    "llama": {"layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1},
    "mistral": {**ONE, "sliding_window": 6},
    "qwen3": {**ONE, "num_key_value_heads": 2},
}


def test_above_256_tokens_a_quarter_at_most_is_padding():
    for most in (1, 16, 17, 64, 200, 2064, 5000):
        found = sizes(most)
        assert found[-1] >= most
        assert found[-1] - most < 64
        assert sorted(set(found)) == list(found)
        for below, size in itertools.pairwise(found):
            assert size <= 4 * below
            assert below < 256 or size - (below + 1) <= 0.25 * size
    assert sizes(0) == ()
    assert sizes(2064) == sizes(2100) != sizes(2200)


def test_large_models_pad_small_batches_only(monkeypatch):
    layer = SMALL.model.layers[0]
    products = (layer.qkv, layer.out, layer.gate_up, layer.down)
    weights = sum(p.weight.numel() for p in products)
    assert paying(SMALL.model, 300) == sizes(300)
    monkeypatch.setitem(padded._WORK, torch.float32, 100 * weights)
    assert paying(SMALL.model, 300) == (16, 64)
    monkeypatch.setitem(padded._WORK, torch.float32, weights)
    assert paying(SMALL.model, 300) == ()


@pytest.mark.parametrize("rows", [1, 5, 64, 300])
@pytest.mark.parametrize("tokens", [16, 64, 320])
def test_every_batch_has_room_for_its_tiles(tokens, rows):
    """The worst: rows of one token more than whole tiles."""
    shape = Shape(tokens, rows, SMALL.config)
    count = min(rows, tokens)
    for length in (1, shape.per_tile + 1):
        lengths = [length] * min(count, tokens // length)
        lengths += [1] * min(count - len(lengths), tokens - sum(lengths))
        lengths[0] += tokens - sum(lengths)
        placed = [Placement(n, 0, range(-(-n // PAGE))) for n in lengths]
        found = arrange(
            [0] * tokens, placed, page_size=PAGE, config=SMALL.config, per_tile=shape.per_tile
        )
        assert len(found.tile_row) <= shape.tiles
        assert len(shape.filled(found)) == shape.starts[-1] + found.pages.size


@pytest.mark.parametrize("family", MODELS)
def test_padded_forwards_are_those_of_the_cpu(family):
    """At every size, exactly and not; prompts, verify rows and both; cached prefixes; tables that
    grow from step to step.
    """
    loaded = tiny_model(family, **MODELS[family])
    both = targets(loaded, rows=6, tokens=100, taps=(0, loaded.config.num_layers))
    ragged, seen = Ragged(both, users=6, longest=160, seed=3), noted(both[1])
    for total, count in ((128, 6), (16, 5), (17, 6), (64, 2), (90, 4), (1, 1)):
        out = ragged.step(ragged.lengths(total, count))
        assert out.broken == frozenset()
    assert seen == [128, 16, 64, 64, 128, 16]
    assert max(ragged.done) > 64


def test_a_batch_that_does_not_fit_runs_unpadded():
    both = targets(SMALL, rows=3, tokens=60, taps=(1,))
    ragged, seen = Ragged(both, users=4, longest=80), noted(both[1])
    ragged.step([60, 4])  # as many tokens as the largest size has
    ragged.step([1, 63, 1])  # one more
    ragged.step([1, 1, 1, 1])  # one row more than there is room for
    ragged.step([2, 2, 2])
    assert seen == [64, None, None, 16]


def test_what_is_in_the_padding_does_not_matter():
    """Buffers full of NaN, and the leftovers of a larger batch, change no bit."""
    found = []
    for spoiled in (False, True):
        both = targets(SMALL, rows=4, tokens=64, taps=(1,))
        ragged, room = Ragged(both, users=4, longest=80, seed=1), both[1]._padded
        if spoiled:
            both[1].forward(ragged.rows([20, 30, 5, 6]))
            ragged = Ragged(both, users=4, longest=80, seed=1)
            for buffer in (room.hidden, room.features):
                buffer.fill_(float("nan"))
            room.padded.pages.fill_(3)
        out = [ragged.step([11, 9]), ragged.step([1, 30, 3])]
        found.append([*out, *both[1].storage])
    for one, other in zip(*found, strict=True):
        for a, b in (
            ((one, other),)
            if torch.is_tensor(one)
            else (
                (one.logits, other.logits),
                (one.features, other.features),
            )
        ):
            assert torch.equal(a, b)


def test_features_that_are_kept_outlive_the_next_forward():
    both = targets(SMALL, rows=2, tokens=64, taps=(0, 1))
    ragged = Ragged(both, users=2, longest=80)
    first = ragged.step([20, 4])
    kept, logits = first.features.clone(), first.logits.clone()
    ragged.step([30, 9])
    assert torch.equal(first.features, kept)
    assert torch.equal(first.logits, logits)


def test_contexts_in_parts_and_long_ones_unpadded(monkeypatch):
    """As on a chip of 132 multiprocessors: a small size cuts contexts into four parts, and a row
    that is long and alone does better with 32.
    """
    monkeypatch.setattr(device, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(padded, "_DEEP", 100)
    both = targets(SMALL, rows=16, tokens=64)
    ragged, seen = Ragged(both, users=16, longest=128), noted(both[1])
    ragged.step([60])
    ragged.step([38, 2])
    assert [s.splits for s in both[1]._padded.padded._sized.values()] == [4]
    ragged.step([20])
    assert seen == [64, 64, None]


def test_a_broken_row_is_found_and_wiped():
    loaded = tiny_model("llama", layers=1)
    model = loaded.model
    both = targets(loaded, rows=4, tokens=64)
    model.embedding = model.embedding.clone()
    model.embedding[319] = float("nan")
    ragged = Ragged(both, users=3, longest=40)
    ragged.texts = [[t % 300 for t in text] for text in ragged.texts]
    ragged.texts[1][2] = 319
    rows = ragged.rows([7, 5, 2])
    found = both[1].forward(rows)
    assert found.broken == {1}
    assert both[0].forward(rows).broken == {1}
    for mine, theirs in zip(both[1].storage, both[0].storage, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)
