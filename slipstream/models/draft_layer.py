"""A decoder layer from its projected queries on: what EAGLE-3 and MTP heads share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.attention import Segment, attend_all
from slipstream.models.config import ModelConfig
from slipstream.models.layers import Layer, rms_norm, rotate_
from slipstream.models.linear import linear, linear_add


def finish_layer(
    qkv: Tensor,
    x: Tensor,
    layer: Layer,
    config: ModelConfig,
    *,
    rope: tuple[Tensor, Tensor],
    storage: Tensor,
    slots: Tensor,
    segments: Sequence[Segment],
    gate: Tensor | None = None,
) -> Tensor:
    """Attention and MLP of one layer: its output, [N, hidden].

    `qkv` [N, heads + 2 * kv heads times head_dim], queries in (group, kv_head) order; `x` the
    residual stream [N, hidden]. Keys and values go to `storage` at `slots`. `gate`: what attention
    is multiplied by, [N, heads * head_dim] in the queries' order.
    """
    c = config
    heads = qkv.view(len(qkv), -1, c.head_dim)
    qk = heads[:, : c.num_heads + c.num_kv_heads]
    if layer.qk_norm is not None:
        qk.copy_(torch.rms_norm(qk, [c.head_dim], None, c.norm_eps) * layer.qk_norm)
    rotate_(qk, *rope)
    storage.index_copy_(0, slots, heads[:, c.num_heads :])
    attended = attend_all(heads, storage, list(segments), c.num_kv_heads)
    if gate is not None:
        attended = attended * gate
    x = linear_add(attended, layer.out, x)
    up = linear(rms_norm(x, layer.mlp_norm), layer.gate_up)
    half = up.shape[-1] // 2
    return linear_add(F.silu(up[:, :half]) * up[:, half:], layer.down, x)
