"""Trained drafters keep the target's tokens and law; their caches hold what fresh ones would."""

import functools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats

from slipstream.cache.pages import PageTable
from slipstream.drafters import chain as drafters_chain
from slipstream.drafters import dflash as drafters_dflash
from slipstream.drafters import lanes
from slipstream.engine import LLM
from slipstream.errors import ModelError
from slipstream.models.dspark import DSparkConfig
from slipstream.models.mtp import head_config
from slipstream.models.tiny import tiny_model
from slipstream.sampling.probs import shape_probs
from slipstream.target.target import ForwardRow, Target
from slipstream.train import dflash, eagle3
from slipstream.train.data import Features, own_answers, text_of
from slipstream.train.dflash import DFlashNetwork
from slipstream.train.dspark import DSparkNetwork
from slipstream.train.eagle3 import Eagle3Network
from slipstream.train.mtp import MtpNetwork
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import Dense, SamplingParams, Span
from tests.exact.test_greedy_equality import TWISTS, answers, prompts
from tests.helpers import StubRow

torch.set_num_threads(1)
PROMPT = list(range(20, 30))


@functools.cache
def loaded():
    return tiny_model("qwen3", layers=4)


def network(method):
    target = loaded().model
    if method == "eagle3":
        return Eagle3Network(eagle3.draft_config(target.config), target, steps=4, seed=1)
    if method == "mtp":
        return MtpNetwork(head_config(target.config), target, steps=4, seed=1)
    config = dflash.draft_config(target.config, dflash.Shape(layers=2, taps=2), mask_token_id=319)
    if method == "dspark":
        return DSparkNetwork(DSparkConfig(config, "gated", rank=16), target, seed=1)
    return DFlashNetwork(config, target, seed=1)


@pytest.fixture(scope="module", params=["mtp", "eagle3", "dflash", "dspark"])
def method(request):
    return request.param


@pytest.fixture(scope="module")
def untrained(method, tmp_path_factory):
    folder = tmp_path_factory.mktemp("untrained")
    net = network(method)
    net.save(folder, net.tensors)
    return f"{method}:{folder}"


@pytest.fixture(scope="module")
def trained(method, tmp_path_factory):
    """Knows the greedy answers to the prompts used here: often right, not always."""
    folder = tmp_path_factory.mktemp("trained")
    work = [PROMPT, *prompts(4)]
    texts = own_answers(LLM(loaded()), work, SamplingParams(max_tokens=24, ignore_eos=True))
    steps = 350 if method == "eagle3" else 150
    plan = Plan(steps=steps, batch=4, anchors=12, lr=4e-3, held_out=0, reports=1)
    Trainer(loaded(), network(method), texts, plan, out=folder, say=lambda _: None).run()
    return f"{method}:{folder}"


@pytest.mark.parametrize("twist", TWISTS, ids=lambda t: next(iter(t), "plain"))
@pytest.mark.parametrize("users", [1, 16])
def test_greedy_tokens_are_those_of_plain_decoding(twist, users, trained, untrained):
    llm = LLM(loaded())
    work, params = prompts(users), SamplingParams(max_tokens=20, **twist)
    expected, _ = answers(llm, work, params)
    for spec in (trained, untrained):
        for draft_len in (1, 3, 7):
            found, done = answers(llm.fork(f"{spec}:{draft_len}"), work, params)
            assert found == expected
            assert sum(r.drafted for c in done for r in c.records) > 0
    assert all(len(c.records) <= len(c.token_ids) for c in done)


def test_sampled_tokens_do_not_depend_on_the_batch(trained):
    arm = LLM(loaded()).fork(f"{trained}:5")
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
    assert p_value(LLM(loaded(), drafter=f"{trained}:2", max_users=64)) > 1e-6


