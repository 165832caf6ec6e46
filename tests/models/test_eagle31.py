"""EAGLE-3.1 and other variants of EAGLE-3 against a naive float64 reference; what is refused.

Names and shapes are those of vLLM's `llama_eagle3.py` and SGLang's.
"""

import json
from dataclasses import dataclass, replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from slipstream.engine import LLM
from slipstream.errors import ModelError
from slipstream.models.config import from_hf
from slipstream.models.eagle3 import Eagle3Config, load_eagle3, save_eagle3
from slipstream.models.tiny import tiny_config, tiny_model
from slipstream.types import SamplingParams, Span
from tests.helpers import StubRow

LOADED = tiny_model("llama", layers=4)
TARGET = LOADED.model
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
TAPS = (1, 2, 4)


def config_of(family="llama", hf=None, **flags):
    sizes = {"num_hidden_layers": 1, "tie_word_embeddings": False, "num_key_value_heads": 3}
    c = tiny_config(family, **{**sizes, **(hf or {})})
    types, window = c.hf.get("layer_types") or [None] * c.num_layers, c.hf.get("sliding_window")
    windows = tuple(window if t == "sliding_attention" else None for t in types)
    return Eagle3Config(replace(c, windows=windows), TAPS, **flags)


def random_tensors(config, seed=3):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * 1.5 / shape[1] ** 0.5
    if "d2t" in tensors:  # draft token i stands for target token 2 * i
        tensors["d2t"] = torch.arange(config.draft_vocab)
    return tensors


