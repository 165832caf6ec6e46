"""EAGLE-3: one layer that predicts the token after next from target features and the next token.

Source: EAGLE-3 (arXiv 2503.01840); names and config keys of the published checkpoints (SpecForge,
NVIDIA). At position P the layer reads the features of P and the embedding of token P + 1; further
tokens are drafted by feeding its own output back in place of the features.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.models.attention import Segment, attend_all
from slipstream.models.checkpoint import compare_tensors, opened, read_json
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model, group_major
from slipstream.models.layers import Norm, rms_norm, rotate_
from slipstream.models.linear import Linear, linear, linear_add, pack
from slipstream.models.rope import RopeTable

ARCHITECTURE = "LlamaForCausalLMEagle3"
_OPTIONAL = ("embed_tokens.weight", "t2d")


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """`model`: the draft layer. `taps`: `hs[i]` indices of the features. `draft_vocab`: rows
    of a head of its own, None to use the target's. `norm_before_fc`, `fc_norm`: one norm over all
    features, or one each; `norm_output`: what is fed back has gone through the final norm;
    `norm_before_residual`: the residual is the normed feature.
    """

    model: ModelConfig
    taps: tuple[int, ...]
    draft_vocab: int | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint."""
        c = self.model
        hidden, inner = c.hidden_size, c.intermediate_size
        q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (hidden, len(self.taps) * hidden),
            "layers.0.input_layernorm.weight": (hidden,),
            "layers.0.hidden_norm.weight": (hidden,),
            "layers.0.post_attention_layernorm.weight": (hidden,),
            "layers.0.self_attn.q_proj.weight": (q, 2 * hidden),
            "layers.0.self_attn.k_proj.weight": (kv, 2 * hidden),
            "layers.0.self_attn.v_proj.weight": (kv, 2 * hidden),
            "layers.0.self_attn.o_proj.weight": (hidden, q),
            "layers.0.mlp.gate_proj.weight": (inner, hidden),
            "layers.0.mlp.up_proj.weight": (inner, hidden),
            "layers.0.mlp.down_proj.weight": (hidden, inner),
            "norm.weight": (hidden,),
        }
        if self.norm_before_fc:
            shapes["input_norm.weight"] = (len(self.taps) * hidden,)
        if self.fc_norm:
            shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(self.taps))}
        if self.draft_vocab is not None:
            shapes |= {"lm_head.weight": (self.draft_vocab, hidden), "d2t": (self.draft_vocab,)}
        return shapes


