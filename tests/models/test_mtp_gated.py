"""Gated MTP heads (Qwen3.5, 3.6, 3.8): published names and shapes, a naive float64 reference."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from slipstream.engine import LLM
from slipstream.errors import ModelError
from slipstream.models.dense import Model
from slipstream.models.mtp import load_mtp
from slipstream.models.mtp_gated import gated_config, save_gated
from slipstream.models.tiny import save_tiny, tiny_model
from slipstream.types import SamplingParams, Span
from tests.helpers import StubRow

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LOADED = tiny_model("llama", layers=3)
TARGET: Model = LOADED.model
# The head's own sizes; only hidden_size and vocab_size are the target's.
SIZES = {
    "model_type": "qwen3_5_text", "hidden_size": 48, "vocab_size": 320, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10], "mrope_interleaved": True,
    },
}  # fmt: skip
# What HF's config copies say of Qwen3.8-27B.
QWEN38 = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 248320, "max_position_embeddings": 262144, "attn_output_gate": True,
    "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip


@dataclass
class Row(StubRow):
    pages: tuple[int, ...] = tuple(range(8))


def tensors_of(config, seed=5):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 0.3 * noise if len(shape) == 1 else noise * 1.5 / shape[1] ** 0.5
    return tensors


def made(folder, loaded=LOADED, **changes):
    config = gated_config({**SIZES, **changes}, loaded.config, source="x")
    tensors = tensors_of(config)
    save_gated(folder, config, tensors)
    return config, tensors


class Reference:
    """Straight from the description, float64, one token after the other."""

    def __init__(self, config, tensors, theta=10000.0):
        self.c, self.rotated, self.theta = config.model, config.rotated, theta
        self.t = {n: t.double() for n, t in tensors.items()}
        self.kept = []

    def w(self, name):
        return self.t[f"mtp.{name}.weight"]

    def norm(self, x, name):
        x = x / (x.pow(2).mean(-1, keepdim=True) + self.c.norm_eps).sqrt()
        return x * (1 + self.w(name))

    def rotate(self, x, position):
        """The first `rotated` dimensions of [heads, head_dim]; i pairs with i + rotated / 2."""
        half = self.rotated // 2
        angle = position / self.theta ** (torch.arange(half).double() / half)
        a, b, rest = x[:, :half], x[:, half : self.rotated], x[:, self.rotated :]
        turned = (a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin())
        return torch.cat((*turned, rest), 1)

    def attention(self, x, position):
        c, base = self.c, "layers.0.self_attn"
        both = (self.w(f"{base}.q_proj") @ x).view(c.num_heads, 2 * c.head_dim)
        q, gate = both[:, : c.head_dim], both[:, c.head_dim :]
        k, v = ((self.w(f"{base}.{n}_proj") @ x).view(-1, c.head_dim) for n in "kv")
        q = self.rotate(self.norm(q, f"{base}.q_norm"), position)
        self.kept.append((self.rotate(self.norm(k, f"{base}.k_norm"), position), v))
        out = []
        for i, query in enumerate(q):
            j = i // c.group
            scores = torch.stack([query @ k[j] for k, _ in self.kept]) / c.head_dim**0.5
            weights = scores.softmax(0)
            out.append(sum(w * v[j] for w, (_, v) in zip(weights, self.kept)) * gate[i].sigmoid())
        return self.w(f"{base}.o_proj") @ torch.cat(out)

    def step(self, token, hidden, position):
        """`hidden`: the target's after its final norm, or what this gave before."""
        both = (
            self.norm(TARGET.embedding[token].double(), "pre_fc_norm_embedding"),
            self.norm(hidden, "pre_fc_norm_hidden"),
        )
        x = self.norm(self.layer(self.w("fc") @ torch.cat(both), position), "norm")
        return TARGET.head.weight.double() @ x, x

    def layer(self, x, position):
        x = x + self.attention(self.norm(x, "layers.0.input_layernorm"), position)
        y = self.norm(x, "layers.0.post_attention_layernorm")
        mlp = "layers.0.mlp"
        y = silu(self.w(f"{mlp}.gate_proj") @ y) * (self.w(f"{mlp}.up_proj") @ y)
        return x + self.w(f"{mlp}.down_proj") @ y


