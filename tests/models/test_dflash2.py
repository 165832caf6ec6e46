"""DFlash2 checkpoints and their forward: published layouts, convolutions, windows, the selector."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.cache.pages import PageTable
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.config import from_hf
from slipstream.models.dflash import DFlashConfig, load_dflash, save_dflash
from slipstream.models.dflash2 import ARCHITECTURES, DFlash2Config, load_dflash2, save_dflash2
from slipstream.models.layers import Conv, convolved, kernels
from slipstream.models.linear import pack
from slipstream.models.tiny import tiny_model, tiny_tensors
from slipstream.target.target import ForwardRow
from slipstream.train.dflash import Shape, draft_config

LOADED = tiny_model("llama")
PUBLISHED = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False,
    "vocab_size": 248320, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 5, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048, "use_sliding_window": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7}, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262144, "num_target_layers": 64,
    "dflash_config": {
        "block_size": 8, "conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256,
        "selector_top_k": 16, "mask_token_id": 248070, "target_layer_ids": [5, 19, 33, 47, 61],
    },
}  # fmt: skip


def sized(layers=("full",), *, loaded=LOADED, window=9, **more):
    """A config for the tiny target; a layer is "full" or "sliding"."""
    base = draft_config(loaded.config, Shape(layers=len(layers), taps=2), mask_token_id=319)
    hf = dict(base.model.hf) | {
        "layer_types": [f"{kind}_attention" for kind in layers],
        "use_sliding_window": "sliding" in layers,
        "sliding_window": window if "sliding" in layers else None,
    }
    flash = DFlashConfig(from_hf(hf, source="tiny"), 8, 319, base.taps, False)
    return DFlash2Config(flash, **{"kernel": 3, "group": 8, "rank": 12, "top_k": 5, **more})


def weights(config, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = tiny_tensors(config.flash.model, seed=seed)
    tensors = {n.removeprefix("model."): t for n, t in found.items()}
    for name, shape in config.shapes.items():
        if name not in tensors:
            noise = torch.randn(shape, generator=generator)
            norm = name == "hidden_norm.weight"
            tensors[name] = 1 + 0.1 * noise if norm else noise * (0.7 / shape[-1] ** 0.5)
    return {name: tensors[name] for name in config.shapes}


def made(folder, *args, **more):
    config = sized(*args, **more)
    tensors = weights(config)
    save_dflash2(folder, config, tensors)
    return config, tensors


def test_the_published_config_gives_the_published_size(tmp_path):
    """incoai/Qwen3.8-27B-DFlash2: 1,924,404,480 parameters."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    from slipstream.models.dflash2 import read_dflash2_config

    for name in ARCHITECTURES:
        hf = PUBLISHED | {"architectures": [name]}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        config = read_dflash2_config(tmp_path)
    shapes = config.shapes
    assert sum(torch.Size(s).numel() for s in shapes.values()) == 1_924_404_480
    assert shapes["layers.4.attention_conv.base_kernel"] == (2, 2, 5120)
    assert shapes["layers.0.mlp_conv.kernel_projection.weight"] == (1280, 5120)
    assert shapes["candidate_selector.predecessor_codebook"] == (248320, 256)
    assert shapes["candidate_selector.successor_codebook"] == (248320, 256)
    assert shapes["candidate_selector.hidden_projection.weight"] == (256, 5120)
    assert shapes["fc.weight"] == (5120, 25600)
    assert config.flash.taps == (6, 20, 34, 48, 62)
    assert (config.flash.block_size, config.flash.mask_token_id) == (8, 248070)
    assert config.flash.model.windows == (2048,) * 5
    assert config.flash.ahead == (True,) * 5


