"""Prompt lookup on the device proposes what the host's index does, in Triton's interpreter."""

import tests.interpreter  # noqa: F401, I001  first: it turns the interpreter on

import numpy as np
import pytest
import torch

from slipstream.drafters import ngram_device
from slipstream.drafters.ngram import NgramIndex
from slipstream.drafters.ngram_device import DeviceNgram

CPU = torch.device("cpu")


def check(rng, texts, form, *, capacity):
    """One launch over all texts and a padding row, slots in any order."""
    low, high, factor, draft_len = form
    rows = len(texts) + 1
    tokens = torch.from_numpy(rng.integers(0, 3, (rows, capacity))).int()
    lengths = torch.zeros(rows, dtype=torch.int32)
    order = rng.permutation(len(texts))
    for slot, text in zip(order, texts):
        tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths[slot] = len(text)
    slot_of = torch.tensor([*order, rows - 1], dtype=torch.int32)
    drafter = DeviceNgram(rows, draft_len, min_match=low, max_match=high, factor=factor, device=CPU)
    drafts = torch.full((rows, draft_len), -7, dtype=torch.int32)
    counts = torch.full((rows,), -7, dtype=torch.int32)
    for _ in range(2):  # the second finds what the first left behind
        drafter.find(tokens, lengths, slot_of, drafts=drafts, counts=counts)
        for row, text in enumerate([*texts, []]):
            index = NgramIndex(text, min_match=low, max_match=high)
            expected = index.propose(draft_len, factor)
            assert drafts[row, : counts[row]].tolist() == expected, (text, form)
    return counts


FORMS = [(1, 1, 1.0, 1), (1, 4, 1.5, 8), (2, 4, 1.5, 7), (2, 3, 32.0, 4), (3, 5, 0.5, 3)]
FORMS += [(2, 4, 1.1, 16), (1, 8, 0.29, 15), (4, 8, 8.0, 7)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("alphabet", [2, 30])
def test_drafts_are_those_of_the_index(form, alphabet):
    rng = np.random.default_rng(alphabet)
    lengths = [1, 2, 3, 5, 8, 20, 60, 150, 300]
    texts = [rng.integers(0, alphabet, n).tolist() for n in lengths]
    for n in (40, 200):  # long matches
        text = rng.integers(0, 10**6, n).tolist()
        texts.append(text + text[: n // 2])
    counts = check(rng, texts, form, capacity=310)
    assert counts[-1] == 0
    assert counts[:-1].max() > 0


@pytest.mark.parametrize("alphabet", [2, 50])
def test_texts_longer_than_a_chunk(alphabet, monkeypatch):
    monkeypatch.setattr(ngram_device, "CHUNK", 64)
    rng = np.random.default_rng(alphabet)
    lengths = [1, 63, 64, 65, 66, 127, 128, 129, 192, 300]
    texts = [rng.integers(0, alphabet, n).tolist() for n in lengths]
    for form in FORMS[:4]:
        check(rng, texts, form, capacity=300)


def test_a_text_over_one_chunk_as_it_is():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 2**17, 6000).tolist()
    early = text + text[100:110]  # the match is in the first chunk
    late = text + text[5000:5010]
    assert check(rng, [early, late], (2, 4, 1.5, 8), capacity=8192).tolist() == [8, 8, 0]


def test_factor_times_matched_is_rounded_as_on_the_host():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 10**6, 60).tolist()
    for factor, matched in [(1.16, 25), (0.58, 50)]:  # 29 in float32, a little less in float64
        counts = check(rng, [text + text[:matched]], (2, 4, factor, 32), capacity=120)
        assert counts.tolist() == [28, 0]


def test_the_longest_match_wins_and_the_most_recent_among_equals():
    rng = np.random.default_rng(0)
    texts = [[1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], [0, 0, 0]]
    check(rng, texts, (2, 4, 32.0, 4), capacity=16)
