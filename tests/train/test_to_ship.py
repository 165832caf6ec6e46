"""From texts on disk to the small folder that ships, by the two commands, for every recipe."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.drafters import weights
from slipstream.engine import LLM
from slipstream.errors import ModelError
from slipstream.lab.cards import NEEDED, TRAINING, read_record
from slipstream.models.loading import load
from slipstream.models.tiny import save_tiny
from slipstream.train.data import own_answers
from slipstream.train.recipes import RECIPES
from slipstream.train.shards import write_shard
from slipstream.types import SamplingParams

torch.set_num_threads(1)
ANSWER = SamplingParams(max_tokens=24, ignore_eos=True)
MORE = {
    "mtp": ["--soft", "--optimizer", "muon"],
    "eagle3": ["--draft-vocab", "100"],
    "dflash": ["--soft", "--inner", "64", "--taps", "2"],
    "dflash2": ["--soft", "--rank", "8", "--taps", "2", "--draft-vocab", "100"],
    "dspark": ["--markov", "gated", "--rank", "8", "--taps", "2"],
}


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A saved target beside its own texts."""
    folder = tmp_path_factory.mktemp("work")
    save_tiny(folder / "target", num_hidden_layers=4)
    loaded = load(folder / "target", dtype=torch.float32)
    prompts = [list(range(i, i + 8)) for i in range(20, 32)]
    texts = own_answers(LLM(loaded), prompts, ANSWER)
    write_shard(folder / "texts", "texts-0", texts, target=loaded.fingerprint, more={})
    return folder


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_was_trained_on_texts_ships(recipe, target, tmp_path, monkeypatch):
    model, out, shipped = target / "target", tmp_path / "out", tmp_path / "shipped"
    sizes = ("--batch", 2, "--anchors", 4, "--minutes", 0.02, "--device", "cpu")
    given = ("train", recipe, "--target", model, "--texts", target / "texts", "--out", out)
    said = command(*given, *sizes, *MORE[recipe])
    assert "12 texts, 288 tokens of the target's own." in said
    monkeypatch.setattr(weights, "SHIPPED", shipped)
    small = shipped / "tiny" / recipe
    stale = small / TRAINING
    small.mkdir(parents=True)
    stale.write_text("{}")  # of weights that lay there before
    command("export", f"{recipe}:{out}", "--model", model, "--compact", "--out", small)
    record = read_record(small / TRAINING, NEEDED)
    assert record == read_record(out / TRAINING)
    assert record["tokens"] == 288
    assert record["recipe"]["minutes"] == 0.02
    assert record["recipe"]["steps done"] > 0
    assert "steps" not in record["recipe"]
    arm = LLM(str(model), dtype="float32", drafter=f"{recipe}:3")
    plain = arm.fork("none")
    work = [list(range(24, 32)), [5, 6, 7]]
    done = arm.generate(work, ANSWER)
    assert [c.token_ids for c in done] == [c.token_ids for c in plain.generate(work, ANSWER)]
    assert sum(r.drafted for c in done for r in c.records) > 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_reduced_head_ships_as_ids_and_is_whole_where_others_need_it(recipe, target, tmp_path):
    """Tokens without a row are never drafted, and the folder holds no head."""
    model, out, small, full = (target / "target", *(tmp_path / n for n in ("out", "small", "full")))
    command(
        *("train", recipe, "--target", model, "--texts", target / "texts", "--out", out),
        *("--draft-vocab", 60, "--steps", 2, "--batch", 2, "--anchors", 4, "--device", "cpu"),
        *(["--taps", 2] if recipe.startswith("d") else []),
        *(["--rank", 8] if recipe in ("dflash2", "dspark") else []),
    )
    command("export", f"{recipe}:{out}", "--model", model, "--compact", "--out", small)
    kept = load_file(small / "model.safetensors")
    assert "lm_head.weight" not in kept
    if recipe == "dflash2":
        assert kept["candidate_selector.successor_codebook"].shape == (60, 8)
        assert kept["candidate_selector.predecessor_codebook"].shape == (320, 8)
    known = {*(kept["d2t"] + torch.arange(60)).tolist()}
    assert len(known) == 60
    arm = LLM(str(model), dtype="float32", drafter=f"{recipe}:{small}:3")
    drafted = []
    draft = arm.drafter.draft

    def seen(rows, lens):
        made = draft(rows, lens)
        drafted.extend(t for i in range(len(rows)) for t in made.row(i))
        return made

    arm.drafter.draft = seen
    hot = replace(ANSWER, temperature=1.0, seed=3)
    arm.generate([list(range(24, 32)), [5, 6, 7]], [ANSWER, hot])
    assert drafted
    assert {*drafted} <= known
    command("export", f"{recipe}:{small}", "--model", model, "--out", full)
    if recipe == "dflash2":
        name = "candidate_selector.successor_codebook"
        for rows, says in ((None, f"lacks the tensor {name}"), (59, "59 rows for 60 draft tokens")):
            lame = {n: t for n, t in kept.items() if not n.startswith(name)}
            if rows:
                lame |= {n: kept[n][:rows].contiguous() for n in (name, f"{name}_scale")}
            folder = tmp_path / f"lame{rows}"
            shutil.copytree(small, folder)
            save_file(lame, folder / "model.safetensors")
            with pytest.raises(ModelError, match=says):
                arm.fork(f"{recipe}:{folder}:3")
    whole = recipe in ("mtp", "dflash2")
    assert ("d2t" in load_file(full / "model.safetensors")) is not whole
