"""EAGLE-3 checkpoints: published layouts are read and written, what does not fit is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine import LLM
from slipstream.errors import ModelError
from slipstream.models.eagle3 import Eagle3Config, default_taps, load_eagle3, save_eagle3
from slipstream.models.tiny import tiny_model
from slipstream.train.eagle3 import Eagle3Network, draft_config
from slipstream.types import SamplingParams

LOADED = tiny_model("llama", layers=4)
TARGET = LOADED.model
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def made(folder, **flags):
    base = draft_config(LOADED.config)
    config = Eagle3Config(base.model, base.taps, **flags)
    network = Eagle3Network(base, TARGET, steps=4, seed=1)
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: network.tensors[name].detach()
        if name in network.tensors
        else torch.rand(shape, generator=generator)
        for name, shape in config.shapes.items()
    }
    if flags.get("draft_vocab"):
        # Draft token i stands for target token 2 * i.
        tensors["d2t"] = torch.arange(flags["draft_vocab"])
    save_eagle3(folder, config, tensors)
    return config, tensors


def test_written_names_are_the_published_ones(tmp_path):
    made(tmp_path, draft_vocab=64, norm_before_fc=True)
    names = set(load_file(tmp_path / "model.safetensors"))
    linears = [f"self_attn.{p}_proj" for p in "qkvo"]
    linears += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    norms = ["input_layernorm", "hidden_norm", "post_attention_layernorm"]
    layer = {f"layers.0.{n}.weight" for n in linears + norms}
    own = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", "input_norm.weight"}
    assert names == layer | own
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf["architectures"] == ["LlamaForCausalLMEagle3"]
    assert hf["draft_vocab_size"] == 64
    assert hf["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert hf["eagle_config"]["norm_before_fc"] is True


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_before_fc": True}, {"fc_norm": True}, {"norm_output": True}, {"draft_vocab": 64}],
    ids=str,
)
def test_every_variant_loads_and_serves_exactly(tmp_path, flags):
    config, tensors = made(tmp_path, **flags)
    loaded = load_eagle3(tmp_path, TARGET)
    assert loaded.config.shapes == config.shapes
    assert loaded.config.taps == config.taps
    llm = LLM(LOADED)
    arm = llm.fork(f"eagle3:{tmp_path}:3")
    prompts = [[5, 6, 7, 8] * 3, [9, 9, 9]]
    expected = [c.token_ids for c in llm.generate(prompts, GREEDY)]
    assert [c.token_ids for c in arm.generate(prompts, GREEDY)] == expected
    save_eagle3(tmp_path / "again", loaded.config, tensors)
    assert load_eagle3(tmp_path / "again", TARGET).config.shapes == config.shapes
    names = {n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    save_file({n: t.contiguous() for n, t in names.items()}, tmp_path / "model.safetensors")
    found = llm.fork(f"eagle3:{tmp_path}:3").generate(prompts, GREEDY)
    assert [c.token_ids for c in found] == expected


def test_a_reduced_vocabulary_drafts_its_own_tokens_only(tmp_path):
    made(tmp_path, draft_vocab=64)
    loaded = load_eagle3(tmp_path, TARGET)
    logits = loaded.logits(torch.randn(3, 48), 320)
    finite = torch.isfinite(logits)
    assert finite.sum(1).tolist() == [64] * 3
    assert finite[0].nonzero().flatten().tolist() == list(range(0, 128, 2))


def test_what_does_not_fit_is_named(tmp_path):
    _, tensors = made(tmp_path)
    original = json.loads((tmp_path / "config.json").read_text())

    def attempt(complaint, own=None, **values):
        hf = {**original, **values}
        hf["eagle_config"] = {**original["eagle_config"], **(own or {})}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        with pytest.raises(ModelError, match=complaint):
            load_eagle3(tmp_path, TARGET)

    attempt("no EAGLE-3 drafter", architectures=["LlamaForCausalLM"])
    attempt("hidden_size is 64, not 48", hidden_size=64)
    attempt("vocab_size is 321, not 320", vocab_size=321)
    attempt("2 draft layers; 1 is supported", num_hidden_layers=2)
    attempt(r"reads hidden states \[1, 5\]", {"eagle_aux_hidden_state_layer_ids": [1, 5]})
    attempt(r"lacks the tensor input_norm", {"norm_before_fc": True})
    attempt(r"fc.weight of shape \(48, 96\)", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]})
    missing = {"eagle_aux_hidden_state_layer_ids": None}
    attempt("no num_target_layers", missing, num_target_layers=None)
    (tmp_path / "config.json").write_text(json.dumps(original))
    save_file(
        {n: t.contiguous() for n, t in tensors.items()} | {"layers.1.x": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(ModelError, match=r"unexpected tensor layers\.1\.x; an EAGLE-3 drafter"):
        load_eagle3(tmp_path, TARGET)


def test_default_layers():
    assert default_taps(36) == (2, 18, 33)
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(4) == (1, 2)
