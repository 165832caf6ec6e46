"""The EAGLE-3 recipe: the layer is unrolled as it will be served, and learns the target's law.

Source: EAGLE-3 (arXiv 2503.01840): soft cross-entropy to the target's distribution, steps weighted
by 0.8 to the s-th.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model
from slipstream.models.eagle3 import Eagle3Config, default_taps, save_eagle3
from slipstream.train.chain import ChainNetwork
from slipstream.train.head import normalized, trained
from slipstream.train.recipe import Batch, labels, soft, target_law, weighted

_DECAY = 0.8


def draft_config(
    target: ModelConfig, *, intermediate_size: int | None = None, draft_vocab: int | None = None
) -> Eagle3Config:
    """One Llama-like layer of the target's width, with the target's head or rows of it."""
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
    taps = default_taps(target.num_layers)
    return Eagle3Config(from_hf(hf, source="the recipe"), taps, draft_vocab)


class Eagle3Network(ChainNetwork):
    """See the module; `needs` ends in the last layer's output, which gives the target's law.

    `vocab`: ids int64 [config.draft_vocab] of the tokens it may draft, ascending, or None for all.
    """

    recipe = "eagle3"

    def __init__(
        self,
        config: Eagle3Config,
        target: Model,
        *,
        steps: int,
        seed: int,
        vocab: Tensor | None = None,
    ) -> None:
        super().__init__(
            config.model,
            trained(config.shapes),
            target,
            prefix="layers.0.",
            draft_len=steps,
            seed=seed,
            vocab=vocab,
        )
        self.config = config
        self.needs = (*config.taps, target.config.num_layers)

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the checkpoint."""
        save_eagle3(folder, self.config, {**tensors, **self.draft_head.stored()})

    def start(self, features: Tensor) -> Tensor:
        """The tapped layers, joined."""
        return features[..., : len(self.config.taps), :].flatten(-2).float() @ self.get("fc").t()

    def enter(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The state is the residual; token and state are read side by side."""
        normed = self.norm(states, "layers.0.hidden_norm")
        read = torch.cat((self.norm(embedded, "layers.0.input_layernorm"), normed), -1)
        return (normed if self.config.norm_before_residual else states), read

    def out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The head reads what is normed; what is fed back is not, unless `norm_output` says so."""
        normed = self.norm(x, "norm")
        return normed, normed if self.config.norm_output else x

    def loss(self, batch: Batch) -> Tensor:
        """Weighted mean over anchors and steps; see the module. With a reduced vocabulary the
        target's law is cut to it, and places where its likeliest token is missing teach nothing.
        """
        _, there = labels(batch, self.draft_len)
        at, each = batch.places(0, self.draft_len), []
        for step, normed in enumerate(self.unrolled(batch)):
            law = target_law(self.target, batch.features_at(at[..., step], -1))
            there[..., step] &= self.draft_head.columns(law.argmax(-1))[1]
            law = normalized(self.draft_head.cut(law))
            each.append(soft(self.draft_head.logits(normed), law))
        return weighted(torch.stack(each, -1), _DECAY, there)
