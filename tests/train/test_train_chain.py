"""Recipes of drafters that go token by token: what is trained is what is served, and it learns."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig
from slipstream.models.mtp import head_config
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train.data import Features, own_answers, text_of
from slipstream.train.eagle3 import Eagle3Network, draft_config
from slipstream.train.mtp import MtpNetwork
from slipstream.train.recipes import Shape, make
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import SamplingParams

torch.set_num_threads(1)
LOADED = {family: tiny_model(family, layers=4) for family in ("llama", "qwen2", "qwen3")}
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
PROMPT = list(range(20, 30))


def eagle3(family="llama", steps=4, **flags):
    loaded = LOADED[family]
    config = draft_config(loaded.config)
    config = type(config)(config.model, config.taps, **flags)
    return Eagle3Network(config, loaded.model, steps=steps, seed=1)


def mtp(family="llama", steps=4):
    loaded = LOADED[family]
    return MtpNetwork(head_config(loaded.config), loaded.model, steps=steps, seed=1)


NETWORKS = {
    "eagle3": lambda: eagle3(),
    "eagle3 norm_output": lambda: eagle3(norm_output=True),
    "eagle3 norm_before_residual": lambda: eagle3(norm_before_residual=True),
    "mtp": lambda: mtp(),
    "mtp qwen2": lambda: mtp("qwen2"),
    "mtp qwen3": lambda: mtp("qwen3"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_trained_network_is_the_served_one(tmp_path, name):
    """Teacher-forced logits equal the served ones wherever the draft was the text's own."""
    net = NETWORKS[name]()
    family = name.split()[-1] if name.startswith("mtp q") else "llama"
    for tensor in net.tensors.values():
        tensor.data = tensor.data.bfloat16().float()  # what is saved
    net.save(tmp_path, net.tensors)
    arm = LLM(LOADED[family], drafter=f"{net.recipe}:{tmp_path}:4", prefill_chunk=16)
    weights, served = type(arm.drafter.weights), []
    real = weights.logits

    def logits(self, states, vocab):
        served.append(real(self, states, vocab))
        return served[-1]

    weights.logits = logits
    try:
        (done,) = arm.generate([PROMPT * 4], GREEDY)
    finally:
        weights.logits = real
    tokens = [*PROMPT * 4, *done.token_ids]
    drafts = [r for r in done.records if r.drafted]
    with torch.no_grad():
        starts = np.array([[r.depth - 1 for r in drafts]])
        batch = Features(LOADED[family], net.needs, longest=200).batch(
            [text_of(tokens, [])], starts
        )
        (trained,) = net.logits(batch)
    at = compared = 0
    for record, expected in zip(drafts, trained, strict=True):
        # The pass that drafts token k was fed draft tokens up to k - 1: alike while they held.
        for k in range(min(record.drafted, record.accepted + 1)):
            torch.testing.assert_close(served[at + k][0], expected[k], atol=2e-3, rtol=1e-3)
            compared += 1
        at += record.drafted
    assert at == len(served)
    assert compared > 40


@pytest.mark.parametrize("recipe", ["eagle3", "mtp"])
def test_one_text_is_learned_and_served(tmp_path, recipe):
    llm = LLM(LOADED["llama"])
    answer = replace(GREEDY, max_tokens=30)
    texts = own_answers(llm, [PROMPT], answer)
    said = []
    steps, lr = {"eagle3": (400, 6e-3), "mtp": (150, 4e-3)}[recipe]
    plan = Plan(steps=steps, batch=1, anchors=28, lr=lr, held_out=0, reports=2)
    net = NETWORKS[recipe]()
    trainer = Trainer(LOADED["llama"], net, texts, plan, out=tmp_path, say=said.append)
    trainer.run()
    assert trainer.acceptance().tokens_per_step > 4.8
    assert re.match(rf"step {steps}/{steps} .* tokens/step [45]\.\d", said[-1])
    (done,) = llm.fork(f"{recipe}:{tmp_path}:4").generate([PROMPT], answer)
    assert [*PROMPT, *done.token_ids] == texts[0].tokens.tolist()
    drafts = [r for r in done.records if r.drafted == 4]
    assert sum(r.accepted for r in drafts) > 3.6 * len(drafts)


@pytest.mark.parametrize(
    ("recipe", "given", "says"),
    [
        ("eagle3", {"layers": 2}, "layers is 2; eagle3 does not take it, dflash, dspark do"),
        ("mtp", {"taps": 2}, "taps is 2; mtp does not take it, dflash, dspark do"),
        ("dspark", {"d_pace": True}, "d_pace is True; dspark does not take it, dflash do"),
        ("dflash", {"rank": 8}, "rank is 8; dflash does not take it, dspark do"),
        ("mtp", {"draft_len": 0}, "draft_len is 0; allowed: 1 to 32"),
        ("dflash", {"draft_len": 33}, "draft_len is 33; allowed: 1 to 32"),
        ("eagle9", {}, "recipe is 'eagle9'; choose one of mtp, eagle3, dflash, dspark"),
    ],
)
def test_what_a_recipe_does_not_take_is_said(recipe, given, says):
    with pytest.raises(InvalidConfig, match=says):
        make(
            recipe,
            LOADED["llama"].model,
            Shape(**{"draft_len": 4, "mask_token_id": 1, **given}),
            seed=0,
        )


@pytest.mark.parametrize("recipe", ["eagle3", "mtp"])
def test_the_command_line_trains_it(tmp_path, recipe):
    save_tiny(tmp_path / "target")
    out, prompts = tmp_path / "drafter", tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "say it again"}\n{"text": "and once more"}\n')
    command = ["train", recipe, "--target", str(tmp_path / "target"), "--out", str(out)]
    options = ["--steps", "2", "--max-tokens", "16", "--device", "cpu", "--draft-len", "3"]
    done = CliRunner().invoke(app, [*command, *options, "--prompts", str(prompts)])
    assert done.exit_code == 0, done.output
    assert "drafts up to 3 tokens" in (out / "README.md").read_text()
    arm = LLM(str(tmp_path / "target"), dtype="float32", drafter=f"{recipe}:{out}:3")
    assert arm.generate(["say it again"], SamplingParams(max_tokens=8))[0].token_ids
