"""MTP heads: names of the GLM and DeepSeek layout, also inside a target's own checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine import LLM
from slipstream.errors import ModelError
from slipstream.models.mtp import head_config, load_mtp
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.train.mtp import MtpNetwork
from slipstream.types import SamplingParams

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


def made(folder, loaded):
    net = MtpNetwork(head_config(loaded.config), loaded.model, steps=3, seed=1)
    net.save(folder, net.tensors)
    return net


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "smollm3"])
def test_names_and_serving_for_every_family(tmp_path, family):
    loaded = tiny_model(family, layers=3)
    made(tmp_path, loaded)
    names = set(load_file(tmp_path / "model.safetensors"))
    heads = ["enorm", "hnorm", "eh_proj", "shared_head.norm"]
    layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "self_attn.o_proj"]
    assert {f"model.layers.3.{n}.weight" for n in heads + layer} <= names
    assert all(n.startswith("model.layers.3.") for n in names)
    llm = LLM(loaded)
    prompts = [[5, 6, 7, 8] * 3, [9, 9, 9]]
    expected = [c.token_ids for c in llm.generate(prompts, GREEDY)]
    done = llm.fork(f"mtp:{tmp_path}:3").generate(prompts, GREEDY)
    assert [c.token_ids for c in done] == expected
    assert sum(r.drafted for c in done for r in c.records) > 0


def test_a_head_inside_the_targets_checkpoint(tmp_path):
    save_tiny(tmp_path, "qwen3")
    loaded = tiny_model("qwen3")
    made(tmp_path / "head", loaded)
    own = load_file(tmp_path / "head" / "model.safetensors")
    whole = load_file(tmp_path / "model.safetensors") | own
    # GLM and DeepSeek repeat the target's embedding and head in the layer; they are the target's.
    whole["model.layers.2.embed_tokens.weight"] = torch.zeros(320, 48)
    whole["model.layers.2.shared_head.head.weight"] = torch.zeros(320, 48)
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inside, alone = (load_mtp(p, loaded.model) for p in (tmp_path, tmp_path / "head"))
    states, features = torch.randn(3, 48), torch.randn(3, 1, 48)
    assert torch.equal(inside.logits(states, 320), alone.logits(states, 320))
    assert torch.equal(inside.fused(features), alone.fused(features))
    assert inside.taps == (2,)
    llm = LLM(str(tmp_path), dtype="float32", drafter=f"mtp:{tmp_path}:2")
    (done,) = llm.generate([[5, 6, 7, 8]], GREEDY)
    assert done.token_ids == llm.fork("none").generate([[5, 6, 7, 8]], GREEDY)[0].token_ids
    assert sum(r.drafted for r in done.records) > 0


def test_what_does_not_fit_is_named(tmp_path):
    loaded = tiny_model("llama")
    net = made(tmp_path, loaded)
    with pytest.raises(ModelError, match="hidden_size is 48, not 96"):
        load_mtp(tmp_path, tiny_model("llama", hidden_size=96).model)
    with pytest.raises(ModelError, match=r"lacks the tensor model\.layers\.3\.enorm"):
        load_mtp(tmp_path, tiny_model("llama", layers=3).model)
    tensors = {n: t.detach().contiguous() for n, t in net.tensors.items()}
    short = tensors | {"model.layers.2.eh_proj.weight": torch.zeros(48, 48)}
    save_file(short, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"eh_proj.weight of shape \(48, 48\)"):
        load_mtp(tmp_path, loaded.model)
    save_file(tensors | {"model.layers.2.gate": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected tensor .*gate; an MTP head has no such"):
        load_mtp(tmp_path, loaded.model)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | {"vocab_size": 3}))
    with pytest.raises(ModelError, match="vocab_size is 3, not 320"):
        load_mtp(tmp_path, loaded.model)
