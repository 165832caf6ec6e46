"""An MTP head as a network: one more decoder layer behind the target's last.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2). At position P it reads the target's final
hidden state of P and the embedding of token P + 1; more tokens are drafted by feeding its normed
output back. The layer is a dense one here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.attention import Segment
from slipstream.models.config import ModelConfig
from slipstream.models.draft_layer import finish_layer
from slipstream.models.layers import Layer, Norm, rms_norm
from slipstream.models.linear import Linear, linear
from slipstream.models.reduced import widened
from slipstream.models.rope import RopeTable

if TYPE_CHECKING:
    from slipstream.models.cuda.chain import MtpKernels


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Weights on one device. `sizes`: heads, widths and context of the layer; `depth`: layers of
    the target; `final`: the target's last norm, `head` its head or, with `ids` int64 [rows], the
    rows of these tokens. `gate`: maps what queries are products of to what attention is gated by,
    [heads * head_dim], in the order of the queries.
    """

    sizes: ModelConfig
    depth: int
    embedding: Tensor
    final: Norm
    token_norm: Norm
    state_norm: Norm
    join: Linear
    block: Layer
    norm: Norm
    head: Linear
    rope: RopeTable
    gate: Linear | None = None
    ids: Tensor | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """The output of the target's last layer."""
        return (self.depth,)

    def fused(self, features: Tensor) -> Tensor:
        """The target's hidden states after its final norm: [tokens, hidden]."""
        return rms_norm(features[:, 0].contiguous(), self.final)

    def layer(
        self,
        tokens: Tensor,
        states: Tensor,
        rope: tuple[Tensor, Tensor],
        *,
        storage: Sequence[Tensor],
        slots: Tensor,
        segments: Sequence[Sequence[Segment]],
    ) -> Tensor:
        """The layer's output after the head's norm, [N, hidden]; its keys and values are stored.

        `tokens` int64 [N]: the next token of each position; `states` [N, hidden]: the target's or
        what is fed back.
        """
        embedded = rms_norm(F.embedding(tokens, self.embedding), self.token_norm)
        x = linear(torch.cat((embedded, rms_norm(states, self.state_norm)), 1), self.join)
        read = rms_norm(x, self.block.attention_norm)
        x = finish_layer(
            linear(read, self.block.qkv),
            x,
            self.block,
            self.sizes,
            rope=rope,
            storage=storage[0],
            slots=slots,
            segments=segments[0],
            gate=None if self.gate is None else linear(read, self.gate).sigmoid(),
        )
        return rms_norm(x, self.norm)

    def logits(self, states: Tensor, vocab: int | None) -> Tensor:
        """[N, vocab]; tokens that a reduced head has no row for are -inf. None: [N, rows] of it."""
        return widened(linear(states, self.head), self.ids, vocab)

    def recycled(self, states: Tensor) -> Tensor:
        """The normed output, as vLLM and SGLang feed it back for DeepSeek's and Qwen's heads."""
        return states

    def kernels(self) -> MtpKernels:
        """The same on an accelerator."""
        from slipstream.models.cuda.chain import MtpKernels

        return MtpKernels(self)