@dataclass(frozen=True, slots=True)
class Eagle3:
    """Weights on one device, the target's embedding and (without a reduced vocabulary) its head.

    `ids` int64 [draft_vocab]: the target's token of each row of `head`, None where it is the
    target's own head. `before_fc`: norms of the features, none, one over all or one each.
    """

    config: Eagle3Config
    embedding: Tensor
    before_fc: tuple[Norm, ...]
    fc: Linear
    token_norm: Norm
    feature_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear
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
        """Heads, widths and context of the layer."""
        return self.config.model

    def fused(self, features: Tensor) -> Tensor:
        """[tokens, taps, hidden] -> [tokens, hidden]."""
        flat = features.flatten(1)
        if self.config.norm_before_fc:
            flat = rms_norm(flat, self.before_fc[0])
        elif self.config.fc_norm:
            parts = [
                rms_norm(f, n) for f, n in zip(features.unbind(1), self.before_fc, strict=True)
            ]
            flat = torch.cat(parts, 1)
        return linear(flat, self.fc)

    def layer(
        self,
        tokens: Tensor,
        states: Tensor,
        rope: tuple[Tensor, Tensor],
        *,
        storage: Tensor,
        slots: Tensor,
        segments: Sequence[Segment],
    ) -> Tensor:
        """The layer's output [N, hidden] before the final norm; its keys and values are stored.

        `tokens` int64 [N]: the next token of each position; `states` [N, hidden]: fused features or
        what is fed back.
        """
        c = self.config.model
        normed = rms_norm(states, self.feature_norm)
        embedded = rms_norm(F.embedding(tokens, self.embedding), self.token_norm)
        qkv = linear(torch.cat((embedded, normed), 1), self.qkv)
        heads = qkv.view(len(qkv), -1, c.head_dim)
        rotate_(heads[:, : c.num_heads + c.num_kv_heads], *rope)
        storage.index_copy_(0, slots, heads[:, c.num_heads :])
        attended = attend_all(heads, storage, list(segments), c.num_kv_heads)
        x = linear_add(attended, self.out, normed if self.config.norm_before_residual else states)
        gate_up = linear(rms_norm(x, self.mlp_norm), self.gate_up)
        gate, up = gate_up.chunk(2, -1)
        return linear_add(F.silu(gate) * up, self.down, x)

    def logits(self, states: Tensor, vocab: int) -> Tensor:
        """Over the target's vocabulary [N, vocab]; tokens the drafter has no row for are -inf."""
        found = linear(rms_norm(states, self.norm), self.head)
        if self.ids is None:
            return found
        whole = found.new_full((len(found), vocab), float("-inf"))
        return whole.index_copy_(1, self.ids, found)

    def recycled(self, states: Tensor) -> Tensor:
        """What is fed back after a step."""
        return rms_norm(states, self.norm) if self.config.norm_output else states


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """The config of a checkpoint folder. Raises `ModelError` where it is not one of EAGLE-3.

    Layer ids are boundaries, `hs[id]`, as vLLM and the speculators format read them; without any,
    the default boundaries (2, n // 2, n - 3) of the target's `num_target_layers`.
    """
    hf = read_json(folder / "config.json")
    names = hf.get("architectures") or ()
    if not any("Eagle3" in str(name) for name in names):
        raise ModelError(
            f"{folder} is no EAGLE-3 drafter: its config's architectures are {names!r}, "
            f"{ARCHITECTURE!r} is needed."
        )
    own = hf.get("eagle_config") or {}
    taps = own.get("eagle_aux_hidden_state_layer_ids") or hf.get("aux_hidden_state_layer_ids")
    if taps is None:
        layers = hf.get("num_target_layers")
        if not isinstance(layers, int):
            raise ModelError(
                f"{folder} names no eagle_aux_hidden_state_layer_ids in its eagle_config, and no "
                "num_target_layers to take the default ones from; add one of them."
            )
        taps = default_taps(layers)
    if hf.get("num_hidden_layers", 1) != 1:
        raise ModelError(f"{folder} has {hf['num_hidden_layers']} draft layers; 1 is supported.")

    def flag(name: str) -> bool:
        return bool(own.get(name, hf.get(name, False)))

    model = from_hf({**hf, "model_type": "llama", "tie_word_embeddings": False}, source=str(folder))
    return Eagle3Config(
        model,
        tuple(int(t) for t in taps),
        hf.get("draft_vocab_size"),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm"),
        norm_output=flag("norm_output"),
        norm_before_residual=flag("norm_before_residual"),
    )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """The boundaries most checkpoints read: (2, n // 2, n - 3), as far as there are layers."""
    return tuple(sorted({min(2, num_layers), num_layers // 2, max(num_layers - 3, 0)}))


def load_eagle3(folder: Path, target: Model) -> Eagle3:
    """Read a checkpoint for a target. Raises `ModelError` naming what does not fit."""
    config = read_eagle3_config(folder)
    _check_target(config, target.config, folder)
    with opened(folder, target=target) as handles:
        names = {_plain(name): name for name in handles}
        shapes = {n: tuple(handles[o].get_slice(o).get_shape()) for n, o in names.items()}
        compare_tensors(
            shapes, config.shapes, source=str(folder), what="an EAGLE-3 drafter", spare=_OPTIONAL
        )

        def get(name: str) -> Tensor:
            tensor: Tensor = handles[names[name]].get_tensor(names[name])
            dtype = torch.int64 if name == "d2t" else target.dtype
            return tensor.to(device=target.device, dtype=dtype)

        return from_tensors(config, {name: get(name) for name in config.shapes}, target)


def from_tensors(config: Eagle3Config, tensors: Mapping[str, Tensor], target: Model) -> Eagle3:
    """Assemble a drafter from tensors by checkpoint name, in the target's dtype and device."""
    c = config.model

    def norm(name: str) -> Norm:
        weight = tensors[f"{name}.weight"]
        return Norm(weight, torch.cat((weight, weight)), c.norm_eps)

    def own(name: str) -> Tensor:
        return tensors[f"layers.0.{name}.weight"]

    before = ["input_norm"] if config.norm_before_fc else []
    if config.fc_norm and not before:
        before = [f"fc_norm.{i}" for i in range(len(config.taps))]
    reduced = config.draft_vocab is not None
    attention = [own(f"self_attn.{p}_proj") for p in "qkv"]
    return Eagle3(
        config=config,
        embedding=target.embedding,
        before_fc=tuple(norm(name) for name in before),
        fc=pack(tensors["fc.weight"]),
        token_norm=norm("layers.0.input_layernorm"),
        feature_norm=norm("layers.0.hidden_norm"),
        qkv=pack(torch.cat((group_major(attention[0], c), *attention[1:]))),
        out=pack(group_major(own("self_attn.o_proj").t(), c).t().contiguous()),
        mlp_norm=norm("layers.0.post_attention_layernorm"),
        gate_up=pack(torch.cat((own("mlp.gate_proj"), own("mlp.up_proj")))),
        down=pack(own("mlp.down_proj")),
        norm=norm("norm"),
        head=pack(tensors["lm_head.weight"]) if reduced else target.head,
        # A checkpoint stores offsets: the target's id of draft token i is i + d2t[i].
        ids=tensors["d2t"] + torch.arange(len(tensors["d2t"]), device=target.device)
        if reduced
        else None,
        rope=RopeTable(c, dtype=target.dtype, device=target.device),
    )


def save_eagle3(folder: Path, config: Eagle3Config, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that `load_eagle3`, vLLM and SGLang read."""
    folder.mkdir(parents=True, exist_ok=True)
    hf: dict[str, Any] = dict(config.model.hf)
    hf |= {
        "architectures": [ARCHITECTURE],
        "draft_vocab_size": config.draft_vocab,
        "norm_output": config.norm_output,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "norm_before_fc": config.norm_before_fc,
        },
    }
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    if config.draft_vocab is not None:
        kept["t2d"] = torch.zeros(config.model.vocab_size, dtype=torch.bool)
        kept["t2d"][kept["d2t"] + torch.arange(config.draft_vocab)] = True
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _plain(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _check_target(config: Eagle3Config, target: ModelConfig, folder: Path) -> None:
    if config.model.hidden_size != target.hidden_size:
        raise ModelError(
            f"{folder} was made for another target: its hidden_size is "
            f"{config.model.hidden_size}, not {target.hidden_size}."
        )
    if config.draft_vocab is None and config.model.vocab_size != target.vocab_size:
        raise ModelError(
            f"{folder} was made for another target: its vocab_size is {config.model.vocab_size}, "
            f"not {target.vocab_size}."
        )
    if not config.taps or not all(0 <= tap <= target.num_layers for tap in config.taps):
        raise ModelError(
            f"{folder} reads hidden states {list(config.taps)}; this target has 0 to "
            f"{target.num_layers}."
        )
