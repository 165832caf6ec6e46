"""Chain drafters in the fast lane, through Triton's interpreter: what the host's path drafts."""

import tests.interpreter  # noqa: F401, I001 - first

import pytest
import torch

from slipstream.drafters import chain_prompts
from slipstream.engine import LLM
from slipstream.engine.fast import attach
from slipstream.models.config import from_hf
from slipstream.models.cuda import chain, layers
from slipstream.models.eagle3 import Eagle3Config, save_eagle3
from slipstream.models.mtp import head_config, save_mtp
from slipstream.models.mtp_gated import gated_config, save_gated
from slipstream.models.tiny import tiny_model
from slipstream.train.eagle3 import draft_config
from slipstream.types import SamplingParams

torch.set_num_threads(1)
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
# So few tokens that random drafts are often right.
LOADED = tiny_model("llama", layers=2, vocab=12, intermediate_size=40, **SIZES)
PROMPTS = [[7, 8, 9] * 5, [3, 4] * 9, [*range(3, 12)] * 2, [5] * 12, [11, 4, 3, 8] * 3]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def randoms(shapes, seed):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (1.0 if "norm" in name else 0.0) + 0.1 * torch.randn(shape, generator=generator)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


def eagle(folder, seed, *, depth=1, context=512, **flags):
    hf = {**draft_config(LOADED.config).model.hf, "num_hidden_layers": depth}
    hf["max_position_embeddings"] = context
    if depth > 1:
        hf |= {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
    config = Eagle3Config(from_hf(hf, source="x"), (1, 2), **flags)
    tensors = randoms(config.shapes, seed)
    if "d2t" in tensors:
        tensors["d2t"] = 1 + torch.arange(flags["draft_vocab"])  # draft token i is token 2 * i + 1
    save_eagle3(folder, config, tensors)
    return f"eagle3:{folder}"


def mtp(folder, seed, **sizes):
    config = head_config(LOADED.config, **sizes)
    tensors = randoms(config.shapes, seed)
    if "d2t" in tensors:
        tensors["d2t"] = 1 + torch.arange(sizes["draft_vocab"])
    save_mtp(folder, config, tensors)
    return f"mtp:{folder}"


def gated(folder, seed):
    own = {**LOADED.config.hf, "model_type": "qwen3_5_text", "head_dim": 16}
    own["partial_rotary_factor"] = 0.25
    config = gated_config(own, LOADED.config, source="x")
    save_gated(folder, config, randoms(config.shapes, seed))
    return f"mtp:{folder}"


# The seeds are those of drafters that are right now and then.
METHODS = {
    "eagle3": lambda folder: eagle(folder, 53),
    "eagle3, two layers": lambda folder: eagle(folder, 29, depth=2, norm_output=True),
    "eagle3, few tokens": lambda folder: eagle(
        folder, 23, draft_vocab=6, norm_before_fc=True, fc_norm=True, norm_before_residual=True
    ),
    "mtp": lambda folder: mtp(folder, 26),
    "mtp, few tokens": lambda folder: mtp(folder, 104, draft_vocab=6),
    "gated mtp": lambda folder: gated(folder, 45),
}


@pytest.fixture(scope="module", params=METHODS)
def spec(request, tmp_path_factory):
    return METHODS[request.param](tmp_path_factory.mktemp("drafter")) + ":3"


@pytest.fixture(scope="module")
def light(tmp_path_factory):
    """A drafter whose passes take the interpreter least time."""
    return mtp(tmp_path_factory.mktemp("drafter"), 26) + ":3"


def trio(spec, *, padded=False, **kwargs):
    """The same weights three times: without drafts, the host's drafts, and the lane. `padded`:
    prompts there run as on a GPU.
    """
    kwargs = {"max_users": 4, "kv_tokens": 2048, **kwargs}
    plain = LLM(LOADED, **kwargs)
    host, fast = plain.fork(spec), plain.fork(spec)
    fast.engine.target.kernels = True
    attach(fast.engine, max_users=kwargs["max_users"])
    if padded:
        room = {"rows": kwargs["max_users"], "tokens": 64}
        fast.engine.target.pad(**room)
        fast.engine.drafter.pad(**room, positions=fast.engine.target.positions)
    assert fast.engine.fast is not None
    assert not fast.engine.drafts_beside_prompts
    fast.engine.drafts_beside_prompts = True  # every draft of the host's can be compared then
    return plain, host, fast


def watched(llm):
    """What is drafted from now on, by (request, length of its text), and how much in the lane."""
    log, drafter, fast = {}, llm.engine.drafter, llm.engine.fast
    draft, counts = drafter.draft, [0]

    def drafted(rows, lens):
        made = draft(rows, lens)
        for i, row in enumerate(rows):
            log[row.request_id, len(row.tokens)] = list(made.row(i))
        return made

    drafter.draft = drafted
    if fast is not None:
        lane, launch = fast.lane, fast.lane.launch

        def launched(rows, given=None):
            done = launch(rows, given)
            if done:
                slots, step = lane._slots, lane.current
                for i, row in enumerate(lane._members):
                    slot = int(step.slot_of[i])
                    fed, start = int(slots.length[slot]), int(slots.start[slot])
                    if fed:
                        log[row.request_id, start + 1] = step.drafts[i, : fed - 1].tolist()
                        counts[0] += fed - 1
            return done

        lane.launch = launched
    return log, counts


def ids(completions):
    return [c.token_ids for c in completions]


def steps(completions):
    return [[(r.depth, r.drafted, r.accepted) for r in c.records] for c in completions]


def same_drafts(spec, prompts, params, *, exactly=True, watch=None, **kwargs):
    """Tokens and every single draft token are the host's, and `exactly`: all that was accepted;
    what was drafted in the lane, what was accepted there, and both arms.

    Not exactly: pages run short at other times, but wherever both draft, they draft the same.
    """
    plain, host, fast = trio(spec, **kwargs)
    if watch is not None:
        watch(fast)
    expected = ids(plain.generate(prompts, params))
    host.engine.drafter.on_device()  # as greedy as in the lane
    wanted, _ = watched(host)
    found, laned = watched(fast)
    before, after = host.generate(prompts, params), fast.generate(prompts, params)
    assert ids(before) == ids(after) == expected
    if exactly:
        assert steps(after) == steps(before)
        assert {key: found.get(key) for key in wanted} == wanted
    both = [(found[k], wanted[k]) for k in found.keys() & wanted.keys() if found[k] and wanted[k]]
    assert both
    for ours, theirs in both:
        width = min(len(ours), len(theirs))
        assert ours[:width] == theirs[:width]
    return laned[0], sum(r.accepted for c in after for r in c.records), (host, fast)


VARIED = [PROMPTS[2], PROMPTS[4]]


def sizes_of(padded):
    """Sizes that passes of a padded forward have from now on; None for one that is not padded."""
    seen, fit = [], padded.fit

    def noting(tokens, rows):
        found = fit(tokens, rows)
        seen.append(found and found[0].shape.tokens)
        return found

    padded.fit = noting
    return seen


def test_the_lane_drafts_what_the_host_drafts(spec):
    laned, accepted, _ = same_drafts(spec, VARIED, GREEDY)
    assert laned > 30
    assert accepted >= 5


@pytest.mark.parametrize("method", ["eagle3, two layers", "mtp"])
def test_the_kernels_for_few_rows_draft_the_same(method, tmp_path, monkeypatch):
    """They serve bfloat16; in float32 their sums can be compared with the host's."""
    for module in (layers, chain):
        monkeypatch.setattr(module, "few", lambda x, weight: len(x) <= 16)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    laned, *_ = same_drafts(METHODS[method](tmp_path) + ":3", VARIED[:1], params)
    assert laned > 5


@pytest.mark.parametrize("method", ["eagle3, two layers", "eagle3, few tokens", "mtp", "gated mtp"])
def test_padded_prompts_are_taken_in_as_the_host_does(method, tmp_path, monkeypatch):
    """Chunk by chunk, beside rows that decode, and what the lane's last step saw."""
    passes = []
    made = chain_prompts.Padded

    def noted(*args, **named):
        passes.append(made(*args, **named))
        return passes[-1]

    monkeypatch.setattr(chain_prompts, "Padded", noted)
    spec, sizes = METHODS[method](tmp_path) + ":3", []

    def watch(llm):
        sizes.append(sizes_of(passes[-1]))

    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (4, 7, 5)]
    prompts = [PROMPTS[2], PROMPTS[4], [*PROMPTS[2], 5, 9, 3]]
    laned, *_ = same_drafts(
        spec, prompts, each, padded=True, watch=watch, max_users=2, prefill_chunk=24
    )
    assert laned > 5
    assert set(sizes[0]) == {16, 64}


