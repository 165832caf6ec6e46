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


class Conv(NamedTuple):
    """A causal convolution along a block whose kernel depends on the token (source: DFlash2 as
    published by z-lab).

    `base` [2 * taps, hidden]: the kernels' fixed part, first the one before the sublayer, then the
    one behind it. `delta` maps a token to what it adds, [2 * taps, hidden / group].
    """

    base: Tensor
    delta: Linear
    group: int


class Mix(NamedTuple):
    """Convolutions around both sublayers of a layer; none reaches out of its `block` of tokens."""

    attention: Conv
    mlp: Conv
    block: int


class Layer(NamedTuple):
    """Weights of one layer. `qk_norm`: [num_heads + kv, head_dim] per-head weights, or None. `mix`:
    a flat batch is whole blocks then.
    """

    attention_norm: Norm
    qkv: Linear
    qk_norm: Optional[Tensor]  # noqa: UP045 - TorchScript resolves this at run time
    rope: bool
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
    mix: Optional[Mix]  # noqa: UP045 - likewise


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


def kernels(x: Tensor, c: Conv) -> Tensor:
    """The kernels of tokens `x` [N, hidden], before and behind the sublayer: [2, taps, N,
    hidden].
    """
    taps = c.base.size(0) // 2
    added = linear(x, c.delta).view(x.size(0), 2, taps, x.size(1) // c.group, 1)
    base = c.base.view(1, 2, taps, x.size(1) // c.group, c.group)
    return (base + added).permute(1, 2, 0, 3, 4).flatten(3)


def convolved(x: Tensor, kernel: Tensor, block: int) -> Tensor:
    """Row t of a block becomes the sum over taps of `kernel[tap, t]` times its row t - tap.

    `x` [N, hidden], N a multiple of `block` but for rows that nobody reads; `kernel` [taps, N,
    hidden].
    """
    out = x * kernel[0]
    at = torch.arange(x.size(0), device=x.device) % block
    for tap in range(1, kernel.size(0)):
        # Filled, not multiplied by zero: a NaN stays in its own block.
        before = torch.roll(x, [tap], [0]).masked_fill((at < tap).unsqueeze(1), 0.0)
        out = out + before * kernel[tap]
    return out


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
        normed = rms_norm(x, layer.attention_norm)
        mix = layer.mix
        kernel = x
        if mix is not None:
            kernel = kernels(normed, mix.attention)
            normed = convolved(normed, kernel[0], mix.block)
        qkv = linear(normed, layer.qkv)
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
        if mix is None:
            x = linear_add(attended, layer.out, x)
        else:
            x = x + convolved(linear(attended, layer.out), kernel[1], mix.block)
        normed = rms_norm(x, layer.mlp_norm)
        if mix is not None:
            kernel = kernels(normed, mix.mlp)
            normed = convolved(normed, kernel[0], mix.block)
        gate_up = linear(normed, layer.gate_up)
        half = gate_up.size(1) // 2
        gated = F.silu(gate_up[:, :half]).mul_(gate_up[:, half:])
        if mix is None:
            x = linear_add(gated, layer.down, x)
        else:
            x = x + convolved(linear(gated, layer.down), kernel[1], mix.block)
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
