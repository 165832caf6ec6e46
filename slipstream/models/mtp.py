"""MTP heads: one more decoder layer that predicts the token after next.

Source: DeepSeek-V3 (arXiv 2412.19437, section 2.2); tensor names of the GLM-4.5 and DeepSeek-V3
checkpoints, where the head is layer N behind a target of N layers. At position P it reads the
target's final hidden state of P and the embedding of token P + 1; more tokens are drafted by
feeding its normed output back. The layer is a dense one here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.models.attention import Segment
from slipstream.models.checkpoint import compare_tensors, opened, read_json
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model, build_layer, expected_shapes
from slipstream.models.draft_layer import finish_layer
from slipstream.models.layers import Layer, Norm, rms_norm
from slipstream.models.linear import Linear, linear, pack
from slipstream.models.rope import RopeTable

ARCHITECTURE = "MtpHead"
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
_OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """`model`: sizes of the layer. `depth`: layers of the target, the head's own index."""

    model: ModelConfig
    depth: int

    @property
    def prefix(self) -> str:
        """What every tensor's name begins with."""
        return f"model.layers.{self.depth}."

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor; embedding and head are the target's."""
        hidden = self.model.hidden_size
        layer = {
            name.removeprefix("model.layers.0."): shape
            for name, shape in expected_shapes(self.model).items()
            if name.startswith("model.layers.0.")
        }
        own: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in _OWN}
        own["eh_proj.weight"] = (hidden, 2 * hidden)
        return {self.prefix + name: shape for name, shape in (own | layer).items()}


@dataclass(frozen=True, slots=True)
class MtpHead:
    """Weights on one device. `final`: the target's last norm, `head` its head."""

    config: MtpConfig
    embedding: Tensor
    final: Norm
    token_norm: Norm
    state_norm: Norm
    join: Linear
    block: Layer
    norm: Norm
    head: Linear
    rope: RopeTable

    @property
    def taps(self) -> tuple[int, ...]:
        """The output of the target's last layer."""
        return (self.config.depth,)

    @property
    def sizes(self) -> ModelConfig:
        """Heads, widths and context of the layer."""
        return self.config.model

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
        x = finish_layer(
            linear(rms_norm(x, self.block.attention_norm), self.block.qkv),
            x,
            self.block,
            self.config.model,
            rope=rope,
            storage=storage[0],
            slots=slots,
            segments=segments[0],
        )
        return rms_norm(x, self.norm)

    def logits(self, states: Tensor, vocab: int) -> Tensor:
        """[N, vocab]."""
        return linear(states, self.head)

    def recycled(self, states: Tensor) -> Tensor:
        """The normed output, as vLLM and SGLang feed it back for DeepSeek's heads."""
        return states


def head_config(target: ModelConfig, *, intermediate_size: int | None = None) -> MtpConfig:
    """A head whose layer is like one of the target's, rotated and without a window."""
    hf = {**target.hf, "num_hidden_layers": 1, "sliding_window": None}
    hf |= {"layer_types": ["full_attention"], "no_rope_layers": [1], "use_sliding_window": False}
    if intermediate_size is not None:
        hf["intermediate_size"] = intermediate_size
    model = from_hf(hf, source="the recipe")
    return MtpConfig(replace(model, windows=(None,), rope=(True,)), target.num_layers)


def load_mtp(folder: Path, target: Model) -> MtpHead:
    """Read a head for a target: a folder of its own, or the target's checkpoint that holds one.

    Raises `ModelError` naming what does not fit.
    """
    hf = read_json(folder / "config.json")
    for name in ("hidden_size", "vocab_size"):
        if hf.get(name) != target.config.hf.get(name):
            raise ModelError(
                f"{folder} was made for another target: its {name} is {hf.get(name)}, not "
                f"{target.config.hf.get(name)}."
            )
    config = head_config(target.config, intermediate_size=hf.get("intermediate_size"))
    with opened(folder) as handles:
        names = {
            n: h
            for n, h in handles.items()
            if n.startswith(config.prefix) and not n.endswith(_SHARED)
        }
        shapes = {n: tuple(h.get_slice(n).get_shape()) for n, h in names.items()}
        compare_tensors(shapes, config.shapes, source=str(folder), what="an MTP head")
        tensors = {
            n: h.get_tensor(n).to(device=target.device, dtype=target.dtype)
            for n, h in names.items()
        }
    return from_tensors(config, tensors, target)


def from_tensors(config: MtpConfig, tensors: Mapping[str, Tensor], target: Model) -> MtpHead:
    """Assemble a head from tensors by checkpoint name, in the target's dtype and device."""
    c = config.model

    def norm(name: str) -> Norm:
        weight = tensors[f"{config.prefix}{name}.weight"]
        return Norm(weight, torch.cat((weight, weight)), c.norm_eps)

    def get(name: str) -> Tensor:
        return tensors[name.replace("model.layers.0.", config.prefix)]

    return MtpHead(
        config=config,
        embedding=target.embedding,
        final=target.norm,
        token_norm=norm("enorm"),
        state_norm=norm("hnorm"),
        join=pack(tensors[f"{config.prefix}eh_proj.weight"]),
        block=build_layer(c, 0, get),
        norm=norm("shared_head.norm"),
        head=target.head,
        rope=RopeTable(c, dtype=target.dtype, device=target.device),
    )


def save_mtp(folder: Path, config: MtpConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a head as a folder of its own, under the names it would have in a target's."""
    folder.mkdir(parents=True, exist_ok=True)
    hf: dict[str, Any] = dict(config.model.hf) | {
        "architectures": [ARCHITECTURE],
        "num_nextn_predict_layers": 1,
        "num_target_layers": config.depth,
    }
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
