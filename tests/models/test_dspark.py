"""DSpark checkpoints: published layouts are read and written, what does not fit is named."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine import LLM
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.config import from_hf
from slipstream.models.dflash import DFlashConfig
from slipstream.models.dspark import DSpark, DSparkConfig, load_dspark
from slipstream.models.tiny import tiny_model
from slipstream.train.recipes import Shape, make
from slipstream.types import SamplingParams

LOADED = tiny_model("llama")


def made(folder, **more):
    shape = Shape(draft_len=7, taps=2, rank=16, mask_token_id=319, **more)
    net = make("dspark", LOADED.model, shape, seed=1)
    net.save(folder, net.tensors)
    return net


def test_the_published_size_comes_out():
    """RadixArk/Qwen3.8-27B-DSpark v2: 1,857,358,337 parameters in 62 tensors."""
    hf = {
        "model_type": "qwen3", "vocab_size": 248320, "hidden_size": 5120,
        "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6, "rope_theta": 1e7, "tie_word_embeddings": False,
    }  # fmt: skip
    flash = DFlashConfig(from_hf(hf, source="v2"), 7, 248070, (6, 20, 34, 48, 62))
    shapes = DSparkConfig(flash, "vanilla", 256).shapes
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 1_857_358_337
    assert len(shapes) == 62


@pytest.mark.parametrize("markov", ["vanilla", "gated", "rnn"])
def test_written_names_are_the_published_ones_and_load_again(tmp_path, markov):
    net = made(tmp_path, markov=markov)
    names = set(load_file(tmp_path / "model.safetensors"))
    heads = {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight"}
    heads |= {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    extra = {"gated": "gate_proj", "rnn": "joint_proj"}.get(markov)
    heads |= {f"markov_head.{extra}.{kind}" for kind in ("weight", "bias")} if extra else set()
    assert {n for n in names if "head" in n} == heads
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf["architectures"] == ["DSparkDraftModel"]
    assert hf["block_size"] == 7
    loaded = load_dspark(tmp_path, LOADED.model)
    assert loaded.config.shapes == net.shapes
    # DeepSpec's spelling: keys at the top, embedding and head repeated, another architecture.
    own = hf.pop("dflash_config")
    hf |= own | {"architectures": ["Qwen3DSparkModel"]}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"embed_tokens.weight": torch.zeros(1), "lm_head.weight": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    again = load_dspark(tmp_path, LOADED.model)
    assert again.config.shapes == net.shapes
    assert torch.equal(again.first, loaded.first)


def test_what_does_not_fit_is_named(tmp_path):
    made(tmp_path)
    with pytest.raises(InvalidConfig, match=r"draft_len is 8 .*its block holds 7"):
        LLM(LOADED, drafter=f"dspark:{tmp_path}:8")
    original = json.loads((tmp_path / "config.json").read_text())

    def attempt(complaint, own=None, **values):
        hf = {**original, **values}
        hf["dflash_config"] = {**original["dflash_config"], **(own or {})}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        with pytest.raises(ModelError, match=complaint):
            load_dspark(tmp_path, LOADED.model)

    attempt("no DSpark drafter", architectures=["DFlashDraftModel"])
    attempt("markov_head_type 'hidden'", {"markov_head_type": "hidden"})
    attempt(r"shape \(1, 64\), its config says \(1, 48\)", {"confidence_head_with_markov": False})
    attempt("markov_rank = 0; only drafters with a Markov head", {"markov_rank": 0})
    attempt(r"markov_w1.weight of shape \(320, 16\)", {"markov_rank": 8})
    attempt("unexpected tensor confidence_head", {"enable_confidence_head": False})
    attempt("hidden_size is 64, not 48", hidden_size=64)
    with pytest.raises(InvalidConfig, match="markov is 'hidden' of rank 16"):
        made(tmp_path / "x", markov="hidden")


def test_wide_drafts_that_all_ended_leave_narrow_ones_alone(tmp_path, monkeypatch):
    """One request may draft one token and does; the other may draft three and is cut at once."""
    made(tmp_path)
    real = DSpark.survival

    def survival(self, tokens, hidden):
        return 0 * real(self, tokens, hidden) + torch.tensor([1.0, 0.0])[: len(tokens)]

    monkeypatch.setattr(DSpark, "survival", survival)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 9)]
    prompts = [[5, 6, 7], [8, 9]]
    found = LLM(LOADED, drafter=f"dspark:{tmp_path}:3,stop=0.5").generate(prompts, params)
    expected = LLM(LOADED).generate(prompts, params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.records[1].drafted for c in found] == [1, 0]
