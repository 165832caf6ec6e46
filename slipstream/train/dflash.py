"""The DFlash recipe: blocks of masks behind random anchors, cross-entropy on the target's answers.

Source: arXiv 2602.06036, appendix A (anchors, frozen embedding and head, decayed weights); D-PACE
weights from arXiv 2605.18810; `soft` labels, the target's law, as NVIDIA's Model-Optimizer trains.
The forward here is the one of `models.dflash`, differentiable and over many blocks of many texts at
once: a block sees its text before its anchor, and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream.errors import InvalidConfig
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model
from slipstream.models.dflash import DFlashConfig, save_dflash
from slipstream.models.rope import RopeTable
from slipstream.train.head import DraftHead, normalized, trained
from slipstream.train.recipe import (
    Batch,
    agreement,
    hard,
    initial,
    labels,
    soft,
    target_law,
)

_ATTENTION = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""cuDNN's attention plans anew for every shape, half a second a step of texts of all lengths."""

_GAMMA = {16: 7.0, 10: 5.0, 8: 4.0}
"""The paper's decay of the loss along a block, by block size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the user may choose of a drafter's size. `taps`: target layers read, evenly spread."""

    layers: int = 1
    intermediate_size: int | None = None
    block_size: int = 8
    taps: int = 3


def draft_config(
    target: ModelConfig, shape: Shape, *, mask_token_id: int, draft_vocab: int | None = None
) -> DFlashConfig:
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
    model = from_hf(hf, source="the recipe")
    return DFlashConfig(model, shape.block_size, mask_token_id, taps, draft_vocab=draft_vocab)


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
    by_head_row: tuple[str, ...] = ()

    def __init__(
        self,
        config: DFlashConfig,
        target: Model,
        *,
        seed: int,
        d_pace: bool = False,
        soft: bool = False,
        shapes: dict[str, tuple[int, ...]] | None = None,
        vocab: Tensor | None = None,
    ) -> None:
        if target.head.packed:
            raise InvalidConfig("Training needs the target in float32 on a CPU, or on a GPU.")
        self.config, self._target, self._d_pace, self._soft = config, target, d_pace, soft
        self.needs, self.draft_len = config.taps, config.block_size - 1
        if soft:
            self.needs = (*config.taps, target.config.num_layers)
        self._shapes = trained(shapes or config.shapes)
        self.draft_head = DraftHead(target, vocab)
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: initial(name, shape, generator).to(target.device).requires_grad_()
            for name, shape in self.shapes.items()
        }
        self._rope = RopeTable(config.model, dtype=torch.float32, device=target.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that is trained."""
        return self._shapes

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_dflash(folder, self.config, {**tensors, **self.draft_head.stored()})

    def loss(self, batch: Batch) -> Tensor:
        """`block_loss` of the blocks behind the anchors."""
        wanted, there = labels(batch, self.draft_len)
        columns, known = self.draft_head.columns(wanted)
        each = self._each(batch, self.logits(batch), columns)
        return block_loss(each, there & known, d_pace=self._d_pace)

    def _each(self, batch: Batch, logits: Tensor, columns: Tensor) -> Tensor:
        """Cross-entropies to columns of the text's tokens, or if `soft` to the target's laws."""
        if not self._soft:
            return hard(logits, columns)
        last = batch.features_at(batch.places(0, self.draft_len), -1)
        return soft(logits, normalized(self.draft_head.cut(target_law(self._target, last))))

    def agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Network`: whether each row's likeliest token is the text's."""
        with torch.no_grad():
            return agreement(self.draft_head.tokens(self.logits(batch).argmax(-1)), batch)

    def logits(self, batch: Batch) -> Tensor:
        """[texts, blocks, draft_len, head's rows]: what the k-th mask says about anchor + k."""
        return self.draft_head.logits(self.hidden(batch)[:, :, 1:])

    def hidden(self, batch: Batch) -> Tensor:
        """Normed outputs of every row of every block: [texts, blocks, block, hidden]."""
        c, block = self.config.model, self.config.block_size
        texts, blocks = batch.anchors.shape
        ids = torch.full(
            (texts, blocks, block), self.config.mask_token_id, device=batch.tokens.device
        )
        ids[:, :, 0] = batch.tokens.gather(1, batch.anchors)
        at = (batch.anchors[..., None] + torch.arange(block, device=ids.device)).flatten(1)
        x = F.embedding(ids.flatten(1), self._target.embedding).float()
        taps = batch.features[:, :, : len(self.config.taps)].flatten(2).float()
        context = self._norm(taps @ self.tensors["fc.weight"].t(), "hidden_")
        seen, rope = self._seen(batch), self._turns(context.shape[1], at)
        for i in range(c.num_layers):
            x = self._layer(i, x, context, seen, rope)
        return self._norm(x, "").view(texts, blocks, block, -1)

    def _turns(self, longest: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine at a text's positions and then its rows': [texts, both, 1, head_dim]."""
        text = torch.arange(longest, device=at.device).expand(len(at), -1)
        both = torch.cat((text, at), 1)
        cos, sin = self._rope.rows(both.flatten(), longest + self.config.block_size)
        return cos.view(*both.shape, 1, -1), sin.view(*both.shape, 1, -1)

    def _seen(self, batch: Batch) -> Tensor:
        """Bool [texts, 1, blocks * block, longest + blocks * block]: who sees whom."""
        block, device = self.config.block_size, batch.tokens.device
        own = torch.arange(batch.anchors.shape[1], device=device).repeat_interleave(block)
        places = torch.arange(batch.tokens.shape[1], device=device)
        text = places < batch.anchors.repeat_interleave(block, 1)[..., None]
        blocks = (own[:, None] == own[None, :]).expand(len(text), -1, -1)
        return torch.cat((text, blocks), 2)[:, None]

    def _layer(
        self, i: int, x: Tensor, context: Tensor, seen: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        normed = self._norm(x, f"layers.{i}.input_layer")
        x = x + self._around(
            f"layers.{i}.attention_conv", normed, lambda u: self._attend(i, u, context, seen, rope)
        )
        normed = self._norm(x, f"layers.{i}.post_attention_layer")
        return x + self._around(f"layers.{i}.mlp_conv", normed, lambda u: self._gated(i, u))

    def _around(self, name: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """A sublayer's output; descendants put something named `name` around it."""
        return sublayer(x)

    def _attend(
        self, i: int, normed: Tensor, context: Tensor, seen: Tensor, rope: tuple[Tensor, Tensor]
    ) -> Tensor:
        c, get = self.config.model, self._getter(i)
        both = torch.cat((context, normed), 1)
        rows = normed.shape[1]
        own = (rope[0][:, -rows:], rope[1][:, -rows:])
        q = self._heads(normed @ get("self_attn.q_proj").t(), own, get("self_attn.q_norm"))
        k = self._heads(both @ get("self_attn.k_proj").t(), rope, get("self_attn.k_norm"))
        v = (both @ get("self_attn.v_proj").t()).view(*both.shape[:2], -1, c.head_dim).to(q.dtype)
        with sdpa_kernel(_ATTENTION):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.repeat_interleave(c.group, 2).transpose(1, 2),
                v.repeat_interleave(c.group, 2).transpose(1, 2),
                attn_mask=seen,
            )
        return out.transpose(1, 2).flatten(2) @ get("self_attn.o_proj").t()

    def _gated(self, i: int, normed: Tensor) -> Tensor:
        get = self._getter(i)
        gated = F.silu(normed @ get("mlp.gate_proj").t()) * (normed @ get("mlp.up_proj").t())
        return gated @ get("mlp.down_proj").t()

    def _getter(self, i: int) -> Callable[[str], Tensor]:
        return lambda name: self.tensors[f"layers.{i}.{name}.weight"]

    def _heads(self, x: Tensor, rope: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
        """Per-head norm and rotation: [texts, rows, heads, head_dim]."""
        c = self.config.model
        x = x.view(*x.shape[:2], -1, c.head_dim).float()
        heads = torch.rms_norm(x, [c.head_dim], weight, c.norm_eps)
        return heads * rope[0] + torch.roll(heads, c.head_dim // 2, -1) * rope[1]

    def _norm(self, x: Tensor, prefix: str) -> Tensor:
        weight = self.tensors[f"{prefix}norm.weight"]
        return torch.rms_norm(x.float(), [x.shape[-1]], weight, self.config.model.norm_eps)


def block_loss(each: Tensor, there: Tensor, *, d_pace: bool = False) -> Tensor:
    """Mean of cross-entropies [..., draft_len] by `block_weights`; a scalar."""
    weight = block_weights(each, there, d_pace=d_pace)
    return (each * weight).sum() / weight.sum().clamp(min=1e-6)


def block_weights(each: Tensor, there: Tensor, *, d_pace: bool) -> Tensor:
    """How much each draft token of a block counts, shaped as the cross-entropies `each`; nothing
    where it is not `there`.

    Weights fall along a block as exp(-(k - 1) / gamma), or, with `d_pace`, are the chance that the
    draft is still alive there and what follows: sums over j >= k of products up to j of a smoothed
    probability of the right token.
    """
    if d_pace:
        right = (0.5 * torch.exp(-each.detach()) + 0.5) * there
        alive = right.cumprod(-1)
        return alive.flip(-1).cumsum(-1).flip(-1) * there
    block = each.shape[-1] + 1
    gamma = _GAMMA.get(block, block / 2)
    return torch.exp(-torch.arange(each.shape[-1], device=each.device) / gamma) * there
