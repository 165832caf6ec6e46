"""Greedy fp32 tokens equal plain decoding: every drafter, draft_len 1..8, 1 and 16 users, every
parameter that changes tokens, on tiny models of each family and on the embedded model."""

import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from slipstream.engine import LLM
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.types import SamplingParams

DRAFTERS = ["ngram", "suffix", "draft_model"]
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "smollm3"]
TWISTS = [
    {},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 0.7},
    {"logit_bias": {70: 6.0, 71: -100.0}},
    {"bad_words": ("a", "the")},
    {"min_tokens": 12},
    {"stop_token_ids": (60, 61, 62, 63, 64)},
    {"stop": ("e", "t")},
    {"logprobs": 1},
    {"grammar": {"regex": "[a-e ]{6,15}"}},
]


def prompts(count):
    rng = np.random.default_rng(1)
    out = []
    for i in range(count):
        base = rng.integers(10, 300, 6).tolist()
        out.append((base * 6)[: 8 + i])  # repetitive, so that lookup finds something to draft
    return out


@functools.cache
def tiny(family="llama"):
    return LLM(tiny_model(family))


def answers(llm, work, params):
    done = llm.generate(work, params)
    return [(c.token_ids, c.finish_reason, c.text) for c in done], done


@pytest.fixture(scope="module")
def tiny_draft(tmp_path_factory):
    """A tiny draft model with the target's architecture and other weights: often wrong."""
    folder = tmp_path_factory.mktemp("draft") / "tiny"
    save_tiny(folder, seed=1)
    return folder


@pytest.mark.parametrize("twist", TWISTS, ids=lambda t: next(iter(t), "plain"))
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("users", [1, 16])
def test_tiny_model_every_parameter(twist, drafter, users, tiny_draft):
    if drafter == "draft_model":
        drafter = f"draft_model:{tiny_draft}"
    work = prompts(users)
    params = SamplingParams(max_tokens=20, **twist)
    expected, _ = answers(tiny(), work, params)
    for draft_len in range(1, 9):
        found, done = answers(tiny().fork(f"{drafter}:{draft_len}"), work, params)
        assert found == expected
    assert users == 1 or sum(r.drafted for c in done for r in c.records) > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("drafter", ["ngram:5", "suffix:7"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_family(family, drafter, temperature):
    work = prompts(16)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    expected, _ = answers(tiny(family), work, params)
    found, _ = answers(tiny(family).fork(drafter), work, params)
    assert found == expected


@pytest.fixture(scope="module")
def embedded():
    return LLM(dtype="float32", kv_tokens=16 * 512)


CHAT = [
    [{"role": "user", "content": text}]
    for text in (
        "Repeat after me: one two three one two three one two three",
        "Write a Python function that adds two numbers, then one that subtracts them.",
        "List the days of the week, then list them again.",
        "Rewrite this sentence with the name Ann instead of Bob: Bob said that Bob likes tea.",
    )
]


@pytest.mark.parametrize("draft_len", range(1, 9))
def test_embedded_model_one_user(embedded, draft_len, truncated):
    params = SamplingParams(max_tokens=24)
    work = [CHAT[draft_len % len(CHAT)]]
    expected, _ = answers(embedded, work, params)
    for drafter in ("ngram", "suffix", f"draft_model:{truncated}"):
        found, _ = answers(embedded.fork(f"{drafter}:{draft_len}"), work, params)
        assert found == expected


@pytest.fixture(scope="module")
def truncated(embedded, tmp_path_factory):
    """The first three layers of the embedded model, as a draft model with the same tokenizer."""
    root = Path(os.environ.get("SLIPSTREAM_CACHE", Path.home() / ".cache" / "slipstream"))
    source = max(root.glob("smollm2-135m-*"), key=lambda p: p.stat().st_mtime)
    folder = tmp_path_factory.mktemp("truncated") / "three"
    folder.mkdir()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    kept = {
        name: tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if "layers." not in name or int(name.split("layers.")[1].split(".")[0]) < 3
    }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("drafter", ["ngram:3", "ngram:8", "suffix", "draft_model"])
def test_embedded_model_sixteen_users(embedded, drafter, truncated):
    if drafter == "draft_model":
        drafter = f"draft_model:{truncated}:3"
    params = SamplingParams(max_tokens=12, repetition_penalty=1.1)
    expected, _ = answers(embedded, CHAT * 4, params)
    found, _ = answers(embedded.fork(drafter), CHAT * 4, params)
    assert found == expected