def test_what_is_saved_is_loaded_again_and_saved_the_same(tmp_path):
    extra = {"multiplier": 0.5, "softcap": 20.0}
    config, tensors = made(tmp_path / "a", ("full", "sliding"), **extra)
    own = {n for n in load_file(tmp_path / "a/model.safetensors") if "conv" in n or "selector" in n}
    convs = {f"layers.{i}.{c}_conv" for i in range(2) for c in ("attention", "mlp")}
    assert own == (
        {f"{c}.base_kernel" for c in convs}
        | {f"{c}.kernel_projection.weight" for c in convs}
        | {f"candidate_selector.{c}_codebook" for c in ("predecessor", "successor")}
        | {"candidate_selector.hidden_projection.weight"}
    )
    hf = json.loads((tmp_path / "a/config.json").read_text())
    assert "block_size" not in hf
    assert hf["is_causal"] is False
    assert hf["dflash_config"] == {
        "block_size": 8, "conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 12,
        "selector_top_k": 5, "mask_token_id": 319, "target_layer_ids": [0, 1],
    }  # fmt: skip
    loaded = load_dflash2(tmp_path / "a", LOADED.model)
    assert loaded.config.shapes == config.shapes
    assert loaded.config.flash.ahead == (True, True)
    assert (loaded.config.multiplier, loaded.config.softcap) == (0.5, 20.0)
    save_dflash2(tmp_path / "b", loaded.config, tensors)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_what_does_not_fit_is_named(tmp_path):
    _, tensors = made(tmp_path)
    original = json.loads((tmp_path / "config.json").read_text())

    def attempt(complaint, own=None, **values):
        hf = {**original, **values}
        hf["dflash_config"] = {**original["dflash_config"], **(own or {})}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        with pytest.raises(ModelError, match=complaint):
            load_dflash2(tmp_path, LOADED.model)

    attempt("no DFlash2 drafter", architectures=["DFlashDraftModel"])
    attempt("hidden_size is 64, not 48", hidden_size=64)
    attempt(r"base_kernel of shape \(2, 3, 48\), its config says \(2, 2", {"conv_kernel_size": 2})
    attempt(r"kernel_projection.weight of shape \(36, 48\)", {"conv_group_size": 16})
    attempt("conv_group_size = 7; it must divide hidden_size, 48", {"conv_group_size": 7})
    attempt("conv_kernel_size = 9; allowed: 1 to 8", {"conv_kernel_size": 9})
    attempt("selector_top_k = 321; allowed: 1 to 320", {"selector_top_k": 321})
    attempt("selector_rank = None", {"selector_rank": None})
    attempt(r"predecessor_codebook of shape \(320, 12\)", {"selector_rank": 16})
    attempt("input_embedding_scale = 2.0 .*not supported", input_embedding_scale=2.0)
    attempt("output_multiplier = -1; it must be above 0", output_multiplier=-1)
    attempt("causal = True", is_causal=True)
    attempt(r"lacks the tensor lm_head\.weight", draft_vocab_size=64)
    sliding = {"use_sliding_window": True, "layer_types": ["sliding_attention"]}
    attempt("sliding_window = 7; its block of 8 must fit", sliding_window=7, **sliding)
    (tmp_path / "config.json").write_text(json.dumps(original))
    with pytest.raises(InvalidConfig, match=r"draft_len is 8 .*its block holds 7"):
        LLM(LOADED, drafter=f"dflash2:{tmp_path}:8")
    save_file(tensors | {"d2t": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="unexpected tensor d2t; a DFlash2"):
        load_dflash2(tmp_path, LOADED.model)
    tensors.pop("candidate_selector.successor_codebook")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the tensor .*successor_codebook"):
        load_dflash2(tmp_path, LOADED.model)


def test_keys_that_a_plain_dflash_does_not_read_are_refused(tmp_path):
    config = sized().flash
    save_dflash(tmp_path, config, {n: t for n, t in weights(sized()).items() if n in config.shapes})
    load_dflash(tmp_path, LOADED.model)
    hf = json.loads((tmp_path / "config.json").read_text())
    for key in ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"):
        (tmp_path / "config.json").write_text(json.dumps(hf | {key: 30.0}))
        with pytest.raises(ModelError, match=f"{key} = 30.0"):
            load_dflash(tmp_path, LOADED.model)
    for own in ({"use_swa": True}, {"attention_sink_bias": True}, {"attention_value_scale": 0.5}):
        values = hf | {"dflash_config": hf["dflash_config"] | own}
        (tmp_path / "config.json").write_text(json.dumps(values))
        with pytest.raises(ModelError, match=f"{next(iter(own))} = .* not supported"):
            load_dflash(tmp_path, LOADED.model)
    harmless = {"output_multiplier": 1.0, "final_logit_softcapping": None}
    (tmp_path / "config.json").write_text(json.dumps(hf | harmless))
    load_dflash(tmp_path, LOADED.model)


def naive_conv(x, base, delta, group, side, block):
    """Token by token and channel by channel; `base` [2, taps, hidden], `delta` [N, 2, taps, G]."""
    out = torch.zeros_like(x)
    for n in range(len(x)):
        for tap in range(base.shape[1]):
            if n % block >= tap:
                for channel in range(x.shape[1]):
                    weight = base[side, tap, channel] + delta[n, side, tap, channel // group]
                    out[n, channel] += weight * x[n - tap, channel]
    return out


@pytest.mark.parametrize("taps", [1, 2, 3])
def test_the_convolution_reads_its_own_block_only(taps):
    generator = torch.Generator().manual_seed(taps)
    x, z = torch.randn(2, 10, 12, generator=generator)
    base = torch.randn(2, taps, 12, generator=generator)
    projection = torch.randn(2 * taps * 3, 12, generator=generator)
    around = kernels(x, Conv(base.flatten(0, 1), pack(projection), 4))
    delta = (x @ projection.t()).view(10, 2, taps, 3)
    for side, rows in enumerate((x, z)):
        found = convolved(rows, around[side], 5)
        torch.testing.assert_close(found, naive_conv(rows, base, delta, 4, side, 5))
    bad = z.clone()
    bad[4] = float("nan")
    found = convolved(bad, around[1], 5)
    assert found[5:].isfinite().all()  # the next block is somebody else's


def naive_block(config, tensors, context, tokens, start, target):
    """Draft states of one block by plain loops, in float64: [block, hidden] after the last layer.

    `context[i]`: the draft layer i's keys and values at the positions before `start`.
    """
    c = config.flash.model
    x = target.embedding[tokens].double()
    cos, sin = target_rope(config, start + len(tokens))

    def get(i, name):
        return tensors[f"layers.{i}.{name}"].double()

    def norm(values, weight=None):
        scaled = values / (values.pow(2).mean(-1, keepdim=True) + c.norm_eps).sqrt()
        return scaled if weight is None else scaled * weight

    def turn(heads, at):
        half = c.head_dim // 2
        swapped = torch.cat((heads[half:], heads[:half]))
        return heads * cos[at] + swapped * sin[at]

    def around(i, name, u, inner):
        base = get(i, f"{name}.base_kernel")
        rows = get(i, f"{name}.kernel_projection.weight")
        delta = (u @ rows.t()).view(len(u), 2, config.kernel, -1)
        y = naive_conv(u, base, delta, config.group, 0, len(u))
        return naive_conv(inner(y), base, delta, config.group, 1, len(u))

    def attention(i, y):
        q, k, v = (
            (y @ get(i, f"self_attn.{p}_proj.weight").t()).view(len(y), -1, c.head_dim)
            for p in "qkv"
        )
        q, k = (
            norm(q, get(i, "self_attn.q_norm.weight")),
            norm(k, get(i, "self_attn.k_norm.weight")),
        )
        kv = c.num_kv_heads
        before = context[i].double()
        window, ahead = c.windows[i], config.flash.ahead[i]
        out = torch.zeros_like(q)
        for t in range(len(y)):
            p = start + t
            seen = [s for s in range(start + len(y)) if window is None or s > p - window]
            seen = [s for s in seen if ahead or s <= p]
            for head in range(c.num_heads):
                own = head // c.group
                query = turn(q[t, head], p)
                ks = [before[s, own] if s < start else turn(k[s - start, own], s) for s in seen]
                vs = [before[s, kv + own] if s < start else v[s - start, own] for s in seen]
                scores = torch.stack(ks) @ query / c.head_dim**0.5
                out[t, head] = scores.softmax(0) @ torch.stack(vs)
        return out.flatten(1) @ get(i, "self_attn.o_proj.weight").t()

    def mlp(i, y):
        gate = torch.nn.functional.silu(y @ get(i, "mlp.gate_proj.weight").t())
        return (gate * (y @ get(i, "mlp.up_proj.weight").t())) @ get(i, "mlp.down_proj.weight").t()

    for i in range(c.num_layers):
        u = norm(x, get(i, "input_layernorm.weight"))
        x = x + around(i, "attention_conv", u, lambda y, i=i: attention(i, y))
        u = norm(x, get(i, "post_attention_layernorm.weight"))
        x = x + around(i, "mlp_conv", u, lambda y, i=i: mlp(i, y))
    return x


def target_rope(config, length):
    c = config.flash.model
    exponents = torch.arange(0, c.head_dim, 2).double() / c.head_dim
    angles = torch.arange(length).double()[:, None] / c.rope_parameters["rope_theta"] ** exponents
    return (
        torch.cat((angles.cos(), angles.cos()), -1),
        torch.cat((-angles.sin(), angles.sin()), -1),
    )


KINDS = [("full",), ("sliding",), ("sliding", "full"), ("full", "sliding", "sliding")]


@pytest.mark.parametrize("causal", [None, False])
@pytest.mark.parametrize("layers", KINDS, ids="-".join)
def test_blocks_are_those_of_a_naive_forward(tmp_path, layers, causal):
    """Three requests of different lengths at once, with every kind of layer, windows and all."""
    config, tensors = made(tmp_path, layers)
    hf = json.loads((tmp_path / "config.json").read_text())
    hf["is_causal"] = causal
    (tmp_path / "config.json").write_text(json.dumps(hf))
    tensors = {n: t.to(torch.bfloat16).float() for n, t in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    drafter = LLM(LOADED, drafter=f"dflash2:{tmp_path}:7", kv_tokens=512).drafter
    config = drafter.flash2.config
    assert config.flash.ahead == tuple(kind == "full" or causal is False for kind in layers)
    rows, contexts = [], []
    for request, length in enumerate((4, 21, 22)):
        table = PageTable(drafter.block.pool, expected_tokens=length + 8)
        assert table.reserve(length + 8)
        tokens = [30 + request, *[319] * 7]
        rows.append(ForwardRow(tokens, length, table.pages, 8))
        features = torch.randn(length, 2, 48, generator=torch.Generator().manual_seed(request))
        context = drafter.weights.context(features, torch.arange(length), length - 1)
        at = drafter._slots(table.pages, torch.arange(length).numpy())
        for storage, fresh in zip(drafter.block.storage, context, strict=True):
            storage[at] = fresh
        contexts.append(context)
    found = drafter.block.forward(rows).features[:, 0].view(3, 8, -1)
    for own, row, context in zip(found, rows, contexts, strict=True):
        ids = torch.tensor(row.tokens)
        expected = naive_block(config, tensors, context, ids, row.start, LOADED.model)
        torch.testing.assert_close(own.double(), expected, atol=2e-4, rtol=2e-4)


def test_a_plain_dflash_with_sliding_layers_that_see_ahead_loads(tmp_path):
    """The same forward without convolutions: identity kernels are none at all."""
    config = sized(("sliding", "full"))
    tensors = weights(config)
    for name in tensors:
        if "kernel" in name:
            tensors[name].zero_()
        if "base_kernel" in name:
            tensors[name][:, 0] = 1
    save_dflash2(tmp_path / "two", config, tensors)
    own = {n: t for n, t in tensors.items() if n in config.flash.shapes}
    save_dflash(tmp_path / "one", config.flash, own)
    assert load_dflash(tmp_path / "one", LOADED.model).config.ahead == (True, True)
    seen = []
    for spec in ("dflash2:" + str(tmp_path / "two"), "dflash:" + str(tmp_path / "one")):
        block = LLM(LOADED, drafter=spec, kv_tokens=64).drafter.block
        rows = [ForwardRow([7, *[319] * 7], 24, [2, 3], 8)]
        seen.append(block.forward(rows).logits)
    torch.testing.assert_close(*seen, atol=1e-4, rtol=1e-4)
