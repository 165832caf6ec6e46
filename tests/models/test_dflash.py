"""DFlash checkpoints: published layouts are read and written, what does not fit is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine import LLM
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.dflash import load_dflash, save_dflash
from slipstream.models.tiny import tiny_model
from slipstream.train.dflash import DFlashNetwork, Shape, draft_config, spread

LOADED = tiny_model("llama")
TARGET = LOADED.model


def made(folder, **shape):
    config = draft_config(LOADED.config, Shape(**{"taps": 2, **shape}), mask_token_id=319)
    network = DFlashNetwork(config, TARGET, seed=1)
    save_dflash(folder, config, network.tensors)
    return config, network


def test_written_names_are_the_published_ones(tmp_path):
    config, _ = made(tmp_path, layers=2)
    names = set(load_file(tmp_path / "model.safetensors"))
    linears = [f"self_attn.{p}_proj" for p in "qkvo"]
    linears += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    layers = {f"layers.{i}.{n}.weight" for i in range(2) for n in linears + norms}
    assert names == layers | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf["architectures"] == ["DFlashDraftModel"]
    assert hf["model_type"] == "qwen3"
    assert hf["dflash_config"] == {"mask_token_id": 319, "target_layer_ids": [0, 1]}
    assert hf["block_size"] == 8
    assert hf["num_target_layers"] == 2
    assert config.taps == (1, 2)


def test_what_is_saved_is_loaded_again(tmp_path):
    config, network = made(tmp_path)
    loaded = load_dflash(tmp_path, TARGET)
    assert loaded.config.shapes == config.shapes
    assert loaded.config.taps == config.taps == (1, 2)
    assert (loaded.config.block_size, loaded.config.mask_token_id) == (8, 319)
    assert loaded.config.model.rope_parameters == config.model.rope_parameters
    features = torch.randn(9, 2, 48)
    first = loaded.context(features, torch.arange(9), 8)
    renamed = {}
    for name, tensor in network.tensors.items():
        prefix = "model." if not name.startswith(("fc", "hidden_norm")) else ""
        name = name.replace("layers.0.", "midlayer.") if not prefix else prefix + name
        renamed[name.replace("fc.", "encoder.fc.")] = tensor.detach().contiguous()
    save_file(renamed, tmp_path / "model.safetensors")
    again = load_dflash(tmp_path, TARGET).context(features, torch.arange(9), 8)
    for a, b in zip(first, again, strict=True):
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-2)  # saved once in float32, once not


def change_config(folder, **values):
    hf = json.loads((folder / "config.json").read_text())
    own = {k: v for k, v in values.items() if k in ("mask_token_id", "target_layer_ids", "causal")}
    hf["dflash_config"] |= own
    hf |= {k: v for k, v in values.items() if k not in own}
    (folder / "config.json").write_text(json.dumps(hf))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "no DFlash drafter"),
        ({"hidden_size": 64}, "hidden_size is 64, not 48"),
        ({"vocab_size": 321}, "vocab_size is 321, not 320"),
        ({"target_layer_ids": [0, 2]}, r"layers \[0, 2\]; this target has layers 0 to 1"),
        ({"mask_token_id": 320}, "mask_token_id = 320"),
        ({"mask_token_id": None}, "no dflash_config.mask_token_id"),
        ({"block_size": 1}, "block_size = 1; allowed: 2 to 33"),
        ({"causal": True}, "causal = True"),
        ({"target_layer_ids": [0]}, r"fc.weight of shape \(48, 96\), its config says \(48, 48\)"),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "lacks .*layers.1"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, values, complaint):
    made(tmp_path)
    change_config(tmp_path, **values)
    with pytest.raises(ModelError, match=complaint):
        load_dflash(tmp_path, TARGET)


def test_unexpected_tensors_and_long_drafts_are_refused(tmp_path):
    _, network = made(tmp_path)
    with pytest.raises(InvalidConfig, match=r"draft_len is 8 .*its block holds 7"):
        LLM(LOADED, drafter=f"dflash:{tmp_path}:8")
    tensors = {n: t.detach() for n, t in network.tensors.items()}
    save_file(tensors | {"d2t": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected tensor d2t; a DFlash"):
        LLM(LOADED, drafter=f"dflash:{tmp_path}:7")
    (tmp_path / "mask_embedding.pt").touch()
    with pytest.raises(
        ModelError, match=r"embedding of its mask token .mask_embedding\.pt.; it is"
    ):
        LLM(LOADED, drafter=f"dflash:{tmp_path}:7")
    with pytest.raises(ModelError, match=r"no config\.json"):
        LLM(LOADED, drafter=f"dflash:{tmp_path / 'nowhere'}:7")


def test_taps_are_spread_as_published():
    assert spread(36, 5) == (2, 10, 18, 26, 34)  # layers 1, 9, 17, 25, 33
    assert spread(64, 5) == (2, 17, 32, 47, 62)  # layers 1, 16, 31, 46, 61
    assert spread(30, 3) == (2, 15, 28)
    assert spread(2, 2) == (1, 2)
    assert spread(36, 1) == (19,)
    with pytest.raises(InvalidConfig, match="taps is 3; allowed: 1 to 2"):
        draft_config(LOADED.config, Shape(taps=3), mask_token_id=319)
