"""Prompts that are read between steps of the lane, through Triton's interpreter."""

import tests.interpreter  # noqa: F401, I001 - first

import numpy as np
import pytest
import torch

from slipstream.engine import LLM, fast as fast_module
from slipstream.engine.fast import attach
from slipstream.engine.reading import Reading
from slipstream.models.tiny import tiny_model
from slipstream.types import FinishReason, SamplingParams
from tests.engine.test_lane_blocks import LOADED as BLOCK_TARGET
from tests.engine.test_lane_blocks import spec as block_spec
from tests.engine.test_lane_chain import LOADED as CHAIN_TARGET
from tests.engine.test_lane_chain import mtp

torch.set_num_threads(1)
USERS, CHUNK = 4, 16
DRAFTERS = {
    "mtp": lambda folder: mtp(folder, 26) + ":3",
    "dflash": lambda folder: block_spec("dflash", folder, layers=("full",)),
}


def pair(drafter, *, kv_tokens=2048, loaded=None):
    """The same weights on the CPU without drafts, and in a lane beside which prompts are read."""
    loaded = loaded or (CHAIN_TARGET if drafter[0] == "m" else BLOCK_TARGET)
    plain = LLM(loaded, max_users=USERS, kv_tokens=kv_tokens, prefill_chunk=CHUNK)
    fast = plain.fork(drafter)
    engine = fast.engine
    engine.target.kernels = True
    attach(engine, max_users=USERS)
    room = {"rows": USERS, "tokens": 64}
    engine.target.pad(**room)
    if hasattr(engine.drafter, "pad"):
        engine.drafter.pad(**room, positions=engine.target.positions)
    if hasattr(engine.drafter, "block"):
        engine.drafter.block.kernels = True
    engine.drafts_beside_prompts = True  # drafts can be compared then
    return plain, fast


@pytest.fixture
def readings(monkeypatch):
    """The chunks that were read beside the lane, a list a reading."""
    found = []

    class Watched(Reading):
        def __init__(self, engine, batch, **events):
            found.append([(c.row.request_id, c.length) for c in batch.chunks])
            super().__init__(engine, batch, **events)

    monkeypatch.setattr(fast_module, "Reading", Watched)
    return found


def requests(count, *, sampled, seed=3, ignore_eos=True):
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, 8, rng.integers(4, 28)).tolist() for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(3, 11)),
            temperature=0.8 if sampled and i % 2 else 0.0,
            seed=i,
            ignore_eos=ignore_eos,
        )
        for i in range(count)
    ]
    return prompts, params


def served(engine, prompts, params, *, every=2, meanwhile=lambda step, ids: None):
    """Requests that come one by one, every so many steps; their completions in order."""
    ids, done, step = [], {}, 0
    while len(ids) < len(prompts) or engine.has_work:
        if step % every == 0 and len(ids) < len(prompts):
            ids.append(engine.submit(prompts[len(ids)], params[len(ids)]))
        for output in engine.step() if engine.has_work else ():
            if output.completion is not None:
                done[output.request_id] = output.completion
        meanwhile(step, ids)
        step += 1
    return [done.get(i) for i in ids]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_tokens_are_those_of_plain_decoding_and_drafts_those_alone(drafter, tmp_path, readings):
    """A row that took an ended one's place takes in nothing of what that one left."""
    plain, fast = pair(DRAFTERS[drafter](tmp_path))
    prompts, params = requests(7, sampled=True)
    found = served(fast.engine, prompts, params)
    expected = plain.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert len(readings) > 4
    chunks = [chunk for each in readings for chunk in each]
    assert len({row for row, _ in chunks}) < len(chunks), "no prompt took two chunks"
    assert sum(r.accepted for c in found for r in c.records) > 3
    pool = fast.engine.target.pool
    assert pool.available == pool.num_pages
    late = max(row for row, _ in chunks)
    fast.engine.reset()
    (alone,) = fast.generate([prompts[late]], params[late])
    assert drafts(found[late]) == drafts(alone)