VARIANTS = {
    "plain": config_of(),
    "input_norm": config_of(norm_before_fc=True),
    "fc_norm": config_of(fc_norm=True),
    "both norms": config_of(norm_before_fc=True, fc_norm=True),
    "norm_output": config_of(norm_output=True),
    "norm_before_residual": config_of(norm_before_residual=True),
    "three layers": config_of(hf={"num_hidden_layers": 3}, norm_output=True),
    "reduced": config_of(draft_vocab=64, fc_norm=True, norm_output=True),
    "own head": config_of(draft_vocab=320, mapped=False),
    "own embedding": config_of(own_embedding=True),
    "own width": config_of(
        hf={"hidden_size": 32, "num_hidden_layers": 2}, draft_vocab=64, own_embedding=True,
        target_hidden=48, norm_before_fc=True, fc_norm=True,
    ),
    "qwen3 with bias": config_of("qwen3", hf={"attention_bias": True, "num_hidden_layers": 2}),
    "sliding": config_of(
        hf={
            "num_hidden_layers": 2, "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        }
    ),
}  # fmt: skip


@dataclass
class Row(StubRow):
    pages: tuple[int, ...] = tuple(range(8))


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


class Reference:
    """Straight from the description, float64, one token after the other, no cache layout."""

    def __init__(self, config, tensors):
        self.c, self.config = config.model, config
        self.t = {n: t if n == "d2t" else t.double() for n, t in tensors.items()}
        self.kept = [[] for _ in range(self.c.num_layers)]

    def w(self, name):
        return self.t[f"{name}.weight"]

    def norm(self, x, name):
        return rms(x, self.w(name), self.c.norm_eps)

    def fused(self, features):
        x = features.double().flatten(1)
        if self.config.norm_before_fc:
            x = self.norm(x, "input_norm")
        if self.config.fc_norm:
            parts = x.split(self.config.feature_size, 1)
            x = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], 1)
        return x @ self.w("fc").t()

    def heads(self, x, layer, kind, position):
        name = f"layers.{layer}.self_attn.{kind}"
        y = self.w(f"{name}_proj") @ x
        if self.c.qkv_bias:
            y = y + self.t[f"{name}_proj.bias"]
        y = y.view(-1, self.c.head_dim)
        if self.c.qk_norm and kind != "v":
            y = self.norm(y, f"{name}_norm")
        if kind == "v":
            return y
        half = self.c.head_dim // 2
        angle = position / 10000.0 ** (torch.arange(half).double() / half)
        a, b = y[:, :half], y[:, half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), 1)

    def attention(self, x, layer, position):
        q, k, v = (self.heads(x, layer, kind, position) for kind in "qkv")
        self.kept[layer].append((k, v))
        window = self.c.windows[layer]
        seen = self.kept[layer][-window:] if window else self.kept[layer]
        out = []
        for i, query in enumerate(q):
            j = i // self.c.group
            scores = torch.stack([query @ k[j] for k, _ in seen]) / self.c.head_dim**0.5
            out.append(sum(w * v[j] for w, (_, v) in zip(scores.softmax(0), seen)))
        y = self.w(f"layers.{layer}.self_attn.o_proj") @ torch.cat(out)
        bias = self.t.get(f"layers.{layer}.self_attn.o_proj.bias")
        return y if bias is None else y + bias

    def step(self, token, state, position):
        embedding = self.t.get("embed_tokens.weight", TARGET.embedding.double())
        e, g = embedding[token], self.norm(state, "layers.0.hidden_norm")
        read = torch.cat((self.norm(e, "layers.0.input_layernorm"), g))
        x = g if self.config.norm_before_residual else state
        for i in range(self.c.num_layers):
            inner = read if i == 0 else self.norm(x, f"layers.{i}.input_layernorm")
            x = x + self.attention(inner, i, position)
            y = self.norm(x, f"layers.{i}.post_attention_layernorm")
            mlp = f"layers.{i}.mlp"
            y = silu(self.w(f"{mlp}.gate_proj") @ y) * (self.w(f"{mlp}.up_proj") @ y)
            x = x + self.w(f"{mlp}.down_proj") @ y
        normed = self.norm(x, "norm")
        head = self.t.get("lm_head.weight", TARGET.head.weight.double())
        logits = head @ normed
        if "d2t" in self.t:
            whole = torch.full((320,), float("-inf"), dtype=torch.float64)
            for i, value in enumerate(logits):
                whole[i + int(self.t["d2t"][i])] = value
            logits = whole
        return logits, normed if self.config.norm_output else x


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_the_reference(tmp_path, name):
    config = VARIANTS[name]
    tensors = random_tensors(config)
    save_eagle3(tmp_path, config, tensors)
    drafter = LLM(LOADED, drafter=f"eagle3:{tmp_path}:4", kv_tokens=128).drafter
    tokens = torch.randint(0, 320, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    features = torch.randn(11, 3, 48, generator=torch.Generator().manual_seed(2))
    row, reference = Row(tokens), Reference(config, tensors)
    drafter.absorb(
        [
            Span(row, 0, features[:7]),
        ]
    )
    drafter.absorb([Span(row, 7, features[7:])])
    for position, state in enumerate(reference.fused(features)):
        expected, fed = reference.step(tokens[position + 1], state, position)
    state = drafter._ready[row.request_id].state[None]
    for step in range(3):  # the first token from the features, the next ones from its own output
        found = drafter.weights.logits(state, 320)[0].double()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        token = int(expected.argmax())
        state = drafter._run([(row, 11 + step)], [[token]], drafter.weights.recycled(state))
        expected, fed = reference.step(token, fed, 11 + step)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_read_written_and_served_exactly(tmp_path, name):
    config = VARIANTS[name]
    tensors = random_tensors(config)
    save_eagle3(tmp_path, config, tensors)
    written = load_file(tmp_path / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in written.items() if n != "t2d"} == config.shapes
    loaded = load_eagle3(tmp_path, TARGET)
    assert replace(loaded.config, layers="", model=config.model) == config
    assert loaded.config.model.windows == config.model.windows
    save_eagle3(tmp_path / "again", loaded.config, tensors)
    again = load_eagle3(tmp_path / "again", TARGET)
    state = torch.randn(2, config.model.hidden_size)
    assert torch.equal(again.logits(state, 320), loaded.logits(state, 320))
    llm = LLM(LOADED)
    prompts = [[5, 6, 7, 8] * 3, [9, 9, 9]]
    expected = [c.token_ids for c in llm.generate(prompts, GREEDY)]
    done = llm.fork(f"eagle3:{tmp_path}:3").generate(prompts, GREEDY)
    assert [c.token_ids for c in done] == expected
    assert sum(r.drafted for c in done for r in c.records) > 0


def test_published_shapes_of_the_gpt_oss_head():
    """nvidia/gpt-oss-120b-Eagle3-v3: three taps of width 2880, one norm over all of them."""
    hf = {
        "model_type": "llama", "vocab_size": 201088, "hidden_size": 2880, "head_dim": 64,
        "intermediate_size": 17280, "num_hidden_layers": 1, "num_attention_heads": 64,
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    model = from_hf(hf, source="v3")
    shapes = Eagle3Config(model, (24, 30, 36), 32000, norm_before_fc=True).shapes
    assert shapes["input_norm.weight"] == (8640,)
    assert shapes["fc.weight"] == (2880, 8640)
    assert shapes["layers.0.self_attn.q_proj.weight"] == (4096, 5760)
    assert shapes["layers.0.self_attn.k_proj.weight"] == (512, 5760)
    assert shapes["lm_head.weight"] == (32000, 2880)


def changed(folder, tensors=None, own=None, **values):
    hf = json.loads((folder / "config.json").read_text())
    hf |= values
    hf["eagle_config"] |= own or {}
    (folder / "config.json").write_text(json.dumps(hf))
    if tensors is not None:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")


def test_old_names_and_a_silent_config(tmp_path):
    """`aux_norm_*` and `midlayer` of early files; a norm whose tensor is there is not left out."""
    config = VARIANTS["both norms"]
    tensors = random_tensors(config)
    save_eagle3(tmp_path, config, tensors)
    features = torch.randn(5, 3, 48)
    expected = load_eagle3(tmp_path, TARGET).fused(features)
    old = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
    old |= {"layers.0": "midlayer"}
    renamed = {}
    for name, tensor in tensors.items():
        for new, former in old.items():
            name = name.replace(new + ".", former + ".")
        renamed[name] = tensor
    changed(tmp_path, renamed, own={"norm_before_fc": None}, fc_norm=None)
    loaded = load_eagle3(tmp_path, TARGET)
    assert loaded.config.norm_before_fc
    assert loaded.config.fc_norm
    assert torch.equal(loaded.fused(features), expected)


def test_an_embedding_like_the_targets_is_shared(tmp_path):
    config = VARIANTS["own embedding"]
    tensors = random_tensors(config) | {"embed_tokens.weight": TARGET.embedding}
    save_eagle3(tmp_path, config, tensors)
    loaded = load_eagle3(tmp_path, TARGET)
    assert loaded.embedding.data_ptr() == TARGET.embedding.data_ptr()
    assert not loaded.config.own_embedding


@pytest.mark.parametrize(
    ("own", "values", "complaint"),
    [
        ({"use_aux_hidden_state": False}, {}, "use_aux_hidden_state = False; only True"),
        ({"use_mtp_layernorm": True}, {}, "use_mtp_layernorm = True; only False"),
        ({"use_last_layernorm": False}, {}, "use_last_layernorm = False"),
        ({"next_layer_regular": False}, {}, "next_layer_regular = False"),
        ({}, {"logit_scale": 0.5}, "logit_scale = 0.5; only 1.0"),
        ({}, {"num_aux_hidden_states": 4}, "num_aux_hidden_states = 4, but 3 layers are read"),
        ({}, {"target_hidden_size": 64}, "target_hidden_size is 64, not 48"),
        ({}, {"hidden_size": 32}, "hidden_size is 32, not 48"),
        ({}, {"fc_norm": True}, r"lacks the tensor fc_norm\.0\.weight"),
        ({"norm_before_fc": True}, {}, r"lacks the tensor input_norm\.weight"),
        ({}, {"draft_vocab_size": 63}, r"lm_head\.weight of shape \(64, 48\)"),
        ({}, {"layer_types": ["sliding_attention"]}, "sliding_window = None; .* a window"),
        ({}, {"layer_types": ["full_attention"] * 2}, "one type for each of its 1 layers"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, own, values, complaint):
    config = config_of(draft_vocab=64)
    save_eagle3(tmp_path, config, random_tensors(config))
    changed(tmp_path, own=own, **values)
    with pytest.raises(ModelError, match=complaint):
        load_eagle3(tmp_path, TARGET)


def test_another_width_needs_an_embedding_of_its_own(tmp_path):
    config = VARIANTS["own width"]
    tensors = random_tensors(config)
    save_eagle3(tmp_path, config, tensors)
    changed(tmp_path, {n: t for n, t in tensors.items() if n != "embed_tokens.weight"})
    with pytest.raises(ModelError, match=r"lacks the tensor embed_tokens\.weight"):
        load_eagle3(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("name", "tensor", "complaint"),
    [
        ("d2t", torch.full((64,), 300), "maps draft token 20 to 320 .d2t.; .* 0 to 319"),
        ("d2t", -torch.arange(64), "two draft tokens to one token"),
        ("t2d", torch.ones(320, dtype=torch.bool), "t2d that does not name the tokens"),
        ("mask_hidden", torch.zeros(1, 144), "unexpected tensor mask_hidden"),
        ("fc_norm.3.weight", torch.zeros(48), r"unexpected tensor fc_norm\.3"),
    ],
)
def test_broken_tensors_are_named(tmp_path, name, tensor, complaint):
    config = config_of(draft_vocab=64)
    save_eagle3(tmp_path, config, random_tensors(config))
    tensors = load_file(tmp_path / "model.safetensors")
    changed(tmp_path, tensors | {name: tensor})
    with pytest.raises(ModelError, match=complaint):
        load_eagle3(tmp_path, TARGET)
