"""Weights that ship: found by their target alone, named by digest, one sentence where none are."""

import json
import shutil

import pytest
import torch

from slipstream.drafters import specs, weights
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig, ModelError
from slipstream.export_command import run_export
from slipstream.lab.backends.embedded import Embedded
from slipstream.models.checkpoint import own_config
from slipstream.models.loading import EMBEDDED, load
from slipstream.models.stored import write_compact
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train.recipes import RECIPES, Shape, make
from slipstream.types import SamplingParams

TARGET = tiny_model("llama", layers=4)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8] * 3, [9, 9, 9]]


def trained(method, folder, target=TARGET, seed=1):
    network = make(method, target.model, Shape(draft_len=7, mask_token_id=319), seed=seed)
    network.save(folder, network.tensors)
    return folder


@pytest.fixture(scope="module", params=RECIPES)
def method(request):
    return request.param


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Ships a drafter for a target, in a folder of the test's own."""
    root = tmp_path / "shipped"
    monkeypatch.setattr(weights, "SHIPPED", root)

    def ship(method, target=TARGET, name="tiny", seed=1):
        plain = trained(method, tmp_path / f"{method}-{name}-{seed}", target, seed)
        write_compact(plain, root / name / method, method=method, target=target)
        return root / name / method

    return ship


def test_without_a_path_the_shipped_weights_serve_and_the_name_is_the_spec(method, shipped):
    folder = shipped(method)
    base = LLM(TARGET)
    arm = base.fork(f"{method}:2")
    assert arm.drafter.name == str(specs.parse(f"{method}:2"))
    done = arm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in done] == [c.token_ids for c in base.generate(PROMPTS, GREEDY)]
    assert sum(r.drafted for c in done for r in c.records) > 0
    given = base.fork(f"{method}:{folder}:2")
    assert arm.drafter_weights == given.drafter_weights
    assert len(arm.drafter_weights) == 64
    assert base.drafter_weights is None


def test_they_are_found_by_the_targets_fingerprint_and_nothing_else(shipped):
    other = tiny_model("llama", layers=4, seed=5)
    assert other.name == TARGET.name
    with pytest.raises(ModelError, match=r"No mtp drafter ships for tiny-llama; .*mtp:PATH:2"):
        LLM(TARGET, drafter="mtp")
    mine, theirs = shipped("mtp"), shipped("mtp", other, name="other", seed=3)
    assert weights.shipped("mtp", TARGET) == mine
    assert weights.shipped("mtp", other) == theirs
    with pytest.raises(ModelError, match=r"No dflash drafter ships .*slipstream train dflash"):
        LLM(TARGET, drafter="dflash:7")


def test_a_sentence_of_its_own_where_more_is_asked_than_a_block_holds(shipped):
    shipped("dflash")
    with pytest.raises(InvalidConfig, match=r"draft_len is 8 in drafter 'dflash:8'"):
        LLM(TARGET, drafter="dflash:8")


def test_the_digest_is_that_of_config_and_weights(tmp_path):
    first = trained("mtp", tmp_path / "first")
    context = specs.DrafterContext(vocab_size=320, max_context=512, max_users=1, target=TARGET)

    def digest(folder, method="mtp"):
        return weights.fingerprint(specs.parse(f"{method}:{folder}"), context)

    before = digest(first)
    assert digest(shutil.copytree(first, tmp_path / "copy")) == before
    assert digest(trained("mtp", tmp_path / "again", seed=2)) != before
    (first / "README.md").write_text("a card")
    assert digest(first) == before
    hf = json.loads((first / "config.json").read_text())
    (first / "config.json").write_text(json.dumps(hf | {"rope_theta": 7.0}))
    assert digest(first) != before
    save_tiny(tmp_path / "model")
    assert digest(tmp_path / "model", "draft_model") != before
    assert weights.fingerprint(specs.parse("ngram:3"), context) is None


def test_an_arms_settings_say_which_weights_ran(tmp_path, monkeypatch):
    backend = Embedded("tiny", dtype="float32", threads=1)
    target = backend._base.loaded
    path = trained("mtp", tmp_path / "mtp", target)
    monkeypatch.setattr(weights, "SHIPPED", tmp_path / "shipped")
    write_compact(path, tmp_path / "shipped/tiny/mtp", method="mtp", target=target)
    arms = ("none", "mtp:2", f"mtp:{path}:2")
    first = backend.open(arms, users=2, kv_tokens=512)
    assert "weights" not in first["none"]
    assert first["mtp:2"]["weights"] != first[arms[2]]["weights"]
    trained("mtp", path, target, seed=2)
    again = backend.open(arms, users=2, kv_tokens=512)
    assert again["mtp:2"] == first["mtp:2"]
    assert again[arms[2]]["weights"] != first[arms[2]]["weights"]
    backend.close()


# --- slipstream export ----------------------------------------------------------------------------


def test_export_round_trips_between_both_forms(method, tmp_path):
    save_tiny(tmp_path / "model", num_hidden_layers=4)
    target = load(tmp_path / "model", dtype=torch.float32)
    plain = trained(method, tmp_path / "plain", target)
    (plain / "README.md").write_text("a card")
    (plain / "training.json").write_text("{}")
    said = []

    def export(source, out, *, compact):
        run_export(
            f"{method}:{source}:4",
            out=out,
            model=str(tmp_path / "model"),
            compact=compact,
            say=said.append,
        )
        return (out / "model.safetensors").read_bytes()

    small = export(plain, tmp_path / "small", compact=True)
    full = export(tmp_path / "small", tmp_path / "full", compact=False)
    again = export(tmp_path / "full", tmp_path / "again", compact=True)
    assert len(again) == len(small)
    assert len(small) < 0.65 * len(full)
    assert own_config(tmp_path / "small")["target"] == load(tmp_path / "model").fingerprint
    assert (tmp_path / "full" / "README.md").read_text() == "a card"
    assert (tmp_path / "full" / "training.json").read_text() == "{}"
    assert "MiB (bfloat16, as published)" in said[1]


@pytest.mark.parametrize("spec", ["none", "ngram:3", "draft_model:x:4"])
def test_drafters_without_weights_of_their_own_are_not_exported(spec, tmp_path):
    with pytest.raises(InvalidConfig, match="has no weights of its own to export; those with: mtp"):
        run_export(spec, out=tmp_path, model="x", compact=False, say=print)


# --- what really ships ----------------------------------------------------------------------------

REAL = sorted(weights.SHIPPED.glob("*/*/config.json"))


@pytest.mark.parametrize("folder", [c.parent for c in REAL], ids=lambda f: f.name)
def test_what_ships_is_for_the_embedded_target_and_loads(folder):
    """Fails where the target's conversion changed its fingerprint: export the set again."""
    llm = LLM(EMBEDDED, drafter=folder.name, device="cpu", max_users=1, kv_tokens=64)
    assert weights.shipped(folder.name, llm.loaded) == folder
    assert llm.drafter.needs
