"""The dense decoder: Llama, Mistral, Qwen2, Qwen3 and SmolLM3 are switches of one lean module.

Two layouts differ from the checkpoint, both chosen at load time so that no step has to move data:
q, k and v are one projection; and query heads are ordered (group, kv_head) instead of
(kv_head, group). Folding a group's heads into query rows, which lets attention read each key once
for the whole group, is then a view, and so is its output (`out`'s columns are permuted to match).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.attention import Segment
from slipstream.models.config import ModelConfig
from slipstream.models.layers import Layer, Norm, compiled, rms_norm
from slipstream.models.linear import Linear, cheaper_rows, linear, pack
from slipstream.models.rope import RopeTable


class Model:
    """Weights and config of a dense decoder on one device; holds no request state."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = list(layers)
        self.norm = norm
        self.head = head
        self.dtype, self.device = embedding.dtype, embedding.device
        self.rope = RopeTable(config, dtype=self.dtype, device=self.device)

    def hidden(
        self,
        ids: Tensor,
        rope: tuple[Tensor, Tensor],
        *,
        storage: list[Tensor],
        slots: Tensor,
        plans: list[list[Segment]],
        plan_of: list[int],
        taps: Sequence[int] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Residual stream before the final norm, [N, hidden], and the taps, each [N, hidden].

        `ids` int64 [N]; `rope` from `self.rope.rows`; the rest as `layers.run_layers` says. Tap 0
        is the embeddings, tap i + 1 the output of layer i.
        """
        wanted, count = sorted(set(taps)), len(ids)
        spare = cheaper_rows(count, self.head) - count
        if spare:
            ids = F.pad(ids, (0, spare))
            rope = (F.pad(rope[0], (0, 0, 0, 0, 0, spare)), F.pad(rope[1], (0, 0, 0, 0, 0, spare)))
        x, states = compiled()(
            F.embedding(ids, self.embedding),
            *rope,
            self.layers,
            storage,
            slots,
            plans,
            plan_of,
            self.config.num_kv_heads,
            wanted,
        )
        by_tap = dict(zip(wanted, states, strict=True))
        return x[:count], [by_tap[t][:count] for t in taps]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] before the final norm -> [N, vocab], in the model's dtype."""
        count = len(hidden)
        spare = cheaper_rows(count, self.head) - count
        if spare:
            hidden = F.pad(hidden, (0, 0, 0, spare))
        return linear(rms_norm(hidden, self.norm), self.head)[:count]


def build(
    config: ModelConfig, get: Callable[[str], Tensor], *, head: Linear | None = None
) -> Model:
    """Assemble a model from checkpoint tensors.

    `get(name)` returns a Hugging Face tensor by name, checked for shape, in the wanted dtype and
    on the wanted device. `head`: one that is already there, instead of the checkpoint's.
    """
    embedding = get("model.embed_tokens.weight")
    return Model(
        config,
        embedding=embedding,
        layers=[build_layer(config, i, get) for i in range(config.num_layers)],
        norm=_norm(get("model.norm.weight"), config),
        head=head or pack(embedding if config.tied else get("lm_head.weight")),
    )


def head_rows(model: Model, ids: Tensor) -> Tensor:
    """The head's plain rows [len(ids), hidden] of token ids int64.

    A packed head is opaque, so that of an untied model is asked what it makes of unit vectors:
    products with one term are exact. A few at a time, for [hidden, vocab] may not fit.
    """
    if model.config.tied:
        return model.embedding[ids]
    units = torch.eye(model.config.hidden_size, dtype=model.dtype, device=model.device)
    columns = [linear(part.contiguous(), model.head)[:, ids] for part in units.split(64)]
    return torch.cat(columns).t().contiguous()


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor a checkpoint of `config` must hold."""
    c = config
    q, kv, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tied:
        shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    linears = {
        "self_attn.q_proj": (q, c.hidden_size, c.qkv_bias),
        "self_attn.k_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.v_proj": (kv, c.hidden_size, c.qkv_bias),
        "self_attn.o_proj": (c.hidden_size, q, c.out_bias),
        "mlp.gate_proj": (inner, c.hidden_size, c.mlp_bias),
        "mlp.up_proj": (inner, c.hidden_size, c.mlp_bias),
        "mlp.down_proj": (c.hidden_size, inner, c.mlp_bias),
    }
    norms = {"input_layernorm": c.hidden_size, "post_attention_layernorm": c.hidden_size}
    if c.qk_norm:
        norms |= {"self_attn.q_norm": c.head_dim, "self_attn.k_norm": c.head_dim}
    for i in range(c.num_layers):
        for name, (rows, columns, bias) in linears.items():
            shapes[f"model.layers.{i}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"model.layers.{i}.{name}.bias"] = (rows,)
        for name, size in norms.items():
            shapes[f"model.layers.{i}.{name}.weight"] = (size,)
    return shapes


def _norm(weight: Tensor, config: ModelConfig) -> Norm:
    return Norm(weight, torch.cat((weight, weight)), config.norm_eps)


def build_layer(config: ModelConfig, index: int, get: Callable[[str], Tensor]) -> Layer:
    """One layer from checkpoint tensors; `get` as for `build`."""
    c, prefix = config, f"model.layers.{index}."

    def stacked(names: Sequence[str], kind: str) -> list[Tensor]:
        return [get(f"{prefix}{name}.{kind}") for name in names]

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    weights = stacked(qkv, "weight")
    biases = stacked(qkv, "bias") if c.qkv_bias else []
    for part in (weights, biases):
        if part:
            part[0] = group_major(part[0], c)
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    out = group_major(get(f"{prefix}self_attn.o_proj.weight").t(), c).t().contiguous()
    return Layer(
        attention_norm=_norm(get(f"{prefix}input_layernorm.weight"), c),
        qkv=pack(torch.cat(weights), torch.cat(biases) if biases else None),
        qk_norm=_qk_norm(c, prefix, get) if c.qk_norm else None,
        rope=c.rope[index],
        out=pack(out, get(f"{prefix}self_attn.o_proj.bias") if c.out_bias else None),
        mlp_norm=_norm(get(f"{prefix}post_attention_layernorm.weight"), c),
        gate_up=pack(
            torch.cat(stacked(gate_up, "weight")),
            torch.cat(stacked(gate_up, "bias")) if c.mlp_bias else None,
        ),
        down=pack(
            get(f"{prefix}mlp.down_proj.weight"),
            get(f"{prefix}mlp.down_proj.bias") if c.mlp_bias else None,
        ),
        mix=None,
    )


def group_major(rows: Tensor, config: ModelConfig) -> Tensor:
    """Reorder query heads along dimension 0 from (kv_head, group) to (group, kv_head)."""
    shape = (config.num_kv_heads, config.group, config.head_dim, *rows.shape[1:])
    return rows.reshape(shape).transpose(0, 1).reshape(rows.shape)


def _qk_norm(config: ModelConfig, prefix: str, get: Callable[[str], Tensor]) -> Tensor:
    q = get(f"{prefix}self_attn.q_norm.weight").expand(config.num_heads, -1)
    k = get(f"{prefix}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
    return torch.cat((q, k))
