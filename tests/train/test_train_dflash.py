"""The DFlash recipe: the network that is trained is the one that is served, and it learns."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig
from slipstream.lab.cards import NEEDED, TRAINING, read_record
from slipstream.models.dflash import DFlashConfig, save_dflash
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train.data import Features, Text, own_answers, self_prompts, text_of
from slipstream.train.dflash import DFlashNetwork, Shape, block_loss, draft_config
from slipstream.train.recipe import Batch, hard, labels
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import SamplingParams

torch.set_num_threads(1)
LOADED = tiny_model("llama")
GREEDY = SamplingParams(max_tokens=100, ignore_eos=True)
PROMPT = list(range(20, 30))


def network(*, seed=1, **shape) -> tuple[DFlashConfig, DFlashNetwork]:
    config = draft_config(LOADED.config, Shape(**{"taps": 2, **shape}), mask_token_id=319)
    return config, DFlashNetwork(config, LOADED.model, seed=seed)


class SeesLogits:
    """Keeps the logits of every block pass of a drafter."""

    def __init__(self, drafter):
        self.drafter, self.seen, self.forward = drafter, [], drafter.block.forward
        drafter.block.forward = self

    def __call__(self, rows):
        out = self.forward(rows)
        at = 0
        for row in rows:
            self.seen.append((row.start, out.logits[at : at + row.logits]))
            at += row.logits
        return out


def test_the_target_makes_up_its_own_prompts():
    """A random model rarely writes words; here its decoder is told to."""
    llm = LLM(LOADED)
    real, seen = llm.generate, []

    def generate(prompts, params):
        seen.append((prompts, params))
        done = real(prompts, params)
        return [replace(c, text=f"tell me about {i} again") for i, c in enumerate(done)]

    llm.generate = generate
    found = self_prompts(llm, 3, seed=5)
    assert [m["content"] for (m,) in found] == [f"tell me about {i} again" for i in range(3)]
    prompts, params = seen[0]
    assert llm.tokenizer.decode(prompts[0]).endswith("user\n")
    assert all(p.stop == ("<|im_end|>",) for p in params)
    assert len({p.seed for p in params}) == 3
    llm.generate = real
    assert self_prompts(llm, 1, seed=5) == []


@pytest.mark.parametrize("layers", [1, 3])
def test_the_trained_network_is_the_served_one(tmp_path, layers):
    config, net = network(layers=layers)
    for tensor in net.tensors.values():
        tensor.data = tensor.data.bfloat16().float()  # what is saved
    save_dflash(tmp_path, config, {n: t.detach() for n, t in net.tensors.items()})
    arm = LLM(LOADED, drafter=f"dflash:{tmp_path}:7", prefill_chunk=16)
    spy = SeesLogits(arm.drafter)
    (done,) = arm.generate([PROMPT * 4], GREEDY)
    tokens = [*PROMPT * 4, *done.token_ids]
    anchors = np.array([[start for start, _ in spy.seen]])
    assert anchors.size > 20
    with torch.no_grad():
        batch = Features(LOADED, config.taps, longest=200).batch([text_of(tokens, [])], anchors)
        (trained,) = net.logits(batch)
    for (_, served), expected in zip(spy.seen, trained, strict=True):
        torch.testing.assert_close(served[1:], expected, atol=2e-3, rtol=1e-3)


def test_one_text_is_learned_and_served_in_whole_blocks(tmp_path):
    llm = LLM(LOADED)
    texts = own_answers(llm, [PROMPT], GREEDY)
    _, net = network()
    said = []
    plan = Plan(steps=150, batch=1, anchors=48, lr=3e-3, held_out=0, reports=3)
    trainer = Trainer(LOADED, net, texts, plan, out=tmp_path, say=said.append)
    trainer.run()
    assert trainer.acceptance().tokens_per_step > 7.8
    assert len(said) >= 3
    assert re.match(r"step 150/150 .* trained-on acceptance [\d. ]+ tokens/step [78]\.\d", said[-1])
    arm = llm.fork(f"dflash:{tmp_path}:7")
    (done,) = arm.generate([PROMPT], GREEDY)
    assert [*PROMPT, *done.token_ids] == texts[0].tokens.tolist()
    drafts = [r for r in done.records if r.drafted == 7]
    assert sum(r.accepted for r in drafts) > 6.5 * len(drafts)
    # In the engine as teacher-forced: both count the same blocks of the same text.
    again = LLM(LOADED, drafter=f"dflash:{tmp_path}:7", prefix_cache=False)
    assert [c.token_ids for c in again.generate([PROMPT] * 3, GREEDY)] == [done.token_ids] * 3


def test_a_stopped_training_goes_on_where_it_was(tmp_path):
    texts = [Text(np.random.default_rng(i).integers(3, 300, 40, np.int32), 8) for i in range(3)]
    plan = Plan(steps=12, batch=2, anchors=8, held_out=0.3, reports=3)

    def trained(folder, stop=None):
        _, net = network()
        trainer = Trainer(LOADED, net, texts, plan, out=folder, say=lambda _: None)
        assert len(trainer.held) == 1
        if stop is not None:
            step = trainer._train
            trainer._train = lambda: step() if trainer.step < stop else 1 / 0
            with pytest.raises(ZeroDivisionError):
                trainer.run()
        else:
            trainer.run()
        return net

    whole = trained(tmp_path / "whole")
    trained(tmp_path / "cut", stop=9)
    resumed = trained(tmp_path / "cut")
    for name, tensor in whole.tensors.items():
        torch.testing.assert_close(resumed.tensors[name], tensor)
    _, net = network()
    other = Plan(steps=12, batch=2, anchors=8, held_out=0.3, lr=1e-3, reports=3)
    with pytest.raises(InvalidConfig, match="checkpoint of another training"):
        Trainer(LOADED, net, texts, other, out=tmp_path / "cut")


def test_losses():
    tokens = torch.tensor([[5, 6, 7, 8, 0]])
    batch = Batch(tokens, torch.tensor([4]), torch.tensor([[0, 2]]), torch.zeros(1, 5, 1, 2))
    wanted, there = labels(batch, 3)
    assert wanted[0, 0].tolist() == [6, 7, 8]
    assert there.tolist() == [[[True] * 3, [True, False, False]]]
    logits = torch.zeros(1, 2, 3, 10)
    logits[0, 0, 0, 6] = 30.0
    for d_pace in (False, True):
        logits.requires_grad_()
        value = block_loss(hard(logits, wanted), there, d_pace=d_pace)
        (slope,) = torch.autograd.grad(value, logits)
        assert slope[0, 1, 1:].abs().max() == 0  # what does not exist teaches nothing
        assert slope[0, 0, 1].abs().sum() > slope[0, 0, 2].abs().sum() > 0  # early masks count more


def test_the_command_line_trains_and_writes_a_card(tmp_path):
    save_tiny(tmp_path / "target")
    out = tmp_path / "drafter"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": f"say {i} again"}) for i in range(6)))
    command = ["train", "dflash", "--target", str(tmp_path / "target"), "--out", str(out)]
    options = ["--steps", "3", "--taps", "2", "--max-tokens", "24", "--device", "cpu"]
    done = CliRunner().invoke(app, [*command, *options, "--prompts", str(prompts)])
    assert done.exit_code == 0, done.output
    assert "step 3/3" in done.output
    assert {f.name for f in out.iterdir()} >= {"config.json", "model.safetensors", "loss.svg"}
    card = (out / "README.md").read_text()
    assert "6 answers" in card
    assert "held-out" in card
    record = read_record(out / TRAINING, NEEDED)
    assert record["seed"] == 0
    assert record["recipe"]["name"] == "dflash"
    assert record["recipe"]["steps done"] == 3
    assert 0 < record["tokens"] <= 6 * 24
    assert record["tokens_per_step"] == pytest.approx(1 + sum(record["by_position"]))
    arm = LLM(str(tmp_path / "target"), dtype="float32", drafter=f"dflash:{out}:7")
    assert arm.generate(["say 1 again"], SamplingParams(max_tokens=8))[0].token_ids
    silent = CliRunner().invoke(app, [*command[:4], "--out", str(tmp_path / "no"), "--count", "1"])
    assert silent.exit_code == 2
    assert "made up no prompt; give a file of prompts" in silent.output
    bad = CliRunner().invoke(app, ["train", "eagle9", "--out", str(out)])
    assert bad.exit_code == 2
    assert "recipe is 'eagle9'; choose one of mtp, eagle3, dflash, dflash2, dspark" in bad.output
