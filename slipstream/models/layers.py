"""The layers of a dense decoder as one function over weights, compiled by TorchScript.

Compiled, because a decoding step on a CPU is some five hundred small operations between matrix
products: with Python out of the way a step of the embedded model takes about a quarter less time.
Plain Python where TorchScript ended (Python 3.14): same function, same numbers.
"""

import sys
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.attention import Segment, attend_all
from slipstream.models.linear import Linear, linear, linear_add


class Norm(NamedTuple):
    """RMS norm: `weight` [size]; `doubled` is the weight twice, [2 * size]."""

    weight: Tensor
    doubled: Tensor
    eps: float


class Layer(NamedTuple):
    """Weights of one layer. `qk_norm`: [num_heads + kv, head_dim] per-head weights, or None."""

    attention_norm: Norm
    qkv: Linear
    qk_norm: Optional[Tensor]  # noqa: UP045 - TorchScript resolves this at run time
    rope: bool
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dimension of x [N, size]."""
    size = x.size(-1)
    if x.size(0) <= 48 and x.dtype != torch.float32:
        # [x, -x] has mean 0 and variance mean(x^2): its layer norm is x's RMS norm, in half the
        # time, because torch has a fused CPU kernel for layer norm only. More rows gain nothing.
        both = torch.cat([x, -x], -1)
        return torch.layer_norm(both, [2 * size], norm.doubled, None, norm.eps)[:, :size]
    return torch.rms_norm(x, [size], norm.weight, norm.eps)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate heads `x` [N, heads, head_dim] in place; `cos`, `sin` [N, 1, head_dim]."""
    swapped = torch.roll(x, [x.size(-1) // 2], [-1])
    x.mul_(cos).addcmul_(swapped, sin)


def run_layers(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    layers: list[Layer],
    storage: list[Tensor],
    slots: Tensor,
    plans: list[list[Segment]],
    plan_of: list[int],
    kv: int,
    taps: list[int],
) -> tuple[Tensor, list[Tensor]]:
    """Residual stream after the last layer, before the final norm: [N, hidden], and the taps.

    `x` [N, hidden] embeddings; `cos`, `sin` [N, 1, head_dim]. Layer i's keys and values go to
    `storage[i]` [slots, 2 * kv, head_dim] at `slots` int64 [N] and are attended to as
    `plans[plan_of[i]]` says. Tap 0 is `x`, tap i + 1 the output of layer i; ascending order. There
    may be fewer slots than rows: the rows behind them only fill up the products.
    """
    states: list[Tensor] = []
    if 0 in taps:
        states.append(x)
    count = x.size(0)
    for i, layer in enumerate(layers):
        qkv = linear(rms_norm(x, layer.attention_norm), layer.qkv)
        dim = storage[i].size(2)
        heads = qkv.view(count, qkv.size(1) // dim, dim)
        queries = heads.size(1) - 2 * kv
        qk = heads[:, : queries + kv]
        weights = layer.qk_norm
        if weights is not None:
            qk.copy_(torch.rms_norm(qk, [dim], None, layer.attention_norm.eps) * weights)
        if layer.rope:
            rotate_(qk, cos, sin)
        storage[i].index_copy_(0, slots, heads[: slots.size(0), queries:])
        attended = attend_all(heads, storage[i], plans[plan_of[i]], kv)
        x = linear_add(attended, layer.out, x)
        gate_up = linear(rms_norm(x, layer.mlp_norm), layer.gate_up)
        half = gate_up.size(1) // 2
        gated = F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])
        x = linear_add(gated, layer.down, x)
        if i + 1 in taps:
            states.append(x)
    return x, states


@cache
def compiled() -> Callable[..., Any]:
    """`run_layers`, compiled where this Python still can."""
    if sys.version_info >= (3, 14):
        return run_layers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(run_layers)
