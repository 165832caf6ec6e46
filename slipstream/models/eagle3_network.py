"""EAGLE-3 and 3.1 as a network: sizes and switches, tensors by name, and the draft layers.

Source: EAGLE-3 (arXiv 2503.01840); the switches of 3.1 as vLLM and SGLang read them. At position P
the first layer reads the features of P and the embedding of token P + 1; further layers are plain;
further tokens are drafted by feeding the last layer's output back in place of the features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.attention import Segment
from slipstream.models.config import ModelConfig
from slipstream.models.dense import Model, build_layer, expected_shapes
from slipstream.models.draft_layer import finish_layer
from slipstream.models.layers import Layer, Norm, rms_norm
from slipstream.models.linear import Linear, linear, pack
from slipstream.models.reduced import target_ids, widened
from slipstream.models.rope import RopeTable

if TYPE_CHECKING:
    from slipstream.models.cuda.chain import EagleKernels


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """`model`: the draft layers. `taps`: `hs[i]` indices of the features. `draft_vocab`: rows
    of a head of its own, None to use the target's; `mapped`: its rows stand for the target's tokens
    that `d2t` says. `norm_before_fc`, `fc_norm`: one norm over all features, one each;
    `norm_output`: what is fed back has gone through the final norm; `norm_before_residual`: the
    residual is the normed feature. `target_hidden`: width of a feature where it is not the draft
    layers' own. `own_embedding`: it brings one. `layers`: what to tell the user about which layers
    are read and why.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    draft_vocab: int | None = None
    mapped: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    target_hidden: int | None = None
    own_embedding: bool = False
    layers: str = ""

    @property
    def feature_size(self) -> int:
        """Width of one feature."""
        return self.target_hidden or self.model.hidden_size

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint."""
        hidden, wide = self.model.hidden_size, self.feature_size
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, len(self.taps) * wide)}
        for name, shape in expected_shapes(self.model).items():
            if name.startswith("model."):
                shapes[name.removeprefix("model.")] = shape
        for kind in ("q_proj", "k_proj", "v_proj"):
            name = f"layers.0.self_attn.{kind}.weight"
            shapes[name] = (shapes[name][0], 2 * hidden)
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
        if not self.own_embedding:
            del shapes["embed_tokens.weight"]
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (len(self.taps) * wide,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (wide,) for i in range(len(self.taps))}
        if self.draft_vocab is not None:
            shapes["lm_head.weight"] = (self.draft_vocab, hidden)
            if self.mapped:
                shapes["d2t"] = (self.draft_vocab,)
        return shapes


@dataclass(frozen=True, slots=True)
class Eagle3:
    """Weights on one device, with the target's embedding and head where it has none of its own.

    `ids` int64 [draft_vocab]: the target's token of each row of `head`, None where that is the
    target's order. `over_all`, `each`: norms of the features before `fc`, in this order.
    """

    config: Eagle3Config
    embedding: Tensor
    over_all: Norm | None
    each: tuple[Norm, ...]
    fc: Linear
    feature_norm: Norm
    blocks: tuple[Layer, ...]
    norm: Norm
    head: Linear
    ids: Tensor | None
    rope: RopeTable

    @property
    def taps(self) -> tuple[int, ...]:
        """`hs[i]` indices of the features."""
        return self.config.taps

    @property
    def sizes(self) -> ModelConfig:
        """Heads, widths and context of the layers."""
        return self.config.model

    def fused(self, features: Tensor) -> Tensor:
        """[tokens, taps, target hidden] -> [tokens, hidden]."""
        flat = features.flatten(1)
        if self.over_all is not None:
            flat = rms_norm(flat, self.over_all)
        if self.each:
            chunks = flat.chunk(len(self.each), 1)
            flat = torch.cat(
                [rms_norm(x.contiguous(), n) for x, n in zip(chunks, self.each, strict=True)], 1
            )
        return linear(flat, self.fc)

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
        """The last layer's output [N, hidden] before the final norm; keys and values are stored.

        `tokens` int64 [N]: the next token of each position; `states` [N, hidden]: fused features or
        what is fed back. `storage`, `segments`: one each a layer.
        """
        first = self.blocks[0]
        normed = rms_norm(states, self.feature_norm)
        embedded = rms_norm(F.embedding(tokens, self.embedding), first.attention_norm)
        read = torch.cat((embedded, normed), 1)
        x = normed if self.config.norm_before_residual else states
        for i, block in enumerate(self.blocks):
            x = finish_layer(
                linear(read if i == 0 else rms_norm(x, block.attention_norm), block.qkv),
                x,
                block,
                self.config.model,
                rope=rope,
                storage=storage[i],
                slots=slots,
                segments=segments[i],
            )
        return x

    def logits(self, states: Tensor, vocab: int | None) -> Tensor:
        """Over the target's vocabulary [N, vocab]; tokens the drafter has no row for are -inf.

        Over its own where `vocab` is None: [N, draft_vocab].
        """
        return widened(linear(rms_norm(states, self.norm), self.head), self.ids, vocab)

    def recycled(self, states: Tensor) -> Tensor:
        """What is fed back after a step."""
        return rms_norm(states, self.norm) if self.config.norm_output else states

    def kernels(self) -> EagleKernels:
        """The same on an accelerator."""
        from slipstream.models.cuda.chain import EagleKernels

        return EagleKernels(self)


def from_tensors(config: Eagle3Config, tensors: Mapping[str, Tensor], target: Model) -> Eagle3:
    """Assemble a drafter from tensors by checkpoint name, in the target's dtype and device."""
    c = config.model

    def norm(name: str) -> Norm:
        weight = tensors[f"{name}.weight"]
        return Norm(weight, torch.cat((weight, weight)), c.norm_eps)

    def get(name: str) -> Tensor:
        return tensors[name.removeprefix("model.")]

    mapped = config.draft_vocab is not None and config.mapped
    return Eagle3(
        config=config,
        embedding=tensors["embed_tokens.weight"] if config.own_embedding else target.embedding,
        over_all=norm("input_norm") if config.norm_before_fc else None,
        each=tuple(norm(f"fc_norm.{i}") for i in range(len(config.taps))) if config.fc_norm else (),
        fc=pack(tensors["fc.weight"]),
        feature_norm=norm("layers.0.hidden_norm"),
        blocks=tuple(build_layer(c, i, get) for i in range(c.num_layers)),
        norm=norm("norm"),
        head=target.head if config.draft_vocab is None else pack(tensors["lm_head.weight"]),
        ids=target_ids(tensors["d2t"]) if mapped else None,
        rope=RopeTable(c, dtype=target.dtype, device=target.device),
    )
