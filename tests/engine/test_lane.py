"""The fast lane through Triton's interpreter: the tokens of the engine's own five lines."""

import tests.interpreter  # noqa: F401, I001 - first

import time

import numpy as np
import pytest

from slipstream.control.static import StaticController
from slipstream.engine import LLM
from slipstream.engine.fast import attach
from slipstream.models.cuda import layers
from slipstream.models.tiny import tiny_model
from slipstream.types import Draft, FinishReason, OneHot, SamplingParams

PROMPTS = [[7, 8, 9] * 5, [3, 4] * 9, list(range(40, 75)), [5] * 12, [11, 12, 13, 14] * 3]


def pair(family="llama", drafter="none", **kwargs):
    """The same weights twice: the CPU path, and kernels with a lane."""
    kwargs = {"max_users": 4, "kv_tokens": 2048, **kwargs}
    layers = 2 if family in ("mistral", "smollm3") else 1  # these differ from layer to layer
    plain = LLM(tiny_model(family, layers=layers), drafter="none", **kwargs)
    fast = plain.fork(drafter)
    fast.engine.target.kernels = True
    attach(fast.engine, max_users=kwargs["max_users"])
    return plain, fast


def ids(completions):
    return [c.token_ids for c in completions]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_kernels_and_lane_give_the_tokens_of_the_cpu(family):
    plain, fast = pair(family, "ngram:3,min=1")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    expected, found = plain.generate(PROMPTS, params), fast.generate(PROMPTS, params)
    assert ids(found) == ids(expected)
    laned = [r for c in found for r in c.records if not r.prefill and r.drafted]
    assert laned, "the lane never drafted"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("gate", [True, False])
def test_the_kernels_for_few_rows_give_the_same_tokens(family, gate, monkeypatch):
    """They serve bfloat16; in float32 their sums can be compared with the CPU's. Without `gate` the
    largest weight is left to the stock product, which takes a stream whose norm is done.
    """
    plain, fast = pair(family, "ngram:3,min=1", max_users=2)
    stock = [] if gate else [layer.gate_up.weight for layer in fast.loaded.model.layers]

    def served(x, weight):
        return len(x) <= 16 and not any(weight is other for other in stock)

    monkeypatch.setattr(layers, "few", served)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert ids(fast.generate(PROMPTS[:3], params)) == ids(plain.generate(PROMPTS[:3], params))


@pytest.mark.parametrize("drafter", ["none", "ngram:4,min=1", "suffix:4"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "mixed"])
def test_every_drafter_and_law(drafter, sampling):
    plain, fast = pair(drafter=drafter)
    each = [
        SamplingParams(
            max_tokens=4 + i,
            temperature=0.0 if sampling == "greedy" or (sampling == "mixed" and i % 2) else 0.9,
            top_p=0.9 if i % 2 else 1.0,
            top_k=20 if i == 2 else 0,
            seed=i,
            ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]
    assert ids(fast.generate(PROMPTS, each)) == ids(plain.generate(PROMPTS, each))


def test_requests_the_lane_does_not_do_join_and_leave():
    """Penalties and logprobs drain it; plain requests beside them keep their tokens."""
    plain, fast = pair(drafter="ngram:3,min=1")
    each = [
        SamplingParams(max_tokens=14, ignore_eos=True),
        SamplingParams(max_tokens=4, repetition_penalty=1.3, ignore_eos=True),
        SamplingParams(max_tokens=9, ignore_eos=True),
        SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=10, ignore_eos=True),
    ]
    expected, found = plain.generate(PROMPTS, each), fast.generate(PROMPTS, each)
    assert ids(found) == ids(expected)
    assert [len(c.logprobs or ()) for c in found] == [0, 0, 0, 3, 0]


