"""The EAGLE-3 recipe: the layer is unrolled as it will be served, and learns the target's law.

Source: EAGLE-3 (arXiv 2503.01840): training-time test, its own output fed back for as many steps as
will be drafted, soft cross-entropy to the target's distribution, steps weighted by 0.8 to the s-th.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import InvalidConfig
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model
from slipstream.models.eagle3 import Eagle3Config, default_taps, save_eagle3
from slipstream.models.rope import RopeTable
from slipstream.train.recipe import initial, labels

_DECAY = 0.8


def draft_config(target: ModelConfig, *, intermediate_size: int | None = None) -> Eagle3Config:
    """One Llama-like layer of the target's width, with the target's head."""
    theta = target.rope_parameters["rope_theta"]
    hf = {
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size or target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": target.max_context,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_target_layers": target.num_layers,
    }
    return Eagle3Config(from_hf(hf, source="the recipe"), default_taps(target.num_layers))


class Eagle3Network:
    """Trainable float32 tensors by checkpoint name, unrolled over `steps` draft tokens."""

    recipe = "eagle3"

    def __init__(self, config: Eagle3Config, target: Model, *, steps: int, seed: int) -> None:
        if target.head.packed:
            raise InvalidConfig("Training needs the target in float32 on a CPU, or on a GPU.")
        self.config, self._target, self.draft_len = config, target, steps
        # Behind the drafter's features: the last layer's output, which gives the target's law.
        self.needs = (*config.taps, target.config.num_layers)
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: initial(name, shape, generator).to(target.device).requires_grad_()
            for name, shape in config.shapes.items()
        }
        self._rope = RopeTable(config.model, dtype=torch.float32, device=target.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return self.config.shapes

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_eagle3(folder, self.config, tensors)

    def loss(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Weighted mean over anchors and steps; see the module."""
        said = self.logits(features, tokens, anchors).log_softmax(-1)
        _, there = labels(tokens, anchors, self.draft_len + 1)
        at = anchors[:, None] + torch.arange(self.draft_len, device=anchors.device)
        last = features[at.clamp(max=len(tokens) - 1), -1].float()
        with torch.no_grad():
            norm = self._target.norm
            normed = torch.rms_norm(last, [last.shape[-1]], norm.weight.float(), norm.eps)
            law = (normed @ self._target.head.weight.float().t()).softmax(-1)
        each = -(law * said).sum(-1)
        weight = _DECAY ** torch.arange(self.draft_len, device=anchors.device) * there
        return (each * weight).sum() / weight.sum().clamp(min=1e-6)

    def agreement(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each draft token would be the text's own, [anchors, draft_len], and which exist;
        the text's own tokens are fed back.
        """
        wanted, there = labels(tokens, anchors, self.draft_len + 1)
        with torch.no_grad():
            said = self.logits(features, tokens, anchors).argmax(-1)
        return (said == wanted) & there, there

    def logits(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """[anchors, draft_len, vocab]: what is drafted after the token at each anchor.

        `features` [tokens, taps, hidden] and `tokens` int64 of one text; `anchors` int64 positions
        from 1 on. Later steps are fed the text's own tokens.
        """
        c = self.config.model
        fused = features[:, : len(self.config.taps)].flatten(1).float() @ self._get("fc").t()
        places = torch.arange(len(tokens) - 1, device=tokens.device)
        _, keys, values = self._projected(tokens[1:], fused[:-1], places)
        states, said = fused[anchors - 1], []
        chain: list[tuple[Tensor, Tensor]] = []
        seen = places[None, :] < anchors[:, None]
        for step in range(self.draft_len):
            own = tokens[(anchors + step).clamp(max=len(tokens) - 1)]
            queries, k, v = self._projected(own, states, anchors - 1 + step)
            if step:
                chain.append((k, v))
            attended = _attend(queries, keys, values, seen, chain, c.group)
            states = self._finish(states, attended)
            normed = self._norm(states, "norm")
            said.append(normed @ self._target.head.weight.float().t())
            if self.config.norm_output:
                states = normed
        return torch.stack(said, 1)

    def _projected(
        self, tokens: Tensor, states: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: [tokens, heads, head_dim] each."""
        c = self.config.model
        embedded = F.embedding(tokens, self._target.embedding).float()
        both = torch.cat(
            (
                self._norm(embedded, "layers.0.input_layernorm"),
                self._norm(states, "layers.0.hidden_norm"),
            ),
            1,
        )
        cos, sin = self._rope.rows(positions, int(positions.max()))

        def heads(name: str) -> Tensor:
            x = both @ self._get(f"layers.0.self_attn.{name}_proj").t()
            return x.view(len(x), -1, c.head_dim)

        def turned(x: Tensor) -> Tensor:
            return x * cos + torch.roll(x, c.head_dim // 2, -1) * sin

        return turned(heads("q")), turned(heads("k")), heads("v")

    def _finish(self, states: Tensor, attended: Tensor) -> Tensor:
        residual = states
        if self.config.norm_before_residual:
            residual = self._norm(states, "layers.0.hidden_norm")
        x = residual + attended @ self._get("layers.0.self_attn.o_proj").t()
        normed = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = (normed @ self._get(f"layers.0.mlp.{n}_proj").t() for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self._get("layers.0.mlp.down_proj").t()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return torch.rms_norm(x, [x.shape[-1]], self._get(name), self.config.model.norm_eps)

    def _get(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    group: int,
) -> Tensor:
    """Each query sees the text where `seen` [queries, text] says so, and its own chain.

    `queries` [n, heads, dim]; `keys`, `values` [text, kv, dim]; the chain's [n, kv, dim] each.
    """
    scale = queries.shape[-1] ** -0.5
    wide = [x.repeat_interleave(group, 1) for x in (keys, values)]
    scores = torch.einsum("nhd,thd->nht", queries, wide[0]) * scale
    scores = scores.masked_fill(~seen[:, None, :], float("-inf"))
    own = [
        (queries * k.repeat_interleave(group, 1)).sum(-1, keepdim=True) * scale for k, _ in chain
    ]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    out = torch.einsum("nht,thd->nhd", weights[..., : len(keys)], wide[1])
    for i, (_, v) in enumerate(chain):
        out = out + weights[..., len(keys) + i, None] * v.repeat_interleave(group, 1)
    return out.flatten(1)
