"""The EAGLE-3 recipe: the network that is trained is the one that is served, and it learns."""

import re
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.engine import LLM
from slipstream.models.eagle3 import save_eagle3
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train.data import Features, own_answers
from slipstream.train.eagle3 import Eagle3Network, draft_config
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import SamplingParams

torch.set_num_threads(1)
LOADED = tiny_model("llama", layers=4)
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
PROMPT = list(range(20, 30))


def network(steps=4, **flags):
    config = draft_config(LOADED.config)
    config = type(config)(config.model, config.taps, **flags)
    return Eagle3Network(config, LOADED.model, steps=steps, seed=1)


@pytest.mark.parametrize("flags", [{}, {"norm_output": True}, {"norm_before_residual": True}])
def test_the_trained_network_is_the_served_one(tmp_path, flags):
    """Teacher-forced logits equal the served ones wherever the draft was the text's own."""
    net = network(**flags)
    for tensor in net.tensors.values():
        tensor.data = tensor.data.bfloat16().float()
    save_eagle3(tmp_path, net.config, {n: t.detach() for n, t in net.tensors.items()})
    arm = LLM(LOADED, drafter=f"eagle3:{tmp_path}:4", prefill_chunk=16)
    weights, served = arm.drafter.weights, []
    real = type(weights).logits

    def logits(self, states, vocab):
        served.append(real(self, states, vocab))
        return served[-1]

    type(weights).logits = logits
    try:
        (done,) = arm.generate([PROMPT * 4], GREEDY)
    finally:
        type(weights).logits = real
    tokens = [*PROMPT * 4, *done.token_ids]
    features = Features(LOADED, net.needs, longest=200).of(tokens)
    starts = [r.depth - 1 for r in done.records if r.drafted]
    with torch.no_grad():
        trained = net.logits(features, torch.tensor(tokens), torch.tensor(starts))
    at = compared = 0
    for record, expected in zip([r for r in done.records if r.drafted], trained, strict=True):
        # The pass that drafts token k was fed draft tokens up to k - 1: alike while they held.
        for k in range(min(record.drafted, record.accepted + 1)):
            torch.testing.assert_close(served[at + k][0], expected[k], atol=2e-3, rtol=1e-3)
            compared += 1
        at += record.drafted
    assert at == len(served)
    assert compared > 40


def test_one_text_is_learned_and_served(tmp_path):
    llm = LLM(LOADED)
    answer = replace(GREEDY, max_tokens=30)
    texts = own_answers(llm, [PROMPT], answer)
    said = []
    plan = Plan(steps=400, texts=1, anchors=28, lr=6e-3, held_out=0, report_every=200)
    trainer = Trainer(LOADED, network(), texts, plan, out=tmp_path, say=said.append)
    trainer.run()
    assert trainer.acceptance().tokens_per_step > 4.8
    assert re.match(r"step 400/400 .* tokens/step [45]\.\d", said[-1])
    (done,) = llm.fork(f"eagle3:{tmp_path}:4").generate([PROMPT], answer)
    assert (*PROMPT, *done.token_ids) == texts[0].tokens
    drafts = [r for r in done.records if r.drafted == 4]
    assert sum(r.accepted for r in drafts) > 3.6 * len(drafts)


def test_the_command_line_trains_it(tmp_path):
    save_tiny(tmp_path / "target")
    out, prompts = tmp_path / "drafter", tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "say it again"}\n{"text": "and once more"}\n')
    command = ["train", "eagle3", "--target", str(tmp_path / "target"), "--out", str(out)]
    options = ["--steps", "2", "--max-tokens", "16", "--device", "cpu", "--draft-len", "3"]
    done = CliRunner().invoke(app, [*command, *options, "--prompts", str(prompts)])
    assert done.exit_code == 0, done.output
    assert "drafts up to 3 tokens" in (out / "README.md").read_text()
    arm = LLM(str(tmp_path / "target"), dtype="float32", drafter=f"eagle3:{out}:3")
    assert arm.generate(["say it again"], SamplingParams(max_tokens=8))[0].token_ids
