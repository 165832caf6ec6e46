"""Texts side by side teach what each teaches alone."""

import numpy as np
import pytest
import torch

from slipstream.models.tiny import tiny_model
from slipstream.train import data
from slipstream.train.data import Features, text_of
from slipstream.train.recipes import RECIPES, Shape, make

torch.set_num_threads(1)
LOADED = tiny_model("llama", layers=4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_holds_what_its_texts_say_alone(recipe, monkeypatch):
    monkeypatch.setattr(data, "_HOST_TOKENS", 50)  # some forwards end inside a text
    takes = {} if recipe in ("mtp", "eagle3") else {"taps": 2}
    net = make(recipe, LOADED.model, Shape(draft_len=4, mask_token_id=319, **takes), seed=1)
    generator = np.random.default_rng(2)
    texts = [text_of(generator.integers(3, 300, n).tolist(), []) for n in (40, 90, 23)]
    where = np.array([[3, 20, 38], [5, 60, 88], [1, 2, 22]])
    features = Features(LOADED, net.needs, longest=400)
    whole = features.batch(texts, where)
    held, there = net.agreement(whole)
    with torch.no_grad():
        together = net.logits(whole)
    for i, text in enumerate(texts):
        alone = features.batch([text], where[i : i + 1])
        torch.testing.assert_close(
            whole.features[i, : len(text.tokens)], alone.features[0], atol=1e-4, rtol=1e-4
        )
        with torch.no_grad():
            (expected,) = net.logits(alone)
        own, exists = net.agreement(alone)
        for block in range(3):
            real = exists[0, block]
            assert torch.equal(there[i, block], real)
            assert torch.equal(held[i, block], own[0, block])
            torch.testing.assert_close(
                together[i, block][real], expected[block][real], atol=1e-4, rtol=1e-3
            )
    assert not bool(there[0, 2, 1:].any())
    assert bool(there[1, 1].all())
