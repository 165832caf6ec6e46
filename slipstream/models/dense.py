"""The dense decoder: Llama, Mistral, Qwen2, Qwen3 and SmolLM3 are switches of one lean module.

Two layouts differ from the checkpoint, both chosen at load time so that no step has to move data:
q, k and v are one projection; and query heads are ordered (group, kv_head) instead of
(kv_head, group). Folding a group's heads into query rows, which lets attention read each key once
for the whole group, is then a view, and so is its output (`out`'s columns are permuted to match).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.linear import Linear
from slipstream.models.rope import RopeTable, rotate_

_SMALL_BATCH = 8
"""Up to so many rows the one-kernel norm is faster than torch's composite of six."""


class Attention(Protocol):
    """Stores keys and values of the running batch and attends over what each row may see."""

    def __call__(self, layer: int, heads: Tensor) -> Tensor:
        """`heads` [N, group * kv + 2 * kv, head_dim], rotated: queries, keys, values.

        Returns [N, group * kv * head_dim], heads in the same (group, kv) order.
        """
        ...


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight for x [N, hidden], computed in float32."""

    __slots__ = ("_doubled", "_eps", "_shape", "_weight")

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._shape = weight, eps, tuple(weight.shape)
        self._doubled = torch.cat((weight, weight)) if weight.dtype != torch.float32 else None

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of x [N, hidden]."""
        if self._doubled is not None and x.shape[0] <= _SMALL_BATCH:
            # [x, -x] has mean 0 and variance mean(x^2): its layer norm is x's RMS norm, in a third
            # of the time because torch has a fused CPU kernel for layer norm only.
            twice = torch.cat((x, -x), -1)
            size = 2 * self._shape[0]
            return torch.layer_norm(twice, (size,), self._doubled, None, self._eps)[
                :, : self._shape[0]
            ]
        return F.rms_norm(x, self._shape, self._weight, self._eps)


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer. `qk_norm`: [group * kv + kv, head_dim] per-head weights, or None."""

    attention_norm: RmsNorm
    qkv: Linear
    qk_norm: Tensor | None
    out: Linear
    mlp_norm: RmsNorm
    gate_up: Linear
    down: Linear


class Model:
    """Weights and config of a dense decoder on one device; holds no request state."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor,
        layers: Sequence[Layer],
        norm: RmsNorm,
        head: Linear,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.dtype, self.device = embedding.dtype, embedding.device
        self.rope = RopeTable(config, dtype=self.dtype, device=self.device)

    def hidden(
        self, ids: Tensor, rope: tuple[Tensor, Tensor], attend: Attention, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Residual stream after the last layer, before the final norm: [N, hidden], and the taps.

        `ids` int64 [N]; `rope` from `self.rope.rows`. Tap 0 is the embeddings, tap i + 1 the output
        of layer i, each [N, hidden].
        """
        x = F.embedding(ids, self.embedding)
        stream = [x] if 0 in taps else []
        cos, sin = rope
        config = self.config
        queries = config.num_heads
        heads_shape = (-1, queries + 2 * config.num_kv_heads, config.head_dim)
        rotated = queries + config.num_kv_heads
        features = config.intermediate_size
        for i, layer in enumerate(self.layers):
            heads = layer.qkv(layer.attention_norm(x)).view(heads_shape)
            qk = heads[:, :rotated]
            if layer.qk_norm is not None:
                qk.copy_(F.rms_norm(qk, (config.head_dim,), None, config.norm_eps) * layer.qk_norm)
            if config.rope[i]:
                rotate_(qk, cos, sin)
            x = layer.out.add(attend(i, heads), x)
            both = layer.gate_up(layer.mlp_norm(x))
            gated = F.silu(both[:, :features]).mul_(both[:, features:])
            x = layer.down.add(gated, x)
            if i + 1 in taps:
                stream.append(x)
        by_tap = dict(zip(sorted(set(taps)), stream, strict=True))
        return x, [by_tap[t] for t in taps]

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] before the final norm -> [N, vocab], in the model's dtype."""
        return self.head(self.norm(hidden))


def build(config: ModelConfig, get: Callable[[str], Tensor]) -> Model:
    """Assemble a model from checkpoint tensors.

    `get(name)` returns a Hugging Face tensor by name, checked for shape, in the wanted dtype and
    on the wanted device.
    """
    embedding = get("model.embed_tokens.weight")
    return Model(
        config,
        embedding=embedding,
        layers=[_layer(config, f"model.layers.{i}.", get) for i in range(config.num_layers)],
        norm=RmsNorm(get("model.norm.weight"), config.norm_eps),
        head=Linear(embedding if config.tied else get("lm_head.weight")),
    )


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


def _layer(config: ModelConfig, prefix: str, get: Callable[[str], Tensor]) -> Layer:
    c = config

    def stacked(names: Sequence[str], kind: str) -> list[Tensor]:
        return [get(f"{prefix}{name}.{kind}") for name in names]

    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    weights = stacked(qkv, "weight")
    biases = stacked(qkv, "bias") if c.qkv_bias else []
    for part in (weights, biases):
        if part:
            part[0] = _group_major(part[0], c)
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    out = _group_major(get(f"{prefix}self_attn.o_proj.weight").t(), c).t().contiguous()
    return Layer(
        attention_norm=RmsNorm(get(f"{prefix}input_layernorm.weight"), c.norm_eps),
        qkv=Linear(torch.cat(weights), torch.cat(biases) if biases else None),
        qk_norm=_qk_norm(c, prefix, get) if c.qk_norm else None,
        out=Linear(out, get(f"{prefix}self_attn.o_proj.bias") if c.out_bias else None),
        mlp_norm=RmsNorm(get(f"{prefix}post_attention_layernorm.weight"), c.norm_eps),
        gate_up=Linear(
            torch.cat(stacked(gate_up, "weight")),
            torch.cat(stacked(gate_up, "bias")) if c.mlp_bias else None,
        ),
        down=Linear(
            get(f"{prefix}mlp.down_proj.weight"),
            get(f"{prefix}mlp.down_proj.bias") if c.mlp_bias else None,
        ),
    )


def _group_major(rows: Tensor, config: ModelConfig) -> Tensor:
    """Reorder query heads along dimension 0 from (kv_head, group) to (group, kv_head)."""
    shape = (config.num_kv_heads, config.group, config.head_dim, *rows.shape[1:])
    return rows.reshape(shape).transpose(0, 1).reshape(rows.shape)


def _qk_norm(config: ModelConfig, prefix: str, get: Callable[[str], Tensor]) -> Tensor:
    q = get(f"{prefix}self_attn.q_norm.weight").expand(config.num_heads, -1)
    k = get(f"{prefix}self_attn.k_norm.weight").expand(config.num_kv_heads, -1)
    return torch.cat((q, k))
