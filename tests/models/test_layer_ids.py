"""What the layer ids of an EAGLE-3 config mean, as far as it can be known, and that it is said."""

import json
import re

import pytest

from slipstream.drafters import eagle3 as drafter
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.eagle3 import load_eagle3
from slipstream.models.layer_ids import default_taps, layers_read
from slipstream.models.tiny import tiny_model
from slipstream.train.recipes import Shape, make

IDS = "eagle_aux_hidden_state_layer_ids"
LOADED = tiny_model("llama", layers=6)


def read(hf, layers=36, reading="auto"):
    return layers_read(hf, layers, reading=reading, source="x")


def nested(ids, **more):
    return {"eagle_config": {IDS: ids, **more}}


@pytest.mark.parametrize(
    ("hf", "taps", "why"),
    [
        # nvidia/gpt-oss-120b-Eagle3-v3, written by ModelOpt all the same
        (nested([24, 30, 36], use_mtp_layernorm=False), (24, 30, 36), "there is no layer 36"),
        ({"eagle3_layers_to_capture": [23, 29, 35]}, (24, 30, 36), "layers_to_capture always are"),
        (nested([3, 9, 20], next_layer_regular=True), (4, 10, 21), "as ModelOpt writes them"),
        ({"aux_hidden_state_layer_ids": [1, 17, 32]}, (1, 17, 32), "speculators"),
        (nested([1, 17, 32], layer_ids="boundaries"), (1, 17, 32), "as its config says"),
        (nested([2, 18, 33], layer_ids="outputs"), (3, 19, 34), "as its config says"),
    ],
)
def test_what_a_checkpoint_shows_decides(hf, taps, why):
    found = read(hf)
    assert found.taps == taps
    assert why in found.why
    assert not found.instead


@pytest.mark.parametrize(
    ("hf", "taps", "other"),
    [
        (nested([1, 17, 32]), (2, 18, 33), "ModelOpt and SpecForge; .* try layer_ids=boundaries"),
        (nested([2, 18, 33]), (2, 18, 33), "vLLM and SGLang; .* try layer_ids=outputs"),
        (nested([1, 17, 33]), (2, 18, 34), "try layer_ids=boundaries"),
        ({IDS: [1, 17, 33]}, (1, 17, 33), "try layer_ids=outputs"),
        ({}, (2, 18, 33), "add eagle_aux_hidden_state_layer_ids"),
    ],
)
def test_where_nothing_proves_it_the_line_says_what_else_to_try(hf, taps, other):
    found = read(hf)
    assert found.taps == taps
    assert re.search(other, found.sentence("x"))


def test_the_user_may_decide():
    assert read(nested([24, 30, 35]), reading="boundaries").taps == (24, 30, 35)
    found = read(nested([2, 18, 33]), reading="outputs")
    assert found.taps == (3, 19, 34)
    assert found.sentence("x") == (
        "x reads the outputs of target layers 2, 18, 33 (from 0): its ids [2, 18, 33] are outputs, "
        "as was asked."
    )
    assert "layers embeddings, 3" in read({IDS: [0, 4]}, reading="boundaries").sentence("x")


@pytest.mark.parametrize(
    ("hf", "reading", "complaint"),
    [
        (nested([24, 30, 36]), "outputs", r"states \[25, 31, 37\] .*target has 0 to 36"),
        (nested([2, 50]), "boundaries", r"states \[2, 50\]"),
        (nested([-2, 3]), "auto", r"states \[-1, 4\]"),
        (nested("2,3"), "auto", "= '2,3' in its config; a list of ids"),
        (nested([1.5]), "auto", "a list of ids"),
        (nested([]), "auto", "a list of ids"),
        ({}, "outputs", "layer_ids is outputs, but x names no eagle_aux"),
    ],
)
def test_bad_ids_are_named(hf, reading, complaint):
    with pytest.raises(ModelError, match=complaint):
        read(hf, reading=reading)


def test_default_layers():
    assert default_taps(36) == (2, 18, 33)
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(4) == (1, 2)


def test_the_option_reaches_the_checkpoint_and_one_line_is_said(tmp_path, capsys):
    net = make("eagle3", LOADED.model, Shape(draft_len=3, mask_token_id=319), seed=0)
    net.save(tmp_path, net.tensors)
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf["eagle_config"]["layer_ids"] == "boundaries"
    assert load_eagle3(tmp_path, LOADED.model).taps == net.config.taps == (2, 3)
    hf["eagle_config"] = {IDS: [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    drafter._say.cache_clear()
    arm = LLM(LOADED, drafter=f"eagle3:{tmp_path}:3,layer_ids=outputs")
    assert arm.drafter.needs == (3, 4)
    assert arm.drafter.name == f"eagle3:{tmp_path}:3,layer_ids=outputs"
    said = f"slipstream: {tmp_path} reads the outputs of target layers 2, 3 (from 0): "
    assert capsys.readouterr().err == said + "its ids [2, 3] are outputs, as was asked.\n"
    again = LLM(LOADED, drafter=f"eagle3:{tmp_path}:3")
    assert again.drafter.name.endswith(":3,layer_ids=auto")
    assert again.drafter.needs == (2, 3)  # what vLLM reads by default in a target of six layers
    with pytest.raises(InvalidConfig, match=r"layer_ids is .both. .* auto, boundaries, outputs"):
        LLM(LOADED, drafter=f"eagle3:{tmp_path}:3,layer_ids=both")
