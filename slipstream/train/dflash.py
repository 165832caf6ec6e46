"""The DFlash recipe: blocks of masks behind random anchors, cross-entropy on the target's answers.

Source: arXiv 2602.06036, appendix A (anchors, frozen embedding and head, decayed weights); D-PACE
weights from arXiv 2605.18810. The forward here is the one of `models.dflash`, differentiable and
over many blocks of one text at once: a block sees the text before its anchor, and itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import InvalidConfig
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model
from slipstream.models.dflash import DFlashConfig, save_dflash
from slipstream.models.rope import RopeTable
from slipstream.train.recipe import initial, labels

_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""The paper's decay of the loss along a block, by block size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the user may choose of a drafter's size. `taps`: target layers read, evenly spread."""

    layers: int = 1
    intermediate_size: int | None = None
    block_size: int = 8
    taps: int = 3


def draft_config(target: ModelConfig, shape: Shape, *, mask_token_id: int) -> DFlashConfig:
    """Draft layers of the target's width, Qwen3-like as in the published drafters."""
    if not 1 <= shape.taps <= target.num_layers:
        raise InvalidConfig(
            f"taps is {shape.taps}; allowed: 1 to {target.num_layers}, this target's layers."
        )
    hf = {
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": shape.intermediate_size or target.intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_context,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.rope_parameters["rope_theta"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": target.rope_parameters["rope_theta"],
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * shape.layers,
        "num_target_layers": target.num_layers,
    }
    taps = spread(target.num_layers, shape.taps)
    return DFlashConfig(from_hf(hf, source="the recipe"), shape.block_size, mask_token_id, taps)