def final(features):
    """The target's final norm, float64."""
    x, norm = features[:, 0].double(), TARGET.norm
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("partial", [0.25, 0.5, 1.0])
def test_the_head_is_the_reference(tmp_path, partial):
    rope = {**SIZES["rope_parameters"], "partial_rotary_factor": partial}
    config, tensors = made(tmp_path, rope_parameters=rope)
    assert config.rotated == 16 * partial
    drafter = LLM(LOADED, drafter=f"mtp:{tmp_path}:4", kv_tokens=128).drafter
    assert drafter.needs == (3,)
    tokens = torch.randint(0, 320, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    features = torch.randn(11, 1, 48, generator=torch.Generator().manual_seed(2))
    row, reference = Row(tokens), Reference(config, tensors)
    drafter.absorb([Span(row, 0, features[:7])])
    drafter.absorb([Span(row, 7, features[7:])])
    for position, hidden in enumerate(final(features)):
        expected, fed = reference.step(tokens[position + 1], hidden, position)
    state = drafter._ready[row.request_id].state[None]
    for step in range(3):  # the first token from the target's state, the next from its own output
        found = drafter.weights.logits(state, 320)[0].double()
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        token = int(expected.argmax())
        state = drafter._run([(row, 11 + step)], [[token]], drafter.weights.recycled(state))
        expected, fed = reference.step(token, fed, 11 + step)


def test_the_reference_is_hugging_faces_layer():
    """So that gate, norms and rotation are not this file's own reading alone."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as hf
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

    config = gated_config(SIZES, LOADED.config, source="x")
    tensors = {n: t.double() for n, t in tensors_of(config).items()}
    sizes = {k: v for k, v in SIZES.items() if not k.startswith("mtp")}
    sizes |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    their = Qwen3_5TextConfig(**sizes, attn_implementation="eager")
    layer = hf.Qwen3_5DecoderLayer(their, 0).double()
    prefix = "mtp.layers.0."
    layer.load_state_dict(
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    )
    x = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(3)).double()
    at = torch.arange(9)[None]
    mask = torch.full((9, 9), float("-inf")).triu(1)[None, None].double()
    rope = hf.Qwen3_5TextRotaryEmbedding(their).double()(x, at[None].expand(3, 1, 9))
    expected = layer(x, position_embeddings=rope, attention_mask=mask, position_ids=at)
    expected = expected[0] if isinstance(expected, tuple) else expected
    reference = Reference(config, tensors)
    for position, row in enumerate(x[0]):
        found = reference.layer(row, position)
        torch.testing.assert_close(found, expected[0, position], atol=1e-5, rtol=1e-5)


def test_published_names_and_shapes_of_qwen38_27b():
    from slipstream.models.tiny import tiny_config

    target = tiny_config("qwen3", hidden_size=5120, vocab_size=248320, num_hidden_layers=64)
    config = gated_config(QWEN38, target, source="Qwen3.8-27B")
    layer = "mtp.layers.0"
    assert config.rotated == 64
    assert config.shapes == {
        "mtp.fc.weight": (5120, 10240),
        "mtp.pre_fc_norm_embedding.weight": (5120,),
        "mtp.pre_fc_norm_hidden.weight": (5120,),
        "mtp.norm.weight": (5120,),
        f"{layer}.input_layernorm.weight": (5120,),
        f"{layer}.post_attention_layernorm.weight": (5120,),
        f"{layer}.self_attn.q_proj.weight": (12288, 5120),
        f"{layer}.self_attn.k_proj.weight": (1024, 5120),
        f"{layer}.self_attn.v_proj.weight": (1024, 5120),
        f"{layer}.self_attn.o_proj.weight": (5120, 6144),
        f"{layer}.self_attn.q_norm.weight": (256,),
        f"{layer}.self_attn.k_norm.weight": (256,),
        f"{layer}.mlp.gate_proj.weight": (17408, 5120),
        f"{layer}.mlp.up_proj.weight": (17408, 5120),
        f"{layer}.mlp.down_proj.weight": (5120, 17408),
    }
    # Multimodal checkpoints nest the same; what Qwen leaves out has Qwen's defaults.
    short = {k: v for k, v in QWEN38.items() if k != "head_dim"} | {"rope_parameters": None}
    nested = {"model_type": "qwen3_5", "text_config": short}
    again = gated_config(nested, target, source="x")
    assert (again.shapes, again.rotated) == (config.shapes, 64)


def test_written_read_and_served_exactly(tmp_path):
    config, tensors = made(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    assert {n: tuple(t.shape) for n, t in written.items()} == config.shapes
    loaded = load_mtp(tmp_path, TARGET)
    reread = gated_config(
        json.loads((tmp_path / "config.json").read_text()), LOADED.config, source="x"
    )
    assert (reread.shapes, reread.rotated) == (config.shapes, config.rotated)
    save_gated(tmp_path / "again", reread, tensors)
    again = load_mtp(tmp_path / "again", TARGET)
    assert torch.equal(again.gate.weight, loaded.gate.weight)
    assert torch.equal(again.block.qkv.weight, loaded.block.qkv.weight)
    llm = LLM(LOADED)
    prompts = [[5, 6, 7, 8] * 3, [9, 9, 9]]
    expected = [c.token_ids for c in llm.generate(prompts, GREEDY)]
    done = llm.fork(f"mtp:{tmp_path}:3").generate(prompts, GREEDY)
    assert [c.token_ids for c in done] == expected
    assert sum(r.drafted for c in done for r in c.records) > 0


def test_a_head_inside_the_targets_checkpoint(tmp_path):
    """Sizes are then the target's own, and nothing but `mtp.*` is read."""
    save_tiny(tmp_path, "qwen3")
    loaded = tiny_model("qwen3")
    hf = json.loads((tmp_path / "config.json").read_text())
    config = gated_config(hf, loaded.config, source="x")
    tensors = tensors_of(config)
    whole = load_file(tmp_path / "model.safetensors") | tensors
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_gated(tmp_path / "alone", config, tensors)
    inside, alone = (load_mtp(p, loaded.model) for p in (tmp_path, tmp_path / "alone"))
    assert torch.equal(inside.gate.weight, alone.gate.weight)
    assert torch.equal(inside.join.weight, alone.join.weight)
    assert inside.taps == (2,)
    llm = LLM(str(tmp_path), dtype="float32", drafter=f"mtp:{tmp_path}:2")
    (done,) = llm.generate([[5, 6, 7, 8]], GREEDY)
    assert done.token_ids == llm.fork("none").generate([[5, 6, 7, 8]], GREEDY)[0].token_ids
    assert sum(r.drafted for r in done.records) > 0


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"hidden_size": 96}, "made for another target: its hidden_size is 96, not 48"),
        ({"vocab_size": 100}, "vocab_size is 100, not 320"),
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2; only 1"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True"),
        ({"attn_output_gate": False}, "attn_output_gate = False; only True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"num_attention_heads": 4}, r"q_proj\.weight of shape \(192, 48\).*\(128, 48\)"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rotary type 'yarn' on 0.25 of each head of 16",
        ),
        ({"rope_parameters": {"partial_rotary_factor": 0.2}}, "on 0.2 of each head of 16"),
    ],
)
def test_configs_that_do_not_fit_are_named(tmp_path, values, complaint):
    made(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(hf | values))
    with pytest.raises(ModelError, match=complaint):
        load_mtp(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        ("mtp.layers.0.mlp.experts.gate_up_proj", (4, 8, 8), "mixture of experts .mtp.layers.0"),
        ("mtp.layers.0.mlp.gate.weight", (4, 48), "mixture of experts .* only dense ones are read"),
        ("mtp.layers.1.input_layernorm.weight", (48,), r"unexpected tensor mtp\.layers\.1"),
        ("mtp.fc.weight", (48, 48), r"mtp\.fc\.weight of shape \(48, 48\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path, name, shape, complaint):
    _, tensors = made(tmp_path)
    save_file(tensors | {name: torch.zeros(shape)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=complaint):
        load_mtp(tmp_path, TARGET)


def test_a_missing_tensor_is_named(tmp_path):
    _, tensors = made(tmp_path)
    del tensors["mtp.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks the tensor mtp\.norm\.weight"):
        load_mtp(tmp_path, TARGET)
