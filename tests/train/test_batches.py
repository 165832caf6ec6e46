"""Texts side by side teach what each teaches alone."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train import data
from slipstream.train.begin import go_on_from
from slipstream.train.data import Features, own_answers, text_of
from slipstream.train.optimizer import Optimizer
from slipstream.train.recipes import RECIPES, Shape, make
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import SamplingParams

torch.set_num_threads(1)
LOADED = tiny_model("llama", layers=4)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_batch_holds_what_its_texts_say_alone(recipe, monkeypatch):
    monkeypatch.setattr(data, "_HOST_TOKENS", 50)  # some forwards end inside a text
    takes = {} if recipe in ("mtp", "eagle3") else {"taps": 2}
    net = make(recipe, LOADED.model, Shape(draft_len=4, mask_token_id=319, **takes), seed=1)
    generator = np.random.default_rng(2)
    texts = [text_of(generator.integers(3, 300, n).tolist(), []) for n in (40, 90, 23)]
    where = np.array([[3, 20, 38], [5, 60, 88], [1, 2, 22]])
    features = Features(LOADED, net.needs, longest=400)
    whole = features.batch(texts, where)
    held, there = net.agreement(whole)
    with torch.no_grad():
        together = net.logits(whole)
    for i, text in enumerate(texts):
        alone = features.batch([text], where[i : i + 1])
        torch.testing.assert_close(
            whole.features[i, : len(text.tokens)], alone.features[0], atol=1e-4, rtol=1e-4
        )
        with torch.no_grad():
            (expected,) = net.logits(alone)
        own, exists = net.agreement(alone)
        for block in range(3):
            real = exists[0, block]
            assert torch.equal(there[i, block], real)
            assert torch.equal(held[i, block], own[0, block])
            torch.testing.assert_close(
                together[i, block][real], expected[block][real], atol=1e-4, rtol=1e-3
            )
    assert not bool(there[0, 2, 1:].any())
    assert bool(there[1, 1].all())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("recipe", ["mtp", "dflash", "dflash2"])
def test_soft_labels_and_both_optimizers_learn_one_text(recipe, optimizer, tmp_path):
    llm = LLM(LOADED)
    answer = SamplingParams(max_tokens=30, ignore_eos=True)
    texts = own_answers(llm, [list(range(20, 30))], answer)
    takes = {} if recipe == "mtp" else {"taps": 2}
    shape = Shape(draft_len=3, mask_token_id=319, soft=True, **takes)
    plan = Plan(steps=150, batch=1, anchors=24, lr=4e-3, held_out=0, reports=1, optimizer=optimizer)
    trainer = Trainer(
        LOADED,
        make(recipe, LOADED.model, shape, seed=0),
        texts,
        plan,
        out=tmp_path,
        say=lambda _: None,
    )
    before = trainer.acceptance().tokens_per_step
    trainer.run()
    assert trainer.acceptance().tokens_per_step > max(1.5, before + 0.4)


def test_a_reduced_vocabulary_is_the_texts_most_frequent(tmp_path):
    counts = torch.zeros(320, dtype=torch.int64)
    counts[[7, 300, 41]] = torch.tensor([5, 9, 2])
    shape = Shape(draft_len=2, draft_vocab=3)
    net = make("eagle3", LOADED.model, shape, seed=0, counts=counts)
    assert net.draft_head.vocab.tolist() == [7, 41, 300]
    net.save(tmp_path, net.tensors)
    held = load_file(tmp_path / "model.safetensors")
    assert (held["d2t"] + torch.arange(3)).tolist() == [7, 41, 300]
    assert held["t2d"].nonzero().flatten().tolist() == [7, 41, 300]
    assert torch.equal(
        held["lm_head.weight"].float(), LOADED.model.head.weight[[7, 41, 300]].bfloat16().float()
    )
    arm = LLM(LOADED, drafter=f"eagle3:{tmp_path}:2")
    assert arm.generate([[5, 6, 7]], SamplingParams(max_tokens=8))[0].token_ids
    with pytest.raises(InvalidConfig, match="draft_vocab is 0; allowed: 1 to 320"):
        make("eagle3", LOADED.model, Shape(draft_len=2, draft_vocab=0), seed=0, counts=counts)
    with pytest.raises(InvalidConfig, match="optimizer is 'sgd'; choose one of adamw, muon"):
        Optimizer(net.tensors, kind="sgd", lr=1.0)
    with pytest.raises(InvalidConfig, match="d_pace and soft are both set"):
        make("dflash", LOADED.model, Shape(draft_len=2, d_pace=True, soft=True), seed=0)


def test_texts_are_made_and_trained_on(tmp_path, monkeypatch):
    save_tiny(tmp_path / "target", max_position_embeddings=1024)
    target, texts, out = str(tmp_path / "target"), tmp_path / "texts", tmp_path / "drafter"
    run = CliRunner().invoke
    command = ["texts", "--target", target, "--out", str(texts), "--device", "cpu"]
    for seed in ("1", "2"):
        sizes = ["--tokens", "60", "--max-tokens", "24", "--users", "4", "--seed", seed]
        done = run(app, [*command, *sizes])
        assert done.exit_code == 0, done.output
    manifest = json.loads((texts / "texts-1.json").read_text())
    assert manifest["own_tokens"] >= 60
    assert {"chat", "code"} <= set(manifest["kinds"])
    train = ["train", "mtp", "--target", target, "--out", str(out), "--device", "cpu"]
    options = ["--texts", str(texts), "--minutes", "0.05", "--batch", "2", "--draft-len", "2"]
    done = run(app, [*train, *options])
    assert done.exit_code == 0, done.output
    assert "steps done" in (out / "README.md").read_text()
    save_tiny(tmp_path / "other", seed=5)
    train[3] = str(tmp_path / "other")
    done = run(app, [*train, *options])
    assert done.exit_code == 2
    assert "holds answers of another target" in done.output
    done = run(app, [*train, "--texts", str(tmp_path)])
    assert "holds no texts; make some with `slipstream texts`" in done.output


def test_training_goes_on_from_a_checkpoint(tmp_path):
    shape = Shape(draft_len=3, taps=2, mask_token_id=319)
    old = make("dflash", LOADED.model, shape, seed=1)
    old.save(tmp_path, {n: t.detach().bfloat16() for n, t in old.tensors.items()})
    new = make("dflash", LOADED.model, shape, seed=2)
    go_on_from(new, tmp_path, LOADED.model)
    for name, tensor in new.tensors.items():
        assert torch.equal(tensor, old.tensors[name].bfloat16().float())
        assert tensor.requires_grad
    narrower = make("dflash", LOADED.model, replace(shape, intermediate_size=16), seed=2)
    with pytest.raises(
        ModelError, match=r"cannot be trained on: .* should be \[16, 48\] or smaller"
    ):
        go_on_from(narrower, tmp_path, LOADED.model)
    with pytest.raises(ModelError, match=r"none of the tensors of mtp, such as model\.layers"):
        go_on_from(make("mtp", LOADED.model, Shape(draft_len=2), seed=0), tmp_path, LOADED.model)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_larger_network_begins_as_the_same_function(recipe, tmp_path):
    taps = {"taps": 2} if recipe.startswith("d") else {}
    shape = Shape(draft_len=3, mask_token_id=319, intermediate_size=32, **taps)
    old = make(recipe, LOADED.model, shape, seed=1)
    if recipe == "dspark":
        torch.nn.init.normal_(old.tensors["markov_head.markov_w2.weight"])
    for tensor in old.tensors.values():
        tensor.data = tensor.data.bfloat16().float()
    old.save(tmp_path, old.tensors)
    more = {"layers": 2} if taps else {}
    new = make(recipe, LOADED.model, replace(shape, intermediate_size=64, **more), seed=2)
    go_on_from(new, tmp_path, LOADED.model)
    batch = Features(LOADED, old.needs, longest=200).batch(
        [text_of(list(range(8)), list(range(20, 40)), "chat")], np.array([[9, 15]])
    )
    with torch.no_grad():
        assert torch.allclose(new.logits(batch), old.logits(batch), atol=1e-5)


def test_rows_of_a_reduced_head_follow_their_tokens(tmp_path):
    """DSpark's second Markov matrix has a row for each token that may be drafted."""
    shape = Shape(draft_len=3, taps=2, mask_token_id=319, rank=4, draft_vocab=3)
    counts = torch.zeros(3, 320, dtype=torch.int64)
    counts[0, [7, 41, 300]] = counts[1, [8, 41, 300]] = 1
    name, name_all = "markov_head.markov_w2.weight", "markov_head.markov_w1.weight"
    old = make("dspark", LOADED.model, shape, seed=1, counts=counts[0])
    old.tensors[name].data = torch.arange(12.0).view(3, 4)
    old.save(tmp_path, old.tensors)
    new = make("dspark", LOADED.model, shape, seed=2, counts=counts[1])
    go_on_from(new, tmp_path, LOADED.model)
    assert new.tensors[name].tolist() == [[0.0] * 4, [4, 5, 6, 7], [8, 9, 10, 11]]
    assert torch.equal(new.tensors[name_all], old.tensors[name_all])
    whole = make("dspark", LOADED.model, replace(shape, draft_vocab=None), seed=1)
    whole.tensors[name].data = torch.arange(1280.0).view(320, 4)
    whole.save(tmp_path / "whole", whole.tensors)
    go_on_from(new, tmp_path / "whole", LOADED.model)
    assert new.tensors[name][:, 0].tolist() == [4 * 8, 4 * 41, 4 * 300]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--minutes", "0"], "minutes is 0.0; allowed: above 0"),
        (["--max-tokens", "1024"], "gave no answer in a whole round; max_tokens is 1024 of"),
    ],
)
def test_texts_that_cannot_be_made_are_one_sentence(tmp_path, more, says):
    save_tiny(tmp_path / "target", max_position_embeddings=1024)
    command = ["texts", "--target", str(tmp_path / "target"), "--out", str(tmp_path / "texts")]
    done = CliRunner().invoke(app, [*command, "--device", "cpu", "--users", "2", *more])
    assert done.exit_code == 2
    assert says in done.output
    (tmp_path / "file").write_text("")
    command[4] = str(tmp_path / "file" / "inside")
    done = CliRunner().invoke(app, [*command, "--device", "cpu"])
    assert done.exit_code == 2
    assert "cannot be made (Not a directory); name another folder" in done.output
    train = ["train", "mtp", "--out", str(tmp_path / "out"), "--minutes", "-1"]
    done = CliRunner().invoke(app, train)
    assert done.exit_code == 2
    assert "minutes is -1.0; allowed: above 0" in done.output
