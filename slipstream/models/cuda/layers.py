"""The layers of a dense decoder on an accelerator; the counterpart of `models.layers`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.cuda.attention import Scratch, Tiles, attend
from slipstream.models.cuda.linear import FEW_ROWS, Normed, linear, linear_gated, linear_norm
from slipstream.models.cuda.mix import mixed
from slipstream.models.cuda.norm import add_norm, rms_norm, silu_gate
from slipstream.models.cuda.rope import rotate_and_store
from slipstream.models.cuda.wide import cut_for, wide
from slipstream.models.dense import Model
from slipstream.models.layers import Layer, Norm
from slipstream.models.linear import Linear

_WIDE = 8192
"""From so many output columns on the stock product reads weights as fast as ours."""
_SMALL, _MORE_ROWS = 2**22, 128
"""Weights of so many numbers at most are read so fast that launches count, up to so many rows:
every tile of rows reads them again, and norms and gates still ride along."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Where the tokens of a forward belong. `positions`, `slots` int32 [tokens]; a token of slot -1
    is computed and not stored. `ahead[i]` lets every query of layer i see its row to the end;
    empty: in no layer.
    """

    positions: Tensor
    slots: Tensor
    tiles: Tiles
    scratch: Scratch
    page_size: int
    ahead: tuple[bool, ...] = ()


def run_layers(
    model: Model, x: Tensor, flat: Flat, storage: Sequence[Tensor], taps: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """The stream after the last layer, [tokens, hidden] before the final norm, and the taps.

    `x` [tokens, hidden] embeddings; layer i's keys and values go to `storage[i]`. Tap 0 is `x`, tap
    i + 1 the output of layer i. Nothing is written in place: a tap stays what it was.
    """
    if any(layer.mix is not None for layer in model.layers):
        return _run_mixed(model, x, flat, storage, taps)
    first = model.layers[0].attention_norm
    stream = Normed(x, rms_norm(x, first.weight, first.eps), None)
    stream, tapped = run_normed(model, stream, flat, storage, taps)
    return stream.x, tapped


def run_normed(
    model: Model,
    stream: Normed,
    flat: Flat,
    storage: Sequence[Tensor],
    taps: Sequence[int] = (),
    gate: Tensor | None = None,
) -> tuple[Normed, list[Tensor]]:
    """`run_layers` for a first layer that reads `stream.scaled`, of any width, whatever made it.

    The result is ready for the final norm. `gate` [tokens, queries * dim]: what the first layer's
    attention is multiplied by.
    """
    norms = [layer.attention_norm for layer in model.layers[1:]] + [model.norm]
    states = {0: stream.x}
    for i, layer in enumerate(model.layers):
        attended = _attention(model, i, stream, flat, storage[i])
        if gate is not None and i == 0:
            attended.mul_(gate)
        due = few(attended, layer.gate_up.weight)
        stream = _joined(attended, layer.out, stream, layer.mlp_norm, due=due)
        stream = _joined(_gated(stream, layer), layer.down, stream, norms[i])
        if i + 1 in taps:
            states[i + 1] = stream.x
    return stream, [states[t] for t in taps]


def _run_mixed(
    model: Model, x: Tensor, flat: Flat, storage: Sequence[Tensor], taps: Sequence[int]
) -> tuple[Tensor, list[Tensor]]:
    """`run_layers` of layers with convolutions: these need the norm's finished output."""
    states = {0: x}
    for i, layer in enumerate(model.layers):
        mix = layer.mix
        normed = rms_norm(x, layer.attention_norm.weight, layer.attention_norm.eps)
        delta = product(normed, mix.attention.delta.weight, mix.attention.delta.bias)
        normed = mixed(normed, delta, mix.attention, side=0, block=mix.block)
        attended = _attention(model, i, Normed(x, normed, None), flat, storage[i])
        attended = product(attended, layer.out.weight, layer.out.bias)
        x = mixed(attended, delta, mix.attention, side=1, block=mix.block, residual=x)
        normed = rms_norm(x, layer.mlp_norm.weight, layer.mlp_norm.eps)
        delta = product(normed, mix.mlp.delta.weight, mix.mlp.delta.bias)
        normed = mixed(normed, delta, mix.mlp, side=0, block=mix.block)
        gated = silu_gate(product(normed, layer.gate_up.weight, layer.gate_up.bias))
        gated = product(gated, layer.down.weight, layer.down.bias)
        x = mixed(gated, delta, mix.mlp, side=1, block=mix.block, residual=x)
        states[i + 1] = x
    return x, [states[t] for t in taps]


def logits(model: Model, hidden: Tensor) -> Tensor:
    """[tokens, hidden] before the final norm -> [tokens, vocab]."""
    if not len(hidden):
        return hidden.new_empty(0, model.config.vocab_size)
    scaled = rms_norm(hidden, model.norm.weight, model.norm.eps)
    return product(scaled, model.head.weight, model.head.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x @ weight.T + bias by whichever way reads this weight faster."""
    if few(x, weight) and len(weight) < _WIDE:
        return linear(x, weight, bias)
    cut = cut_for(x, weight) if bias is None else None
    return wide(x, weight, cut) if cut else F.linear(x, weight, bias)


def few(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels for few rows serve this product: they pay where weights are what is read,
    or where launches are, and float32 is left to the stock products, whose sums the tests compare.
    """
    most = _MORE_ROWS if weight.numel() <= _SMALL else FEW_ROWS
    return len(x) <= most and x.dtype != torch.float32


def _attention(model: Model, index: int, stream: Normed, flat: Flat, storage: Tensor) -> Tensor:
    config, layer = model.config, model.layers[index]
    late = stream.squares is not None  # the bias comes after the factor that is still due
    qkv = product(stream.scaled, layer.qkv.weight, None if late else layer.qkv.bias)
    rotate_and_store(
        qkv,
        model.rope.tables(config.max_context) if layer.rope else None,
        norms=layer.qk_norm,
        eps=layer.attention_norm.eps,
        positions=flat.positions,
        slots=flat.slots,
        storage=storage,
        kv=config.num_kv_heads,
        source=stream if late else None,
        bias=layer.qkv.bias if late else None,
    )
    return attend(
        qkv,
        storage,
        flat.tiles,
        scratch=flat.scratch,
        page_size=flat.page_size,
        causal=not (flat.ahead and flat.ahead[index]),
        window=config.windows[index],
    )


def _joined(x: Tensor, w: Linear, stream: Normed, norm: Norm, *, due: bool = True) -> Normed:
    """The stream with the product of x added, ready for `norm`. `due`: whether the next product
    takes a stream whose 1 / rms is still due.
    """
    if due and few(x, w.weight):
        return linear_norm(x, w.weight, w.bias, stream.x, norm.weight)
    return add_norm(stream.x, product(x, w.weight, w.bias), norm.weight, norm.eps)


def _gated(stream: Normed, layer: Layer) -> Tensor:
    w = layer.gate_up
    if few(stream.scaled, w.weight):
        return linear_gated(stream, w.weight, w.bias, eps=layer.mlp_norm.eps)
    cut = cut_for(stream.scaled, w.weight, gated=True) if w.bias is None else None
    if cut:
        return wide(stream.scaled, w.weight, cut, gated=True)
    return silu_gate(F.linear(stream.scaled, w.weight, w.bias))
