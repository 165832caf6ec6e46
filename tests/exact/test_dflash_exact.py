"""DFlash keeps the target's tokens and law, and its cache holds what a fresh one would."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.cache.pages import PageTable
from slipstream.drafters import dflash, lanes
from slipstream.engine import LLM
from slipstream.models.dflash import save_dflash
from slipstream.models.tiny import tiny_model
from slipstream.sampling.probs import shape_probs
from slipstream.target.target import ForwardRow, Target
from slipstream.train.data import Features, own_answers
from slipstream.train.dflash import Network, Shape, draft_config
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import Dense, SamplingParams
from tests.exact.test_greedy_equality import TWISTS, answers, prompts

torch.set_num_threads(1)
PROMPT = list(range(20, 30))


@functools.cache
def loaded():
    return tiny_model("qwen3")


def network(seed=1, layers=2):
    config = draft_config(loaded().config, Shape(layers=layers, taps=2), mask_token_id=319)
    return Network(config, loaded().model, seed=seed)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    net = network()
    save_dflash(folder, net.config, net.tensors)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Knows the greedy answers to the prompts used here: often right, not always."""
    folder = tmp_path_factory.mktemp("trained")
    work = [PROMPT, *prompts(4)]
    texts = own_answers(LLM(loaded()), work, SamplingParams(max_tokens=24, ignore_eos=True))
    plan = Plan(steps=150, texts=4, anchors=12, lr=3e-3, held_out=0, report_every=150)
    Trainer(loaded(), network(), texts, plan, out=folder, say=lambda _: None).run()
    return folder


@pytest.mark.parametrize("twist", TWISTS, ids=lambda t: next(iter(t), "plain"))
@pytest.mark.parametrize("users", [1, 16])
def test_greedy_tokens_are_those_of_plain_decoding(twist, users, trained, untrained):
    llm = LLM(loaded())
    work, params = prompts(users), SamplingParams(max_tokens=20, **twist)
    expected, _ = answers(llm, work, params)
    for folder in (trained, untrained):
        for draft_len in (1, 3, 7):
            found, done = answers(llm.fork(f"dflash:{folder}:{draft_len}"), work, params)
            assert found == expected
            assert sum(r.drafted for c in done for r in c.records) > 0
    assert all(len(c.records) <= len(c.token_ids) for c in done)


def test_sampled_tokens_do_not_depend_on_the_batch(trained):
    arm = LLM(loaded()).fork(f"dflash:{trained}:5")
    params = SamplingParams(max_tokens=16, temperature=0.7, seed=4)
    alone = [arm.generate([p], params)[0].token_ids for p in prompts(6)]
    assert [c.token_ids for c in arm.generate(prompts(6), params)] == alone


def laws(llm, params, tokens):
    """The target's law after `tokens`, float64 [vocab]."""
    target = Target(loaded(), num_pages=8)
    table = PageTable(target.pool, expected_tokens=len(tokens))
    assert table.reserve(len(tokens))
    logits = target.forward([ForwardRow(tokens, 0, table.pages, 1)]).logits
    return shape_probs(logits, [params])[0].double().numpy()


def p_value(arm, rounds=4000):
    """Chi-square of the first two tokens of an answer at temperature 1, against the law."""
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=3, ignore_eos=True)
    expected = {}
    first = laws(arm, params, PROMPT)
    for a in np.flatnonzero(first):
        second = laws(arm, params, [*PROMPT, int(a)])
        expected |= {(int(a), int(b)): first[a] * second[b] for b in np.flatnonzero(second)}
    seen = dict.fromkeys(expected, 0)
    accepted = 0
    each = [replace(params, seed=i) for i in range(rounds)]
    for completion in arm.generate([PROMPT] * rounds, each):
        seen[completion.token_ids[:2]] += 1
        accepted += sum(r.accepted for r in completion.records)
    assert accepted > rounds / 20, "hardly anything was accepted: the test would prove nothing"
    counts, shares = np.array(list(seen.values())), np.array(list(expected.values()))
    return stats.chisquare(counts, shares / shares.sum() * rounds).pvalue


def test_sampling_keeps_the_target_law(trained):
    assert p_value(LLM(loaded(), drafter=f"dflash:{trained}:2", max_users=64)) > 1e-6


def test_a_law_that_was_not_drawn_from_fails(trained, monkeypatch):
    def lying(made, law, *, rows):
        draft = lanes.pack_lanes(made, law, rows=rows)
        if isinstance(draft.law, Dense):
            flat = torch.full_like(draft.law.probs, 0.02)
            object.__setattr__(draft, "law", Dense(flat))
        return draft

    monkeypatch.setattr(dflash, "pack_lanes", lying)
    assert p_value(LLM(loaded(), drafter=f"dflash:{trained}:2", max_users=64)) < 1e-9


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_cache_is_that_of_a_fresh_prefill(trained, temperature):
    """After rejections, preemption, and with pages taken over from other requests."""
    arm = LLM(loaded(), drafter=f"dflash:{trained}:4", prefill_chunk=16, kv_tokens=176)
    engine, drafter = arm.engine, arm.drafter
    features = Features(loaded(), drafter.needs, longest=200)
    shared = PROMPT * 4
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    checked = reused = rejected = 0
    for tail in ([3], [4, 5], [6]):
        engine.submit([*shared, *tail], params)
    while engine.has_work:
        outputs = engine.step()
        for row in engine.scheduler.running:
            count = row.computed
            expected = drafter.weights.context(
                features.of(row.tokens[:count]), torch.arange(count), count - 1
            )
            slots = drafter._slots(row.pages, np.arange(count))
            for storage, fresh in zip(drafter.block.storage, expected, strict=True):
                torch.testing.assert_close(storage[slots], fresh, atol=2e-4, rtol=1e-3)
            checked += 1
        for output in outputs:
            if output.completion:
                reused += output.completion.cached_tokens
                rejected += sum(r.drafted - r.accepted for r in output.completion.records)
    assert checked > 30
    assert reused > 0
    assert rejected > 0
    assert engine.scheduler.preemptions > 0