def test_a_stop_is_noticed_late_and_costs_no_token():
    plain, fast = pair(drafter="ngram:3,min=1")
    free = plain.generate([PROMPTS[2]], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    params = SamplingParams(max_tokens=12, stop_token_ids=(free[5],), ignore_eos=True)
    prompts = [PROMPTS[2], PROMPTS[0]]
    expected, found = plain.generate(prompts, params), fast.generate(prompts, params)
    assert ids(found) == ids(expected)
    assert found[0].finish_reason is FinishReason.STOP
    pool = fast.engine.target.pool
    assert pool.available == pool.num_pages


def test_a_small_pool_drains_the_lane_and_preempts():
    plain, fast = pair(drafter="ngram:3,min=1", kv_tokens=112)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = [plain.generate([p], params)[0].token_ids for p in PROMPTS]
    assert ids(fast.generate(PROMPTS, params)) == expected
    assert fast.engine.scheduler.preemptions > 0


def test_broken_logits_end_one_request_with_its_sentence():
    _, fast = pair()
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    answers = ids(fast.generate(PROMPTS, params))
    good, bad, poison = next(
        (a, b, answers[b][1])
        for a in range(len(PROMPTS))
        for b in range(len(PROMPTS))
        if answers[b][1] not in [*PROMPTS[a], *answers[a], *PROMPTS[b], answers[b][0]]
    )
    fast.engine.reset()
    model = fast.loaded.model
    model.embedding = model.embedding.clone()  # the head may be the same tensor
    model.embedding[poison] = float("nan")
    done = fast.generate([PROMPTS[good], PROMPTS[bad]], params)
    assert done[0].token_ids == answers[good]
    assert done[1].finish_reason is FinishReason.ERROR
    assert done[1].token_ids == answers[bad][:2]
    assert "NaN" in done[1].error


def test_warming_up_compiles_and_captures_and_changes_no_answer():
    plain, fast = pair(max_users=2)
    fast.engine.fast = None
    attach(fast.engine, max_users=2, warm=True)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    assert ids(fast.generate(PROMPTS[:2], params)) == ids(plain.generate(PROMPTS[:2], params))
    pool = fast.engine.target.pool
    assert pool.available == pool.num_pages


def test_cancelling_and_a_new_request_in_its_slot():
    plain, fast = pair(drafter="ngram:3,min=1")
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    stream = fast.stream(PROMPTS[:2], params)
    for _ in range(4):
        next(stream)
    stream.close()
    assert not fast.engine.has_work
    expected = plain.generate(PROMPTS, params)
    assert ids(fast.generate(PROMPTS, params)) == ids(expected)


class FourZeros:
    """Drafts without a form on the device, so that the host sends them."""

    max_draft_len, needs, one_hot, name = 4, (), True, "zeros"

    def draft(self, rows, draft_lens):
        lens = draft_lens.clip(0, 4)
        return Draft(np.zeros((len(rows), 4), np.int64), lens, OneHot())

    def open(self, rows): ...

    def advance(self, rows, verdict): ...

    def close(self, request_ids): ...

    def reset(self): ...


def test_synthetic_acceptance_is_what_was_asked_for():
    _, fast = pair()
    engine = fast.engine
    engine.drafter = FourZeros()
    engine.controller = StaticController(4, max_context=512)
    attach(engine, max_users=4, forced=1.5)
    done = fast.generate(PROMPTS[:2], SamplingParams(max_tokens=60, ignore_eos=True))
    steps = [r for c in done for r in c.records if r.drafted == 4]
    assert len(steps) > 30
    assert 1.3 < sum(r.accepted for r in steps) / len(steps) < 1.7


def test_time_that_others_take_is_no_host_time(monkeypatch):
    """Two engines in turns: what passes between `settle` and the next step belongs to nobody."""
    passed, clock = [0.0], time.perf_counter
    monkeypatch.setattr("slipstream.engine.lane.time.perf_counter", lambda: clock() + passed[0])
    plain, fast = pair(drafter="ngram:3,min=1")
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    ids_of = [fast.engine.submit(p, params) for p in PROMPTS[:2]]
    found, steps = {}, 0
    while fast.engine.has_work:
        for output in fast.engine.step():
            if output.completion is not None:
                found[output.request_id] = output.completion
        steps += 1
        if steps % 3 == 0:
            fast.engine.settle()
            passed[0] += 10_000
    done = [found[i] for i in ids_of]
    assert ids(done) == ids(plain.generate(PROMPTS[:2], params))
    laned = [r for c in done for r in c.records if not r.prefill]
    assert passed[0]
    assert max(r.times.host for r in laned) < 10_000