def drafts(completion):
    """What was drafted and accepted at each step."""
    return [(r.depth, r.drafted, r.accepted) for r in completion.records if not r.prefill]


def test_new_rows_join_without_draining_the_lane(readings, monkeypatch):
    _, fast = pair("none")
    entered, lane = [], fast.engine.fast.lane
    enter = lane._enter
    monkeypatch.setattr(lane, "_enter", lambda rows: (entered.append(len(rows)), enter(rows)))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 8, 9).tolist() for _ in range(6)]
    params = [SamplingParams(max_tokens=30, ignore_eos=True)] * 3
    params += [SamplingParams(max_tokens=3, ignore_eos=True)] * 3
    served(fast.engine, prompts, params, every=3)
    assert len(readings) >= 4
    # Graphs of other sizes are entered anew: 1, 2 and 4 rows, and fewer when requests have ended.
    assert entered[:3] == [1, 2, 3]
    assert max(entered[3:]) < 3


def test_a_request_cancelled_while_its_prompt_is_read_gets_nothing(readings):
    plain, fast = pair("ngram:3,min=1")
    prompts, params = requests(6, sampled=False)
    cancelled = []

    def meanwhile(step, ids):
        reading = fast.engine.fast._reading
        if reading is not None and len(readings) in (2, 4):
            gone = readings[-1][0][0]
            if fast.engine.knows(gone):
                assert fast.engine.cancel(gone).finish_reason is FinishReason.CANCELLED
                cancelled.append(gone)

    found = served(fast.engine, prompts, params, meanwhile=meanwhile)
    assert cancelled
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        if i not in cancelled:
            assert found[i].token_ids == plain.generate([prompt], own)[0].token_ids
    pool = fast.engine.target.pool
    assert pool.available == pool.num_pages


def test_requests_the_lane_does_not_do_and_stops(readings):
    plain, fast = pair("ngram:3,min=1")
    prompts, params = requests(7, sampled=True, ignore_eos=False)
    params[3] = SamplingParams(max_tokens=6, repetition_penalty=1.3)
    params[5] = SamplingParams(max_tokens=5, logprobs=2)
    found, expected = served(fast.engine, prompts, params), plain.generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.finish_reason for c in found] == [c.finish_reason for c in expected]
    assert len(found[5].logprobs) == len(found[5].token_ids)
    assert readings


def test_a_small_pool_still_preempts(readings):
    plain, fast = pair("none", kv_tokens=112)
    prompts, _ = requests(5, sampled=False, seed=5)
    params = [SamplingParams(max_tokens=32, ignore_eos=True)] * len(prompts)
    found = served(fast.engine, prompts, params, every=3)
    expected = [plain.generate([p], own)[0].token_ids for p, own in zip(prompts, params)]
    assert [c.token_ids for c in found] == expected
    assert readings
    assert fast.engine.scheduler.preemptions > 0


def test_a_broken_prompt_ends_alone(readings):
    loaded = tiny_model("llama", layers=1, vocab=320)
    plain, fast = pair("ngram:3,min=1", loaded=loaded)
    params = [SamplingParams(max_tokens=12, ignore_eos=True)] * 4
    poison = 311
    prompts = [[3, 4, 5], [6, 7, 8, 9], [poison] * 20, [5, 4, 3]]
    expected = [c.token_ids for c in plain.generate(prompts, params)]
    assert all(poison not in expected[i] for i in (0, 1, 3)), "choose another token to break"
    model = fast.loaded.model
    model.embedding = model.embedding.clone()  # the head may be the same tensor
    model.embedding[poison] = float("nan")
    found = served(fast.engine, prompts, params)
    assert readings
    assert found[2].finish_reason is FinishReason.ERROR
    assert "NaN" in found[2].error
    assert [found[i].token_ids for i in (0, 1, 3)] == [expected[i] for i in (0, 1, 3)]
