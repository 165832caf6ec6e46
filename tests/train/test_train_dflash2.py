"""The DFlash2 recipe: what is trained is what is served, it learns, and the selector's loss."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.drafters.dflash2 import DFlash2Drafter
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig
from slipstream.models.dflash2 import AFTER, BEFORE, DFlash2Config
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train.data import Features, own_answers
from slipstream.train.dflash import Shape, block_loss, draft_config
from slipstream.train.dflash2 import DFlash2Network
from slipstream.train.recipe import labels
from slipstream.train.recipes import Shape as AnyShape
from slipstream.train.recipes import make
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import SamplingParams

torch.set_num_threads(1)
LOADED = tiny_model("llama", layers=3)
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
PROMPT = list(range(20, 30))


def network(*, layers=1, d_pace=False, **sizes):
    base = draft_config(LOADED.config, Shape(layers=layers, taps=2), mask_token_id=319)
    sizes = {"kernel": 2, "group": 16, "rank": 16, "top_k": 8, **sizes}
    return DFlash2Network(DFlash2Config(base, **sizes), LOADED.model, seed=1, d_pace=d_pace)


def stirred(net):
    """Nothing left of the silent beginning, and rounded as it is saved."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in net.tensors.items():
        if "kernel" in name or "codebook" in name:
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.data = tensor.data + (1.5 if "codebook" in name else 0.2) * noise
        tensor.data = tensor.data.bfloat16().float()
    return net


def batch_of(net, *texts, every=5):
    where = np.array([np.arange(2, min(map(len, texts)) - 1, every)] * len(texts))
    return Features(LOADED, net.needs, longest=400).batch([list(t) for t in texts], where)


@pytest.mark.parametrize(
    "sizes", [{}, {"layers": 2, "kernel": 3, "group": 8, "multiplier": 1.5, "softcap": 9.0}]
)
def test_the_trained_network_is_the_served_one(tmp_path, sizes, monkeypatch):
    net = stirred(network(**sizes))
    net.save(tmp_path, net.tensors)
    served, real = [], DFlash2Drafter._scores

    def scores(self, lanes, logits, hidden):
        served.append(real(self, lanes, logits, hidden))
        return served[-1]

    monkeypatch.setattr(DFlash2Drafter, "_scores", scores)
    arm = LLM(LOADED, drafter=f"dflash2:{tmp_path}:7", prefill_chunk=16)
    (done,) = arm.generate([PROMPT * 4], GREEDY)
    tokens = [*PROMPT * 4, *done.token_ids]
    drafts = [r for r in done.records if r.drafted]
    starts = np.array([[r.depth - 1 for r in drafts]])
    with torch.no_grad():
        batch = Features(LOADED, net.needs, longest=200).batch([tokens], starts)
        (ids,), (trained,) = net.scores(batch)
    at = compared = 0
    for record, own, expected in zip(drafts, ids, trained, strict=True):
        for k in range(min(record.drafted, record.accepted + 1)):
            found, candidates = served[at + k]
            assert candidates[0].tolist() == own[k].tolist()
            torch.testing.assert_close(found[0], expected[k], atol=2e-3, rtol=1e-3)
            compared += 1
        at += record.drafted
    assert compared > 40


def test_one_text_is_learned_and_served_in_whole_blocks(tmp_path):
    llm = LLM(LOADED)
    texts = own_answers(llm, [PROMPT], GREEDY)
    net = network()
    plan = Plan(steps=200, texts=1, anchors=32, lr=5e-3, held_out=0, report_every=100)
    trainer = Trainer(LOADED, net, texts, plan, out=tmp_path, say=lambda _: None)
    trainer.run()
    assert trainer.acceptance().tokens_per_step > 7.8
    (done,) = llm.fork(f"dflash2:{tmp_path}:7").generate([PROMPT], GREEDY)
    assert (*PROMPT, *done.token_ids) == texts[0].tokens
    drafts = [r for r in done.records if r.drafted == 7]
    assert sum(r.accepted for r in drafts) > 6.5 * len(drafts)


def test_it_begins_as_a_dflash():
    net = network()
    batch = batch_of(net, range(30, 70))
    ids, scores = net.scores(batch)
    logits = net.logits(batch)
    torch.testing.assert_close(scores, logits.gather(-1, ids))
    assert net.tensors[BEFORE].abs().min() > 0
    assert bool((net.tensors[AFTER] == 0).all())
    for name, tensor in net.tensors.items():
        if name.endswith("base_kernel"):
            assert bool((tensor[:, 0] == 1).all() & (tensor[:, 1:] == 0).all())
        if name.endswith("kernel_projection.weight"):
            assert bool((tensor == 0).all())


