"""Block drafters inside the lane, in Triton's interpreter: the host path's drafts, plain tokens."""

import tests.interpreter  # noqa: F401, I001 - first

from dataclasses import replace

import pytest
import torch

from slipstream.drafters import dflash_device
from slipstream.drafters.none import NoneDrafter
from slipstream.engine import LLM
from slipstream.engine.fast import attach
from slipstream.models.config import from_hf
from slipstream.models.dflash import save_dflash
from slipstream.models.dflash2 import DFlash2Config, save_dflash2
from slipstream.models.dspark import DSparkConfig, save_dspark
from slipstream.models.tiny import tiny_model
from slipstream.train.data import Features
from slipstream.train.dflash import Shape, draft_config
from slipstream.types import SamplingParams, Span
from tests.exact.test_trained_drafters import Fresh, kept

VOCAB, MASK = 8, 7  # so few tokens that drafts of random weights are accepted now and then
SIZES = {
    "head_dim": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "hidden_size": 32,
    "layers": 1,
}
LOADED = tiny_model("qwen3", seed=3, vocab=VOCAB, **SIZES)
PROMPTS = [[3, 4, 5] * 7, [6, 1] * 5, [2, 3, 4, 5, 6, 1, 0, 3, 3], [5] * 12]
METHODS = [
    *("dflash", "dflash reduced", "dflash2", "dflash2 reduced"),
    *("dspark", "dspark gated", "dspark rnn"),
]


def backbone(layers=("full",), context=512, **changes):
    base = draft_config(LOADED.config, Shape(layers=len(layers), taps=1), mask_token_id=MASK)
    hf = dict(base.model.hf) | {
        "layer_types": [f"{kind}_attention" for kind in layers],
        "use_sliding_window": "sliding" in layers,
        "sliding_window": 6 if "sliding" in layers else None,
        "max_position_embeddings": context,
    }
    return replace(base, model=from_hf(hf, source="tiny"), block_size=5, **changes)


def tensors(config, seed=2):
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in config.shapes.items():
        noise = torch.randn(shape, generator=generator)
        found[name] = 1 + 0.1 * noise if name.endswith("norm.weight") else noise / shape[-1] ** 0.5
    if "d2t" in found:
        ids = torch.tensor([1, 2, 3, 4, 5, 6])
        found["d2t"] = ids - torch.arange(len(ids))
    return found


def spec(method, folder, **changes):
    """A checkpoint of random weights, and its spec."""
    name, _, kind = method.partition(" ")
    if method == "dflash":
        changes = {"layers": ("full", "sliding"), **changes}
    if kind in ("reduced", "rnn"):
        changes = {"draft_vocab": 6, "sliding_causal": False, **changes}
    flash = backbone(**changes)
    if name == "dflash":
        save_dflash(folder, flash, tensors(flash))
        return f"dflash:{folder}:3"
    if name == "dflash2":
        config = DFlash2Config(flash, kernel=3, group=8, rank=6, top_k=4)
        save_dflash2(folder, config, tensors(config))
        return f"dflash2:{folder}:3"
    config = DSparkConfig(flash, kind or "vanilla", rank=6, from_anchor=kind != "rnn")
    save_dspark(folder, config, tensors(config))
    return f"dspark:{folder}:3" + (",stop=0.3" if kind == "gated" else "")


def arms(drafter, users=2, loaded=LOADED, *, padded=False, **kwargs):
    """Plain decoding and the drafter on the CPU, and the drafter in a lane. `padded`: prompts there
    run, and are taken in, as on a GPU.
    """
    kwargs = {"max_users": users, "kv_tokens": 1024, **kwargs}
    plain = LLM(loaded, drafter="none", **kwargs)
    host, fast = plain.fork(drafter), plain.fork(drafter)
    fast.engine.target.kernels = True
    attach(fast.engine, max_users=users)
    if padded:
        fast.engine.target.pad(rows=users, tokens=64)
        fast.drafter.block.kernels = True
    assert fast.engine.fast is not None
    assert not fast.engine.drafts_beside_prompts
    fast.engine.drafts_beside_prompts = True  # every draft of the host's can be compared then
    return plain, host, fast


def ids(completions):
    return [c.token_ids for c in completions]


def drafts(completions):
    """What was drafted and accepted at each step of each answer."""
    return [
        [(r.depth, r.drafted, r.accepted) for r in c.records if not r.prefill] for c in completions
    ]


def accepted(completions):
    return sum(r.accepted for c in completions for r in c.records)


