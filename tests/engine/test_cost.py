"""`slipstream cost`: shapes of every drafter, on the host and in the lane; what it refuses."""

import tests.interpreter  # noqa: F401, I001 - first

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.drafters.shaped import shape_of
from slipstream.engine import cost
from slipstream.engine.cost import Case, _answer_tokens, _engine, measure
from slipstream.engine.floor import drafter_bytes, kv_bytes, step_bytes
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.shapes import read_shape
from slipstream.models.tiny import tiny_config, tiny_model
from slipstream.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
EMBEDDED = ROOT / "bench/shapes/smollm2-135m.json"
SHIPPED = ROOT / "slipstream/shipped/smollm2-135m"
TILED = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
WEIGHTS = ["mtp:3", "eagle3:3", "dflash:3,layers=1", "dflash2:3,layers=1", "dspark:3,layers=1"]


@pytest.fixture
def small():
    return tiny_model(layers=6, max_position_embeddings=1024, **TILED)


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case("none", 65, 16), "users is 65"),
        (Case("none", 0, 16), "users is 0"),
        (Case("none", 1, 10**6), "context is 1000000"),
        (Case("none", 1, 0), "context is 0"),
        (Case("mtp:3", 1, 8, acceptance=5.0), "acceptance is 5.0; with mtp:3 a step brings 1 to 4"),
        (Case("ngram:3", 1, 8, acceptance=2.0), "on a CPU drafts only what it finds"),
        (Case("nonsense", 1, 8), "nonsense"),
        (Case("draft_model:there:3", 1, 8), "costs are measured of none, ngram"),
        (Case("ngram:3,vocab=9", 1, 8), "vocab is given for .* it has no weights"),
        (Case("mtp:3,layers=2", 1, 8), "an MTP head has one"),
        (Case("dflash:7,layers=0", 1, 8), "layers is '0'"),
        (Case("eagle3:3,vocab=321", 1, 8), "vocab is 321 .* allowed: 1 to 320"),
        (Case(f"mtp:{SHIPPED}/mtp:3,vocab=9", 1, 8), "its config says its sizes"),
    ],
)
def test_values_that_make_no_sense_are_one_sentence(case, says):
    with pytest.raises(InvalidConfig, match=says):
        measure(tiny_model(max_position_embeddings=4096), case, bandwidth=1e12)


def test_heads_that_no_graph_serves_are_one_sentence():
    odd = tiny_model(layers=6, max_position_embeddings=1024, head_dim=24)
    with pytest.raises(InvalidConfig, match="'mtp:2'; its heads are of a size"):
        _engine(odd, Case("mtp:2", 1, 8), lane=True)


def test_drafters_that_do_not_fit_are_one_sentence():
    target = read_shape(EMBEDDED)
    for spec, says in (
        (f"dflash:{ROOT}/bench/shapes/dense-8b-dflash.json:3", "made for another target"),
        (f"dflash:{SHIPPED}/mtp:3", "is no DFlash drafter"),
        ("mtp:nowhere:3", "nowhere has no config.json"),
    ):
        with pytest.raises(ModelError, match=says):
            shape_of(spec, target)


@pytest.mark.parametrize(
    ("drafter", "draft_len", "reach"),
    [
        *(("none", 0, 1), ("ngram:3", 3, 4), ("suffix", 8, 9), ("mtp", 2, 3), ("eagle3", 4, 5)),
        *(("dflash:7", 7, 8), ("dflash2:6", 6, 7), ("dspark:5", 5, 6)),
        (f"dflash:{SHIPPED}/dflash:3", 3, 8),
        (f"dspark:{SHIPPED}/dspark/config.json:3", 3, 7),
    ],
)
def test_room_follows_the_drafter_also_where_its_spec_has_no_number(drafter, draft_len, reach):
    shape = shape_of(drafter, read_shape(EMBEDDED))
    assert (shape.spec.draft_len, shape.reach) == (draft_len, reach)
    assert _answer_tokens(draft_len) == _answer_tokens(0) * (draft_len + 1)


@pytest.mark.parametrize("drafter", WEIGHTS)
def test_shapes_draft_in_the_lane(drafter, small):
    engine, found = _engine(small, Case(drafter, 1, 8, acceptance=3.0), lane=True)
    assert found.max_draft_len == 3
    engine.target.kernels = True
    engine.submit([5, 6, 7], SamplingParams(max_tokens=16, ignore_eos=True))
    while engine.has_work:
        (output,) = engine.step()
    steps = [r for r in output.completion.records if not r.prefill][:-2]
    assert {r.drafted for r in steps} == {3}
    assert 1 < sum(r.accepted for r in steps) / len(steps) < 3
    assert engine.fast.lane.current.drafts_here


@pytest.mark.parametrize("drafter", ["none", "ngram:3", *WEIGHTS])
def test_a_cpu_measures_every_shape(drafter, small, monkeypatch):
    monkeypatch.setattr(cost, "STEPS", 12)
    given = 2.5 if drafter in WEIGHTS else None
    found = measure(small, Case(drafter, 2, 64, given), bandwidth=1e12)
    assert found.step >= max(found.draft, found.verify, found.accept)
    assert found.floor > 0
    if given is not None:
        assert found.synthetic
        assert 1.5 < found.tokens_per_step <= 3.5
        assert found.draft > 0
    assert found.ms_per_token == pytest.approx((found.step + found.host) / found.tokens_per_step)