@pytest.mark.parametrize("d_pace", [False, True])
def test_the_loss_is_the_block_loss_and_the_selectors_where_it_can_choose(d_pace):
    """Term by term: the text's token before, and nothing where the text's token is no candidate."""
    net = stirred(network(d_pace=d_pace, top_k=100))
    batch = batch_of(net, range(30, 65), range(90, 130))
    wanted, there = labels(batch, 7)
    ids, scores = net.scores(batch)
    logits = net.logits(batch)
    base = block_loss(logits, wanted, there, d_pace=d_pace)
    each = -logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
    total = torch.zeros(())
    weights = 0.0
    covered = missed = 0
    for text in range(2):
        for block in range(wanted.shape[1]):
            right = (0.5 * torch.exp(-each[text, block]) + 0.5) * there[text, block]
            alive = right.cumprod(0)
            for k in range(7):
                weight = float(alive[k:].sum().detach()) if d_pace else np.exp(-k / 4.0)
                weight *= bool(there[text, block, k])
                weights += weight
                candidates = ids[text, block, k].tolist()
                gold = int(wanted[text, block, k])
                if gold not in candidates:
                    missed += 1
                    continue
                covered += 1
                law = scores[text, block, k].log_softmax(0)
                total = total - weight * law[candidates.index(gold)]
    assert covered > 10
    assert missed > 10
    torch.testing.assert_close(net.loss(batch), base + total / weights, atol=1e-4, rtol=1e-4)


def test_the_selector_teaches_the_layers_too(monkeypatch):
    """Gradients reach the backbone through scores and states alike."""
    net = stirred(network(top_k=200))
    batch = batch_of(net, range(30, 65))
    slopes = {}
    for alpha in (0.0, 1.0):
        monkeypatch.setattr("slipstream.train.dflash2._ALPHA", alpha)
        names = ["fc.weight", "layers.0.mlp.down_proj.weight", BEFORE, AFTER]
        wrt = [net.tensors[n] for n in names]
        slopes[alpha] = torch.autograd.grad(net.loss(batch), wrt)
    for one, other in zip(slopes[0.0][:2], slopes[1.0][:2], strict=True):
        assert (one - other).norm() > 0.01 * one.norm()
    assert all(float(s.norm()) == 0 for s in slopes[0.0][2:])
    assert all(float(s.norm()) > 0 for s in slopes[1.0][2:])


def test_the_selector_keeps_no_logits_of_the_whole_vocabulary():
    """Backward holds the head's logits and the block loss's log-probabilities, nothing more."""
    net = network()
    batch = batch_of(net, range(30, 65))
    rows = batch.anchors.numel() * 7
    kept = set()

    def pack(tensor):
        if tensor.numel() >= rows * LOADED.config.vocab_size:
            kept.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net.loss(batch).backward()
    assert len(kept) == 2


def test_sizes_that_do_not_fit_are_refused():
    shape = {"draft_len": 7, "taps": 2, "mask_token_id": 319}
    with pytest.raises(InvalidConfig, match="rank is 0; allowed: 1 to 320"):
        make("dflash2", LOADED.model, AnyShape(rank=0, **shape), seed=0)
    narrow = tiny_model("llama", hidden_size=40)
    with pytest.raises(InvalidConfig, match="hidden_size is 40; dflash2 needs a multiple of 16"):
        make("dflash2", narrow.model, AnyShape(**shape), seed=0)


def test_the_command_line_trains_one(tmp_path):
    save_tiny(tmp_path / "target")
    out, prompts = tmp_path / "drafter", tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"text": f"say {i} again"}) for i in range(4)))
    command = ["train", "dflash2", "--target", str(tmp_path / "target"), "--out", str(out)]
    options = ["--steps", "2", "--taps", "2", "--rank", "24", "--layers", "2", "--d-pace"]
    options += ["--max-tokens", "24", "--device", "cpu", "--prompts", str(prompts)]
    done = CliRunner().invoke(app, [*command, *options])
    assert done.exit_code == 0, done.output
    hf = json.loads((out / "config.json").read_text())
    assert hf["dflash_config"]["selector_rank"] == 24
    assert hf["num_hidden_layers"] == 2
    arm = LLM(str(tmp_path / "target"), dtype="float32", drafter=f"dflash2:{out}:7")
    assert arm.generate(["say 1 again"], SamplingParams(max_tokens=8))[0].token_ids