@pytest.mark.parametrize("method", METHODS)
def test_drafts_and_tokens_are_those_of_the_host_path(method, tmp_path, monkeypatch):
    if method == "dflash":
        monkeypatch.setattr(dflash_device, "_TILE", 12)  # several tiles a block
    plain, host, fast = arms(spec(method, tmp_path))
    params = [SamplingParams(max_tokens=12 + i, ignore_eos=True) for i in range(2)]
    expected, found = plain.generate(PROMPTS[:2], params), fast.generate(PROMPTS[:2], params)
    assert ids(found) == ids(expected)
    assert drafts(found) == drafts(host.generate(PROMPTS[:2], params))
    assert accepted(found) > 2
    assert fast.drafter.block.forwards == 0, "the host drafted"
    if "gated" in method:
        assert any(d < 3 for each in drafts(found) for _, d, _ in each[:-2]), "nothing was cut"


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
def test_sampled_tokens_are_those_of_plain_decoding(method, tmp_path):
    """Also those that the host drafts, between steps of the lane: a penalty joins."""
    plain, _, fast = arms(spec(method, tmp_path))
    each = [
        SamplingParams(
            max_tokens=8 + 2 * i,
            temperature=0.9 if i != 1 else 0.0,
            top_p=0.9 if i == 2 else 1.0,
            repetition_penalty=1.2 if i == 3 else 1.0,
            seed=i,
            ignore_eos=True,
        )
        for i in range(4)
    ]
    found = fast.generate(PROMPTS, each)
    assert ids(found) == ids(plain.generate(PROMPTS, each))
    assert accepted(found) > 0
    assert fast.drafter.block.forwards > 0


@pytest.mark.parametrize("method", ["dflash2", "dspark"])
def test_draining_reused_slots_and_prefixes_change_no_draft(method, tmp_path):
    plain, host, fast = arms(spec(method, tmp_path))
    prompts = [*PROMPTS, PROMPTS[0] + PROMPTS[1]]
    each = [
        SamplingParams(max_tokens=n, repetition_penalty=p, ignore_eos=True)
        for n, p in ((20, 1.0), (5, 1.0), (4, 1.3), (9, 1.0), (12, 1.0))
    ]
    for _ in range(2):
        expected, found = plain.generate(prompts, each), fast.generate(prompts, each)
        assert ids(found) == ids(expected)
        assert drafts(found) == drafts(host.generate(prompts, each))
        # An answer's own pages are taken over as well as prompts.
        prompts = [[*p, *c.token_ids, 3] for p, c in zip(prompts, found, strict=True)]
    assert sum(c.cached_tokens for c in found) > 60
    assert accepted(found) > 2


@pytest.mark.parametrize("method", ["dflash", "dflash2 reduced", "dspark"])
def test_padded_prompts_are_taken_in_by_kernels(method, tmp_path, monkeypatch):
    """Chunk by chunk, beside rows that decode; drafts say whether the draft cache is right."""
    plain, host, fast = arms(spec(method, tmp_path), padded=True, prefill_chunk=20)
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (10, 5, 9, 6)]
    expected, wanted = plain.generate(PROMPTS, each), host.generate(PROMPTS, each)
    monkeypatch.setattr(type(fast.drafter.weights), "context", None)  # not the host's way
    monkeypatch.setattr(fast.engine.target, "pads", lambda tokens: False)  # forwards are shared
    found = fast.generate(PROMPTS, each)
    assert ids(found) == ids(expected)
    assert drafts(found) == drafts(wanted)
    assert accepted(found) > 0
    assert any(r.prefill_tokens and not r.prefill for c in found for r in c.records)


@pytest.mark.parametrize("method", ["dflash", "dflash2 reduced"])
def test_the_kernels_take_in_what_the_host_does(method, tmp_path):
    _, host, fast = arms(spec(method, tmp_path), padded=True)
    taps, size = len(host.drafter.needs), LOADED.config.hidden_size
    noise = torch.Generator().manual_seed(4)
    spans = [
        Span(Fresh([3] * 60, pages=pages), start, torch.randn(count, taps, size, generator=noise))
        for pages, start, count in (((5, 2, 9), 0, 40), ((7, 1), 13, 5), ((3,), 2, 1))
    ]
    host.drafter.absorb(spans)
    fast.drafter.absorb(spans)
    for found, expected in zip(fast.drafter.block.storage, host.drafter.block.storage, strict=True):
        assert int(expected.flatten(1).any(1).sum()) == 46
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_nothing_is_drafted_beside_a_prompt(tmp_path):
    """There the host would draft; the features of all rows are taken in all the same."""
    plain, _, fast = arms(spec("dflash", tmp_path))
    fast.engine.drafts_beside_prompts = False
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (14, 5, 9, 9)]
    found = fast.generate(PROMPTS, each)
    assert ids(found) == ids(plain.generate(PROMPTS, each))
    mixed = [r for c in found for r in c.records if r.prefill_tokens and not r.prefill]
    assert mixed
    assert not any(r.drafted for r in mixed)
    assert accepted(found) > 2