def spread(num_layers: int, count: int) -> tuple[int, ...]:
    """Feature indices `hs[i]`: `count` layer outputs from layer 1 (or 0) to n - 3 (or the last)."""
    if count == 1:
        return (num_layers // 2 + 1,)
    low, high = min(1, num_layers - 1), max(num_layers - 3, 0)
    if high - low + 1 < count:
        low, high = 0, num_layers - 1
    return tuple(round(low + i * (high - low) / (count - 1)) + 1 for i in range(count))


class DFlashNetwork:
    """Trainable float32 tensors by checkpoint name, and the forward of many blocks of a text."""

    recipe = "dflash"

    def __init__(
        self,
        config: DFlashConfig,
        target: Model,
        *,
        seed: int,
        d_pace: bool = False,
        shapes: dict[str, tuple[int, ...]] | None = None,
    ) -> None:
        if target.head.packed:
            raise InvalidConfig("Training needs the target in float32 on a CPU, or on a GPU.")
        self.config, self._target, self._d_pace = config, target, d_pace
        self.needs, self.draft_len = config.taps, config.block_size - 1
        self._shapes = shapes or config.shapes
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: initial(name, shape, generator).to(target.device).requires_grad_()
            for name, shape in self.shapes.items()
        }
        self._rope = RopeTable(config.model, dtype=torch.float32, device=target.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return self._shapes

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_dflash(folder, self.config, tensors)

    def loss(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """`block_loss` of the blocks behind some anchors."""
        wanted, there = labels(tokens, anchors, self.config.block_size)
        logits = self.logits(features, tokens, anchors)
        return block_loss(logits, wanted, there, d_pace=self._d_pace)

    def agreement(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each row's likeliest token is the text's, [anchors, draft_len]; which exist."""
        wanted, there = labels(tokens, anchors, self.draft_len + 1)
        with torch.no_grad():
            said = self.logits(features, tokens, anchors).argmax(-1)
        return (said == wanted) & there, there

    def logits(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """[anchors, block - 1, vocab]: what each mask says, the k-th about position anchor + k.

        `features` [tokens, taps, hidden] and `tokens` int64 of one text; `anchors` int64 positions.
        """
        return self.head(self.hidden(features, tokens, anchors)[:, 1:])

    def head(self, hidden: Tensor) -> Tensor:
        """The target's logits of normed draft states."""
        return hidden @ self._target.head.weight.float().t()

    def hidden(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Normed outputs of every row of every block: [anchors, block, hidden]."""
        c, block, count = self.config.model, self.config.block_size, len(anchors)
        ids = torch.full((count, block), self.config.mask_token_id, device=tokens.device)
        ids[:, 0] = tokens[anchors]
        at = (anchors[:, None] + torch.arange(block, device=tokens.device)).flatten()
        x = F.embedding(ids.flatten(), self._target.embedding).float()
        features = features[:, : len(self.config.taps)]
        context = self._norm(features.flatten(1).float() @ self.tensors["fc.weight"].t(), "hidden_")
        seen = self._seen(len(tokens), anchors)
        for i in range(c.num_layers):
            x = self._layer(i, x, at, context, seen)
        return self._norm(x, "").view(count, block, -1)

    def _seen(self, length: int, anchors: Tensor) -> Tensor:
        """Bool [blocks * block, text + blocks * block]: who sees whom."""
        own = torch.arange(len(anchors), device=anchors.device).repeat_interleave(
            self.config.block_size
        )
        text = torch.arange(length, device=anchors.device)[None, :] < anchors[own][:, None]
        return torch.cat((text, own[:, None] == own[None, :]), 1)

    def _layer(self, i: int, x: Tensor, at: Tensor, context: Tensor, seen: Tensor) -> Tensor:
        c = self.config.model

        def get(name: str) -> Tensor:
            return self.tensors[f"layers.{i}.{name}.weight"]

        normed = self._norm(x, f"layers.{i}.input_layer")
        text = torch.arange(len(context), device=x.device)
        both = torch.cat((context, normed))
        everywhere = torch.cat((text, at))
        q = self._heads(normed @ get("self_attn.q_proj").t(), at, get("self_attn.q_norm"))
        k = self._heads(both @ get("self_attn.k_proj").t(), everywhere, get("self_attn.k_norm"))
        v = (both @ get("self_attn.v_proj").t()).view(len(both), -1, c.head_dim)
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.repeat_interleave(c.group, 1).transpose(0, 1)[None],
            v.repeat_interleave(c.group, 1).transpose(0, 1)[None],
            attn_mask=seen[None, None],
        )
        x = x + out[0].transpose(0, 1).flatten(1) @ get("self_attn.o_proj").t()
        normed = self._norm(x, f"layers.{i}.post_attention_layer")
        gated = F.silu(normed @ get("mlp.gate_proj").t()) * (normed @ get("mlp.up_proj").t())
        return x + gated @ get("mlp.down_proj").t()

    def _heads(self, x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        """Per-head norm and rotation: [tokens, heads, head_dim]."""
        c = self.config.model
        heads = torch.rms_norm(x.view(len(x), -1, c.head_dim), [c.head_dim], weight, c.norm_eps)
        cos, sin = self._rope.rows(positions, int(positions.max()))
        return heads * cos + torch.roll(heads, c.head_dim // 2, -1) * sin

    def _norm(self, x: Tensor, prefix: str) -> Tensor:
        weight = self.tensors[f"{prefix}norm.weight"]
        return torch.rms_norm(x, [x.shape[-1]], weight, self.config.model.norm_eps)


def block_loss(logits: Tensor, wanted: Tensor, there: Tensor, *, d_pace: bool) -> Tensor:
    """Weighted mean cross-entropy of a batch of blocks.

    Weights fall along a block as exp(-(k - 1) / gamma), or, with `d_pace`, are the chance that the
    draft is still alive there and what follows: sums over j >= k of products up to j of a smoothed
    probability of the right token.
    """
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    each = each.view(wanted.shape)
    if d_pace:
        right = (0.5 * torch.exp(-each.detach()) + 0.5) * there
        alive = right.cumprod(1)
        weight = alive.flip(1).cumsum(1).flip(1)
    else:
        block = wanted.shape[1] + 1
        gamma = _GAMMA.get(block, block / 2)
        steps = torch.arange(wanted.shape[1], device=each.device)
        weight = torch.exp(-steps / gamma).expand_as(each)
    weight = weight * there
    return (each * weight).sum() / weight.sum().clamp(min=1e-6)
