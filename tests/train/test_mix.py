"""`--mix`: texts of some kinds count more, among those that are trained on."""

import re
from collections import Counter

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig
from slipstream.models.loading import load
from slipstream.models.tiny import save_tiny
from slipstream.train.data import own_answers, text_of
from slipstream.train.recipes import Shape, make
from slipstream.train.shards import write_shard
from slipstream.train.trainer import Plan, Trainer, mixed
from slipstream.train_command import mask_token, mix_of
from slipstream.types import SamplingParams

TEXTS = [text_of([1, 2], [i, 3], kind) for i in range(400) for kind in ("code", "chat", "edit")]


def test_weights_are_counts_and_shares():
    found = mixed(TEXTS, {"code": 2.5, "chat": 0.25}, seed=1)
    kinds = Counter(text.kind for text in found)
    assert kinds["edit"] == 400
    assert kinds["code"] == pytest.approx(1000, abs=50)
    assert kinds["chat"] == pytest.approx(100, abs=40)
    times = Counter(int(t.tokens[2]) for t in found if t.kind == "code")
    assert set(times.values()) == {2, 3}
    again = mixed(TEXTS, {"code": 2.5, "chat": 0.25}, seed=1)
    assert all(a is b for a, b in zip(found, again, strict=True))
    assert mixed(TEXTS, {}, seed=1) == TEXTS
    assert not any(t.kind == "chat" for t in mixed(TEXTS, {"chat": 0}, seed=1))


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (
            {"cod": 2.0},
            "mix names 'cod', and no text is of that kind; choose from chat, code, edit",
        ),
        ({"code": -1.0}, "mix gives code -1.0; allowed: 0 to 20"),
        ({"code": float("nan")}, "mix gives code nan; allowed: 0 to 20"),
        ({"code": 0.0, "chat": 0.0, "edit": 0.0}, "leaves no text to train on"),
    ],
)
def test_weights_without_sense_are_one_sentence(mix, said):
    with pytest.raises(InvalidConfig, match=re.escape(said)):
        mixed(TEXTS, mix, seed=0)


def test_mix_reads_as_written():
    assert mix_of("code=2, chat=0.5") == {"code": 2.0, "chat": 0.5}
    assert mix_of("") == {}
    with pytest.raises(InvalidConfig, match="mix has the part 'code'; write KIND=WEIGHT"):
        mix_of("code")


def test_held_out_texts_are_not_copied(tmp_path):
    save_tiny(tmp_path / "target", num_hidden_layers=4)
    loaded = load(tmp_path / "target", dtype=torch.float32)
    llm = LLM(loaded)
    prompts = [list(range(i, i + 8)) for i in range(20, 32)]
    answers = own_answers(llm, prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    texts = [
        text_of(t.tokens[: t.prompt_len], t.tokens[t.prompt_len :], ("code", "chat")[i % 2])
        for i, t in enumerate(answers)
    ]
    shape = Shape(draft_len=2, taps=2, mask_token_id=mask_token(llm))
    network = make("dflash", loaded.model, shape, seed=0)
    plan = Plan(steps=1, batch=2, anchors=2, held_out=0.25, mix={"code": 3.0})
    trainer = Trainer(loaded, network, texts, plan, out=tmp_path / "out")
    assert len(trainer.held) == 3
    assert Counter(t.kind for t in trainer.texts) == {"code": 15, "chat": 4}
    assert not {id(t) for t in trainer.held} & {id(t) for t in trainer.texts}
    write_shard(tmp_path / "texts", "texts-0", texts, target=loaded.fingerprint, more={})
    words = ["train", "dflash", "--target", tmp_path / "target", "--texts", tmp_path / "texts"]
    words += ["--out", tmp_path / "cli", "--device", "cpu", "--batch", 2, "--steps", 1]
    words += ["--anchors", 2, "--taps", 2]
    done = CliRunner().invoke(app, [str(w) for w in [*words, "--mix", "code=2,chat=0.5"]])
    assert done.exit_code == 0, done.output
    assert "mix=code=2 chat=0.5" in (tmp_path / "cli" / "README.md").read_text()
    done = CliRunner().invoke(app, [str(w) for w in [*words, "--mix", "brief=2"]])
    assert done.exit_code == 2
    assert "no text is of that kind" in done.output
