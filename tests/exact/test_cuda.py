"""The same equality on a GPU, where there is one. CI has none: see docs/log.md for runs."""

import pytest
import torch

from slipstream.engine import LLM
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train.recipes import Shape, make
from slipstream.types import SamplingParams
from tests.target.ragged import Ragged, noted, same, targets

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
PROMPTS = [[7, 8, 9] * 5, [3, 4] * 9, list(range(40, 75)), [5] * 12] * 4
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft") / "tiny"
    save_tiny(folder, seed=1, head_dim=16)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_drafter_gives_the_tokens_of_the_cpu(family, temperature, draft):
    torch.backends.cuda.matmul.allow_tf32 = False
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    cpu = LLM(tiny_model(family, head_dim=16), device="cpu")
    gpu = LLM(tiny_model(family, head_dim=16, device="cuda:0"))
    expected = [c.token_ids for c in cpu.generate(PROMPTS, params)]
    assert [c.token_ids for c in gpu.generate(PROMPTS, params)] == expected
    drafters = ["ngram:4,min=1", "suffix:6"] + ([f"draft_model:{draft}:3"] * (temperature == 0.0))
    for drafter in drafters:
        done = gpu.fork(drafter).generate(PROMPTS, params)
        assert [c.token_ids for c in done] == expected, drafter
        assert sum(r.drafted for c in done for r in c.records) > 0


@pytest.mark.parametrize("method", ["dflash", "dflash2", "dspark"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_block_drafters_draft_in_the_captured_step(method, temperature, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    host = tiny_model("llama", head_dim=16)
    rank = {} if method == "dflash" else {"rank": 16}
    shape = Shape(draft_len=7, taps=2, mask_token_id=319, **rank)
    net = make(method, host.model, shape, seed=1)
    net.save(tmp_path, net.tensors)
    expected = LLM(host, device="cpu").generate(PROMPTS, params)
    drafter = f"{method}:{tmp_path}:5"
    gpu = LLM(tiny_model("llama", head_dim=16, device="cuda:0"), drafter=drafter)
    assert gpu.engine.fast is not None
    found = gpu.generate(PROMPTS, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    drafted = [[r.drafted for r in c.records if not r.prefill] for c in found]
    assert all(each[0] == 5 for each in drafted)
    if temperature == 0.0:
        done = LLM(host, device="cpu", drafter=drafter).generate(PROMPTS, params)
        assert drafted == [[r.drafted for r in c.records if not r.prefill] for c in done]


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chain_drafters_draft_in_the_captured_step(method, temperature, tmp_path):
    torch.backends.cuda.matmul.allow_tf32 = False
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
    host = tiny_model("llama", layers=3, head_dim=16)
    net = make(method, host.model, Shape(draft_len=4), seed=1)
    net.save(tmp_path, net.tensors)
    expected = LLM(host, device="cpu").generate(PROMPTS, params)
    drafter = f"{method}:{tmp_path}:4"
    gpu = LLM(tiny_model("llama", layers=3, head_dim=16, device="cuda:0"), drafter=drafter)
    assert gpu.engine.fast is not None
    found = gpu.generate(PROMPTS, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    steps = [[(r.drafted, r.accepted) for r in c.records if not r.prefill] for c in found]
    assert all(each[0][0] == 4 for each in steps)
    if temperature == 0.0:
        done = LLM(host, device="cpu", drafter=drafter).generate(PROMPTS, params)
        assert steps == [
            [(r.drafted, r.accepted) for r in c.records if not r.prefill] for c in done
        ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("warm", [False, True], ids=["as they come", "warm"])
def test_captured_forwards_are_those_launched_one_by_one(family, dtype, warm):
    """Batches exactly at every size, under it, on cached prefixes, and one above the largest."""
    torch.backends.cuda.matmul.allow_tf32 = False
    named = {"head_dim": 16, "max_position_embeddings": 4096}
    loaded = tiny_model(family, device="cuda:0", dtype=dtype, **named)
    both = targets(loaded, rows=16, tokens=600, taps=(0, 2), pages=8192)
    if warm:
        both[1].warm_up()
    sizes, seen = both[1]._padded.padded.sizes, noted(both[1])
    assert len(sizes) == 10
    for size in [*sizes, *reversed(sizes)]:
        ragged = Ragged(both, users=16, longest=2 * size + 60, seed=size)
        first = ragged.step(ragged.lengths(size, min(size, ragged.rng.randrange(1, 17))))
        kept = first.features.clone(), first.logits.clone()
        ragged.step(ragged.lengths(size - 5, ragged.rng.randrange(1, 11)))
        ragged.step([1] * 16)
        assert torch.equal(first.features, kept[0])
        assert torch.equal(first.logits, kept[1])
        assert seen[-3:] == [size, size, 16]
    ragged = Ragged(both, users=2, longest=800)
    ragged.step([1, sizes[-1]])
    assert seen[-1] is None


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_chain_drafters_take_prompts_in_by_captured_passes(method, tmp_path):
    """What they then hold of prompts is what the CPU's passes leave."""
    torch.backends.cuda.matmul.allow_tf32 = False
    host = tiny_model("llama", layers=3, head_dim=16)
    net = make(method, host.model, Shape(draft_len=4), seed=1)
    net.save(tmp_path, net.tensors)
    device = tiny_model("llama", layers=3, head_dim=16, device="cuda:0")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    arms = [LLM(m, drafter=f"{method}:{tmp_path}:4", kv_tokens=4096) for m in (device, host)]
    assert arms[0].drafter._prompts is not None
    for prompt in PROMPTS[:4]:
        found = [held(arm, prompt, params) for arm in arms]
        for mine, theirs in zip(*found, strict=True):
            same(mine, theirs)


def held(llm, prompt, params):
    """What a chain drafter's layers hold of a prompt right after it was read."""
    llm.engine.submit(prompt, params)
    llm.engine.step()
    (row,) = llm.engine.rows
    size, pages = llm.engine.target.pool.page_size, row.table.pages
    slots = torch.tensor([pages[i // size] * size + i % size for i in range(len(prompt))])
    found = [layer[slots.to(layer.device)].cpu() for layer in llm.drafter.storage]
    llm.engine.cancel(row.request_id)
    return found