def test_without_acceptance_a_chain_drafts_too(small):
    engine, _ = _engine(small, Case("mtp:3", 1, 8))
    engine.submit([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True))
    while engine.has_work:
        (output,) = engine.step()
    assert max(r.drafted for r in output.completion.records) == 3


# --- the floor ----------------------------------------------------------------------------------


def elements(drafter, *, context=0, users=1, **changes):
    """Numbers that a drafter of a small target reads in a step."""
    loaded = tiny_model(layers=6, max_position_embeddings=4096, **(TILED | changes))
    _, found = _engine(loaded, Case(drafter, users, 8))
    return drafter_bytes(found, users=users, context=context) // 4


# Of the small target: width, queries, keys and values together, MLP, vocabulary.
H, Q, KV, MLP, V = 48, 32, 32, 80, 320
LAYER = H * (Q + KV) + Q * H + 3 * H * MLP


def test_a_chain_reads_its_layer_and_head_once_a_draft_token():
    for k in (1, 3):
        assert elements(f"mtp:{k}") == k * (2 * H * H + LAYER + V * H)
        wide = LAYER + H * (Q + KV)  # its first layer reads embedding and state side by side
        assert elements(f"eagle3:{k}") == 2 * H * H + k * (wide + V * H)
        assert elements(f"eagle3:{k},vocab=100,layers=2") == 2 * H * H + k * (
            wide + LAYER + 100 * H
        )
    cached = elements("mtp:3", context=50, users=2) - elements("mtp:3")
    assert cached == 3 * 2 * 50 * KV


def test_a_block_is_read_once_and_a_walk_once_a_token():
    taps = 3  # of six layers
    flash = 2 * LAYER + V * H + taps * H * H
    assert elements("dflash:3,layers=2") == elements("dflash:5,layers=2") == flash
    deltas = 2 * 2 * (4 * H // 16) * H
    assert elements("dflash2:3,layers=2") == flash + deltas + 256 * H
    assert elements("dspark:3,layers=2") == flash + 3 * V * 256
    assert elements("dspark:3,layers=2,vocab=100") == flash - (V - 100) * H + 3 * 100 * 256
    assert elements("dflash2:3,layers=2", context=3000) - elements("dflash2:3,layers=2") == (
        2 * 2048 * KV
    )


def test_the_target_is_read_once_and_windows_bound_what_it_sees():
    loaded = tiny_model(layers=6, max_position_embeddings=4096, **TILED)
    _, none = _engine(loaded, Case("none", 1, 8))
    found = step_bytes(loaded.model, none, users=2, context=100)
    assert found == 4 * (6 * LAYER + V * H + 2 * 100 * 6 * KV)
    narrow = replace(loaded.config, windows=(16, *[None] * 5))
    assert kv_bytes(narrow, 100, torch.float32) == 4 * (16 + 5 * 100) * KV


def test_shipped_drafters_are_measured_by_their_configs():
    target = read_shape(EMBEDDED)
    for method in ("mtp", "eagle3", "dflash", "dflash2", "dspark"):
        config = json.loads((SHIPPED / method / "config.json").read_text())
        shape = shape_of(f"{method}:{SHIPPED / method}:2", target)
        flash = getattr(shape.config, "flash", shape.config)
        assert flash.draft_vocab == config["draft_vocab_size"]
        assert flash.model.num_layers == config["num_hidden_layers"]
        assert flash.model.intermediate_size == config["intermediate_size"]


def test_a_gated_head_is_told_by_its_config(tmp_path):
    target = tiny_config("qwen3")
    hf = dict(target.hf) | {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    loaded = tiny_model("qwen3", max_position_embeddings=1024)
    _, found = _engine(loaded, Case(f"mtp:{tmp_path}:2", 1, 8))
    assert found.weights.gate is not None
    gate = 6 * 8 * 48
    layer = 48 * 8 * (6 + 2 * 2) + 6 * 8 * 48 + 3 * 48 * 80
    assert drafter_bytes(found, users=1, context=0) == 4 * 2 * (
        2 * 48 * 48 + gate + layer + 320 * 48
    )


# --- the command --------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_measures_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(cost, "STEPS", 12)
    monkeypatch.setitem(cost._COPIED, "cpu", 2**20)
    config, out = tmp_path / "config.json", tmp_path / "found.jsonl"
    config.write_text(json.dumps(dict(tiny_config(max_position_embeddings=1024).hf)))
    args = ["cost", str(config), "--users", "1", "--context", "16", "--out", str(out)]
    args += ["--drafter", "none", "--drafter", "mtp:2", "--acceptance", "2", "--dtype", "float32"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "Synthetic acceptance was given" in done.output
    plain, drafted = map(json.loads, out.read_text().splitlines())
    assert (plain["synthetic"], drafted["synthetic"]) == (False, True)
    assert drafted["floor"] > plain["floor"]
    assert drafted["draft"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_shape_larger_than_the_machine_is_one_sentence(tmp_path):
    config = tmp_path / "config.json"
    huge = {"hidden_size": 1 << 16, "num_hidden_layers": 400, "intermediate_size": 1 << 18}
    config.write_text(json.dumps(dict(tiny_config().hf) | huge))
    done = CliRunner().invoke(app, ["cost", str(config), "--drafter", "none"])
    assert done.exit_code == ModelError("").exit_code
    assert "more than the" in done.output
