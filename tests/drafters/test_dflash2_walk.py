"""DFlash2's walk: the selector's scores over the likeliest few, and the law it draws from."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream.engine import LLM
from slipstream.models.layers import rms_norm
from slipstream.models.tiny import tiny_model
from slipstream.sampling.state import RowSampler
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import OneHot, SamplingParams, TopK
from tests.helpers import StubRow, lens
from tests.models.test_dflash2 import made

LOADED = tiny_model("llama")
TOP, VOCAB = 5, 320  # tokens the tiny checkpoint's selector chooses among; the vocabulary
SCALES = [{}, {"softcap": 3.0, "multiplier": 1.5}]


@dataclass
class Paged(StubRow):
    """A row with pages of its own."""

    pages: tuple[int, ...] = ()


@dataclass
class Arm:
    """A drafter and the tensors it was loaded from, as saved; `scale` bends its logits."""

    drafter: object
    tensors: dict
    scale: dict


@pytest.fixture(scope="module", params=SCALES, ids=["plain", "bent"])
def arm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("flash2")
    _, tensors = made(folder, ("full", "sliding"), **request.param)
    for name in ("predecessor", "successor"):  # so strong that the token before decides
        tensors[f"candidate_selector.{name}_codebook"] *= 6
    save_file(tensors, folder / "model.safetensors")
    drafter = LLM(LOADED, drafter=f"dflash2:{folder}:7", kv_tokens=1024).drafter
    return Arm(drafter, tensors, request.param)


def row(tokens, i=0, **sampling):
    params = SamplingParams(**sampling)
    sampler = RowSampler(params, Vocabulary(VOCAB, ()), tokens)
    pages = (2 * i + 1, 2 * i + 2)
    return Paged(list(tokens), i, len(tokens), params, seed=11 + i, sampler=sampler, pages=pages)


def lattice(arm, r):
    """Unary logits [7, vocab] and projected states [7, rank] of a row's block, in float64."""
    out = arm.drafter._pass(arm.drafter._lanes([r], lens(7)))
    hidden = rms_norm(out.features[:, 0].contiguous(), arm.drafter.weights.model.norm).double()
    logits = out.logits.double() * arm.scale.get("multiplier", 1.0)
    cap = arm.scale.get("softcap")
    logits = cap * torch.tanh(logits / cap) if cap else logits
    projection = arm.tensors["candidate_selector.hidden_projection.weight"].double()
    return logits[1:], hidden[1:] @ projection.t()


def scores_of(arm, unary, projected, before):
    """Candidates and their scores, term by term."""
    first = arm.tensors["candidate_selector.predecessor_codebook"].double()
    second = arm.tensors["candidate_selector.successor_codebook"].double()
    ids = sorted(range(len(unary)), key=lambda c: -unary[c])[:TOP]
    bond = {c: sum(first[before] * projected * second[c]) for c in ids}
    return {c: float(unary[c] + bond[c]) for c in ids}


def walk(arm, r):
    tokens = []
    for unary, projected in zip(*lattice(arm, r)):
        scores = scores_of(arm, unary, projected, tokens[-1] if tokens else r.tokens[-1])
        tokens.append(max(scores, key=scores.get))
    return tokens


def test_greedy_tokens_are_the_best_given_the_token_before(arm):
    rows = [row([5, 6, 7 + i], i) for i in range(12)]
    draft = arm.drafter.draft(rows, lens(*[7, 3, 0] * 4))
    assert isinstance(draft.law, OneHot)
    moved = 0
    for i, r in enumerate(rows):
        assert draft.row(i) == walk(arm, r)[: (7, 3, 0)[i % 3]]
        moved += draft.row(i) != lattice(arm, r)[0].argmax(-1).tolist()[: draft.lens[i]]
    assert moved > 5, "the selector never mattered: the test would prove nothing"


def test_sampled_rows_carry_the_law_they_were_drawn_from(arm):
    heats = (0.7, 0.0, 1.3)
    rows = [row([i, 3, 5], i, temperature=t, top_p=0.5) for i, t in enumerate(heats)]
    draft = arm.drafter.draft(rows, lens(7, 4, 6))
    assert draft.lens.tolist() == [7, 4, 6]
    assert isinstance(draft.law, TopK)
    assert draft.law.ids.shape == draft.law.probs.shape == (3, 7, TOP)
    assert draft.row(1) == walk(arm, rows[1])[:4]
    for i in (0, 2):
        before = rows[i].tokens[-1]
        unary, projected = lattice(arm, rows[i])
        for j, token in enumerate(draft.row(i)):
            scores = scores_of(arm, unary[j], projected[j], before)
            peak = max(scores.values())
            weights = {c: math.exp((s - peak) / heats[i]) for c, s in scores.items()}
            total = sum(weights.values())
            ids = draft.law.ids[i, j].tolist()
            assert set(ids) == set(weights)
            for c, prob in zip(ids, draft.law.probs[i, j].tolist()):
                assert prob == pytest.approx(weights[c] / total, abs=2e-4)
            at = np.array([len(rows[i].tokens) + j])
            drawn = Uniforms()(np.array([rows[i].seed]), at, Purpose.DRAFT)[0]
            ends = draft.law.probs[i, j].double().cumsum(0)
            assert token == ids[int((ends <= drawn * ends[-1]).sum())]
            before = token


def test_the_same_seed_drafts_the_same_alone_and_in_a_batch(arm):
    rows = [row([i, 3, 5], i, temperature=1.0) for i in range(16)]
    batch = arm.drafter.draft(rows, lens(*[7] * 16))
    for i in (0, 7, 15):
        assert arm.drafter.draft([rows[i]], lens(7)).row(0) == batch.row(i)
    assert len({tuple(batch.row(i)) for i in range(16)}) > 8


def test_what_a_request_bans_is_no_candidate(arm):
    """Bans come before the likeliest are taken, and count the tokens drafted so far."""
    plain = row([1, 2, 3], temperature=0.0)
    taken = arm.drafter.draft([plain], lens(7)).row(0)
    banned = row([1, 2, 3], temperature=1.0, logit_bias=dict.fromkeys(taken, -100.0))
    draft = arm.drafter.draft([banned], lens(7))
    assert draft.lens.tolist() == [7]
    assert not {*draft.row(0)} & {*taken}
    wary = row([1, 2, 3], frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=50.0)
    repeated = arm.drafter.draft([wary], lens(7)).row(0)
    assert len({*repeated}) == 7


def test_rows_whose_scores_are_not_finite_draft_nothing(arm):
    drafter, real = arm.drafter, arm.drafter.block.forward

    def spoiled(rows):
        out = real(rows)
        out.logits[8 + 3 :] = float("nan")  # the second row, from its third mask on
        return out

    drafter.block.forward = spoiled
    rows = [row([1, 2], 0, temperature=1.0), row([3, 4], 1, temperature=1.0)]
    try:
        draft = drafter.draft(rows, lens(7, 7))
    finally:
        drafter.block.forward = real
    assert draft.lens.tolist() == [7, 2]
    sums = draft.law.probs.sum(-1)
    torch.testing.assert_close(sums[0], torch.ones(7))