def test_passes_too_large_to_pad_run_all_the_same(light):
    long = [(PROMPTS[2] * 5)[:n] for n in (50, 45)]
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    laned, *_ = same_drafts(light, long, params, padded=True, prefill_chunk=200)
    assert laned > 2


def test_sampled_requests_are_drafted_greedily_and_keep_their_tokens(light):
    each = [
        SamplingParams(max_tokens=10, temperature=0.8, top_p=0.9, seed=3, ignore_eos=True),
        GREEDY,
    ]
    laned, *_ = same_drafts(light, VARIED, each)
    assert laned > 20


def test_the_lane_is_left_and_entered_again(light):
    """Requests that it does not do join and leave; slots go to others."""
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (14, 4, 9, 3, 8)]
    each[1] = SamplingParams(max_tokens=4, repetition_penalty=1.3, ignore_eos=True)
    each[3] = SamplingParams(max_tokens=3, logprobs=2, ignore_eos=True)
    prompts = [PROMPTS[2], PROMPTS[0], PROMPTS[4], PROMPTS[3], [5, 6, 7]]
    laned, *_ = same_drafts(light, prompts, each, max_users=2)
    assert laned > 20


def test_a_small_pool_preempts_and_prompts_are_taken_over(light):
    each = SamplingParams(max_tokens=16, ignore_eos=True)
    shared = [[*PROMPTS[2], *PROMPTS[4], 5, 6, 3, 9, n] for n in (3, 4)]
    laned, _, arms = same_drafts(light, shared, each, exactly=False, kv_tokens=80, max_users=2)
    assert laned > 20
    assert [arm.engine.scheduler.preemptions > 0 for arm in arms] == [True, True]
    pool = arms[1].engine.target.pool
    assert pool.available == pool.num_pages
    found = arms[1].generate(shared[:1], each)  # what is left of the cache is right
    assert found[0].cached_tokens > 0
    assert ids(found) == ids(arms[0].generate(shared[:1], each))


def test_a_row_drafts_up_to_the_end_of_the_drafters_context(tmp_path):
    """One that may outgrow it stays on the host, where it stops drafting."""
    spec = eagle(tmp_path, 53, context=26) + ":3"
    each = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (8, 12)]
    for params, in_lane in ((each[0], True), (each[1], False)):
        laned, *_ = same_drafts(spec, VARIED[:1], params)
        assert (laned > 0) is in_lane


def test_a_row_without_a_state_drafts_once_it_has_one(light):
    plain, host, fast = trio(light)
    fast.engine.fast.lane._form._known = {}  # the host knows of nobody
    wanted, _ = watched(host)
    found, _ = watched(fast)
    before, after = host.generate(VARIED[:1], GREEDY), fast.generate(VARIED[:1], GREEDY)
    assert ids(before) == ids(after) == ids(plain.generate(VARIED[:1], GREEDY))
    first, *rest = [key for key in sorted(found) if key in wanted]
    assert (found[first], len(wanted[first])) == ([], 3)
    assert rest
    assert all(found[key] == wanted[key] for key in rest)