def test_the_draft_cache_is_that_of_a_fresh_prefill(tmp_path):
    """While the lane runs, when it drains, after a stop in the middle of a step."""
    drafter = spec("dflash", tmp_path)
    _, host, fast = arms(drafter, kv_tokens=176)
    engine, probe = fast.engine, host.drafter
    features = Features(LOADED, probe.needs, longest=200)
    stops = SamplingParams(max_tokens=14, stop_token_ids=(4,), min_tokens=5, ignore_eos=True)
    limits = SamplingParams(max_tokens=18, ignore_eos=True)
    for prompt, params in zip(PROMPTS, (limits, stops, limits, stops), strict=True):
        engine.submit(prompt, params)
    checked = laned = 0
    while engine.has_work:
        engine.step()
        for row in engine.scheduler.running:
            count = row.computed
            probe.absorb([Span(Fresh(row.tokens), 0, features.of(row.tokens[:count]))])
            found, expected = kept(fast.drafter, row.pages, count), kept(probe, Fresh.pages, count)
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-3)
            checked += 1
        laned += engine.fast.lane.busy
    assert checked > 10
    assert laned > 3


def test_a_request_that_may_outgrow_the_drafter_stays_on_the_host(tmp_path):
    plain, host, fast = arms(spec("dflash", tmp_path, context=40))
    short = SamplingParams(max_tokens=10, ignore_eos=True)
    long = SamplingParams(max_tokens=24, ignore_eos=True)
    fast.generate(PROMPTS[1:2], short)
    assert fast.drafter.block.forwards == 0
    found = fast.generate(PROMPTS[:1], long)
    assert fast.drafter.block.forwards > 0
    assert ids(found) == ids(plain.generate(PROMPTS[:1], long))
    assert drafts(found) == drafts(host.generate(PROMPTS[:1], long))


def test_blocks_reach_past_the_targets_context(tmp_path):
    short = tiny_model("qwen3", seed=3, vocab=VOCAB, max_position_embeddings=16, **SIZES)
    plain, host, fast = arms(spec("dflash reduced", tmp_path), loaded=short)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    expected, found = plain.generate(PROMPTS[2:], params), fast.generate(PROMPTS[2:], params)
    assert ids(found) == ids(expected)
    assert drafts(found) == drafts(host.generate(PROMPTS[2:], params))
    assert fast.drafter.block.forwards == 0


def test_a_small_pool_preempts(tmp_path):
    """Where a block finds no pages the host goes on without drafts."""
    plain, _, fast = arms(spec("dspark", tmp_path), kv_tokens=64)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    expected = [plain.generate([p], params)[0].token_ids for p in PROMPTS[:2]]
    assert ids(fast.generate(PROMPTS[:2], params)) == expected
    assert fast.engine.scheduler.preemptions > 0
    pool = fast.engine.target.pool
    assert pool.available == pool.num_pages


class Noting(NoneDrafter):
    """Nothing to draft, and a form that is told where rows sit."""

    def __init__(self):
        super().__init__()
        self.told = []

    def entered(self, rows, slots):
        self.told.append({row.request_id: slot for row, slot in zip(rows, slots, strict=True)})


def test_a_form_with_state_is_told_where_rows_sit():
    llm = LLM(LOADED, max_users=2, kv_tokens=256)
    llm.engine.drafter = noting = Noting()
    llm.engine.target.kernels = True
    attach(llm.engine, max_users=2)
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (9, 4, 4)]
    llm.generate(PROMPTS[:3], each)
    assert [set(t) for t in noting.told] == [{0, 1}, {0, 2}, {0}] or [
        set(t) for t in noting.told
    ] == [{0, 1}, {0, 2}]
    assert {t[0] for t in noting.told} == {noting.told[0][0]}, "a row that stays keeps its slot"
    assert noting.told[0][1] == noting.told[1][2], "the slot is given to the next one"
