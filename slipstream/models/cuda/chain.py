"""Chain drafters' layers (EAGLE-3, MTP heads) through the kernels: the counterpart of `layer`,
`logits` and `recycled` of `models.eagle3_network` and `models.mtp_head`, same numbers.

What both start with, the norms of the next token's embedding and of the state side by side, is one
kernel; from there on it is a decoder layer whose first product is wider than its stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import overlap, wait
from slipstream.models.cuda.layers import Flat, few, product, run_normed
from slipstream.models.cuda.linear import Normed, linear_norm
from slipstream.models.cuda.norm import rms_norm
from slipstream.models.dense import Model
from slipstream.models.eagle3_network import Eagle3
from slipstream.models.layers import Norm
from slipstream.models.mtp_head import MtpHead


class ChainKernels(Protocol):
    """A chain drafter's weights as its passes on the device call them."""

    model: Model
    """Its layers, final norm and head."""

    ids: Tensor | None
    """The target's token of each row of the head, int64; None where that is the target's order."""

    def fused(self, features: Tensor) -> Tensor:
        """[tokens, taps, target hidden] -> the states the first layer reads, [tokens, hidden]."""
        ...

    def run(
        self, tokens: Tensor, states: Tensor, flat: Flat, storage: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Output for `tokens` int64 [N], the token after each position, and what the head reads of
        it up to a positive factor a row, which no argmax sees: [N, hidden] each.
        """
        ...

    def read(self, states: Tensor) -> Tensor:
        """What the head reads of outputs."""
        ...

    def recycled(self, states: Tensor) -> Tensor:
        """What is fed back of outputs."""
        ...


class EagleKernels:
    """`Eagle3` on the device."""

    def __init__(self, weights: Eagle3) -> None:
        w = self._weights = weights
        self.ids = w.ids
        self.model = Model(
            w.sizes, embedding=w.embedding, layers=w.blocks, norm=w.norm, head=w.head
        )

    def fused(self, features: Tensor) -> Tensor:
        """See `ChainKernels`."""
        w, flat = self._weights, features.flatten(1)
        if w.over_all is not None:
            flat = rms_norm(flat, w.over_all.weight, w.over_all.eps)
        if w.each:
            chunks = zip(flat.chunk(len(w.each), 1), w.each, strict=True)
            flat = torch.cat([rms_norm(x.contiguous(), n.weight, n.eps) for x, n in chunks], 1)
        return product(flat, w.fc.weight, w.fc.bias)

    def run(
        self, tokens: Tensor, states: Tensor, flat: Flat, storage: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The last layer's output before the final norm, and after all of it but 1 / rms."""
        w = self._weights
        both = joined(
            tokens, w.embedding, states, w.blocks[0].attention_norm, state_norm=w.feature_norm
        )
        x = both[:, states.shape[1] :].contiguous() if w.config.norm_before_residual else states
        stream, _ = run_normed(self.model, Normed(x, both, None), flat, storage)
        return stream.x, stream.scaled

    def read(self, states: Tensor) -> Tensor:
        """See `ChainKernels`."""
        return rms_norm(states, self.model.norm.weight, self.model.norm.eps)

    def recycled(self, states: Tensor) -> Tensor:
        """See `ChainKernels`."""
        return self.read(states) if self._weights.config.norm_output else states


class MtpKernels:
    """`MtpHead` on the device."""

    def __init__(self, weights: MtpHead) -> None:
        w = self._weights = weights
        self.ids = w.ids
        self.model = Model(
            w.sizes, embedding=w.embedding, layers=[w.block], norm=w.norm, head=w.head
        )

    def fused(self, features: Tensor) -> Tensor:
        """See `ChainKernels`."""
        final = self._weights.final
        return rms_norm(features[:, 0].contiguous(), final.weight, final.eps)

    def run(
        self, tokens: Tensor, states: Tensor, flat: Flat, storage: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The layer's output after the head's norm, twice."""
        w, first = self._weights, self._weights.block.attention_norm
        both = joined(tokens, w.embedding, states, w.token_norm, state_norm=w.state_norm)
        gate = None
        if few(both, w.join.weight) and w.gate is None:
            stream = linear_norm(both, w.join.weight, w.join.bias, None, first.weight)
        else:
            x = product(both, w.join.weight, w.join.bias)
            stream = Normed(x, rms_norm(x, first.weight, first.eps), None)
        if w.gate is not None:
            gate = product(stream.scaled, w.gate.weight, w.gate.bias).sigmoid_()
        stream, _ = run_normed(self.model, stream, flat, storage, gate=gate)
        out = stream.scaled
        if stream.squares is not None:
            out = rms_norm(stream.x, w.norm.weight, w.norm.eps)
        return out, out

    def read(self, states: Tensor) -> Tensor:
        """See `ChainKernels`."""
        return states

    def recycled(self, states: Tensor) -> Tensor:
        """See `ChainKernels`."""
        return states


@triton.jit
def _join_kernel(
    tokens,
    embedding,
    states,
    token_norm,
    state_norm,
    out,
    size,
    eps,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < size
    if half == 0:
        token = tl.load(tokens + row).to(tl.int64)
        values = tl.load(embedding + token * size + at, mask=inside, other=0.0)
        weights = tl.load(token_norm + at, mask=inside, other=0.0)
    else:
        values = tl.load(states + row * size + at, mask=inside, other=0.0)
        weights = tl.load(state_norm + at, mask=inside, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    cell = out + (row * 2 + half) * size + at
    tl.store(cell, (wide * scale).to(values.dtype) * weights, mask=inside)


def joined(
    tokens: Tensor, embedding: Tensor, states: Tensor, token_norm: Norm, *, state_norm: Norm
) -> Tensor:
    """Normed embeddings of `tokens` int64 [N] beside normed `states` [N, hidden]: [N, 2 * hidden].

    `embedding` [vocab, hidden]; both norms have the same epsilon.
    """
    rows, size = states.shape
    out = states.new_empty(rows, 2 * size)
    _join_kernel[(rows, 2)](
        tokens,
        embedding,
        states,
        token_norm.weight,
        state_norm.weight,
        out,
        size,
        token_norm.eps,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size >= 2048 else 4,
        **overlap(states),
    )
    return out