def test_a_law_that_was_not_drawn_from_fails(trained, monkeypatch):
    def lying(made, law, *, rows):
        draft = lanes.pack_lanes(made, law, rows=rows)
        if isinstance(draft.law, Dense):
            # Even tokens pass always, odd ones by their own chance only.
            false = torch.full_like(draft.law.probs, 0.003)
            false[..., 1::2] = 1.0
            object.__setattr__(draft, "law", Dense(false))
        return draft

    for module in (drafters_dflash, drafters_chain):
        monkeypatch.setattr(module, "pack_lanes", lying)
    assert p_value(LLM(loaded(), drafter=f"{trained}:2", max_users=64)) < 1e-9


def test_acceptance_in_the_engine_is_the_teacher_forced_one(method, trained):
    """Not within an interval but draft by draft: greedily both look at the same tokens."""
    net = network(method)
    for name, tensor in load_file(f"{trained.partition(':')[2]}/model.safetensors").items():
        net.tensors[name].data = tensor.float()
    arm = LLM(loaded(), drafter=f"{trained}:4")
    features = Features(loaded(), net.needs, longest=100)
    served = compared = 0
    work = [PROMPT, *prompts(4), list(range(60, 80))]
    done = arm.generate(work, SamplingParams(max_tokens=40, ignore_eos=True))
    for prompt, completion in zip(work, done, strict=True):
        drafts = [r for r in completion.records if r.drafted]
        anchors = np.array([[r.depth - 1 for r in drafts]])
        batch = features.batch([text_of(prompt, completion.token_ids)], anchors)
        ((right,), _) = net.agreement(batch)
        for record, row in zip(drafts, right, strict=True):
            assert record.accepted == int(row[: record.drafted].cumprod(0).sum())
            served += record.accepted
            compared += 1
    assert compared > 50
    assert served > 20


@dataclass
class Fresh(StubRow):
    """A row with pages of its own."""

    pages: tuple[int, ...] = tuple(range(11))


def kept(drafter, pages, count):
    """What a drafter's cache holds of the first `count` positions."""
    positions = np.arange(count)
    slots = np.asarray(pages)[positions // 16] * 16 + positions % 16
    storages = [drafter.storage] if hasattr(drafter, "storage") else drafter.block.storage
    return [storage[slots] for storage in storages]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_draft_cache_is_that_of_a_fresh_prefill(trained, temperature):
    """After rejections, preemption, and with pages taken over from other requests."""
    arm = LLM(loaded(), drafter=f"{trained}:4", prefill_chunk=16, kv_tokens=176)
    probe = LLM(loaded(), drafter=f"{trained}:4", kv_tokens=176).drafter
    engine, drafter = arm.engine, arm.drafter
    features = Features(loaded(), drafter.needs, longest=200)
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5, ignore_eos=True)
    checked = reused = rejected = 0
    for tail in ([3], [4, 5], [6]):
        engine.submit([*PROMPT * 4, *tail], params)
    while engine.has_work:
        outputs = engine.step()
        for row in engine.scheduler.running:
            count = row.computed
            probe.absorb([Span(Fresh(row.tokens), 0, features.of(row.tokens[:count]))])
            found, expected = kept(drafter, row.pages, count), kept(probe, Fresh.pages, count)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
            checked += 1
        for output in outputs:
            if output.completion:
                reused += output.completion.cached_tokens
                rejected += sum(r.drafted - r.accepted for r in output.completion.records)
    assert checked > 30
    assert reused > 0
    assert rejected > 0
    assert engine.scheduler.preemptions > 0


def test_an_answer_as_long_as_the_context_ends(trained):
    arm = LLM(tiny_like(24), drafter=f"{trained}:4")
    with pytest.raises(ModelError, match="made for another target"):
        LLM(tiny_model("llama", hidden_size=96), drafter=f"{trained}:4")
    (done,) = arm.generate([PROMPT], SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(done.token_ids) == 14
    assert done.finish_reason.value == "length"


def tiny_like(context):
    """The same weights under a shorter limit."""
    return tiny_model("qwen3", layers=4, max_position_embeddings=context)
