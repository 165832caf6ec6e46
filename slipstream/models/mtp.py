"""MTP heads in checkpoints: their own folder, or the target's.

Tensor names here are those of GLM-4.5 and DeepSeek-V3 (arXiv 2412.19437), where the head is layer N
behind a target of N layers; heads named `mtp.*` are `models.mtp_gated`'s. See `models.mtp_head` for
what a head computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.checkpoint import compare_tensors, config_file, opened, read_json
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model, build_layer, expected_shapes
from slipstream.models.layers import Norm
from slipstream.models.linear import pack
from slipstream.models.mtp_gated import (
    PREFIX,
    GatedConfig,
    gated_config,
    is_gated,
    load_gated,
)
from slipstream.models.mtp_head import MtpHead
from slipstream.models.reduced import check_mapping, target_ids
from slipstream.models.rope import RopeTable

ARCHITECTURE = "MtpHead"
_SHARED = ("embed_tokens.weight", "shared_head.head.weight")
_OWN = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """`model`: sizes of the layer. `depth`: layers of the target, the head's own index.
    `draft_vocab`: rows of a reduced head, which `d2t` maps to the target's tokens; ours alone.
    """

    model: ModelConfig
    depth: int
    draft_vocab: int | None = None

    @property
    def prefix(self) -> str:
        """What every tensor's name begins with."""
        return f"model.layers.{self.depth}."

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor; the embedding is the target's."""
        hidden = self.model.hidden_size
        layer = {
            name.removeprefix("model.layers.0."): shape
            for name, shape in expected_shapes(self.model).items()
            if name.startswith("model.layers.0.")
        }
        own: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in _OWN}
        own["eh_proj.weight"] = (hidden, 2 * hidden)
        found = {self.prefix + name: shape for name, shape in (own | layer).items()}
        if self.draft_vocab is not None:
            found |= {"lm_head.weight": (self.draft_vocab, hidden), "d2t": (self.draft_vocab,)}
        return found


def head_config(
    target: ModelConfig, *, intermediate_size: int | None = None, draft_vocab: int | None = None
) -> MtpConfig:
    """A head whose layer is like one of the target's, rotated and without a window."""
    hf = {**target.hf, "num_hidden_layers": 1, "sliding_window": None}
    hf |= {"layer_types": ["full_attention"], "no_rope_layers": [1], "use_sliding_window": False}
    if intermediate_size is not None:
        hf["intermediate_size"] = intermediate_size
    model = from_hf(hf, source="the recipe")
    layer = replace(model, windows=(None,), rope=(True,))
    return MtpConfig(layer, target.num_layers, draft_vocab)


def read_mtp_config(path: Path, target: ModelConfig) -> MtpConfig | GatedConfig:
    """The shape that a folder or `config.json` alone says: of a head, or of a target that holds
    one. Raises `ModelError` for what is not read and for a head of another target.
    """
    hf = read_json(config_file(path))
    if is_gated(hf):
        return gated_config(hf, target, source=str(path))
    _same_target(hf, target, path)
    return _own_config(hf, target)


def _own_config(hf: Mapping[str, Any], target: ModelConfig) -> MtpConfig:
    return head_config(
        target,
        intermediate_size=hf.get("intermediate_size"),
        draft_vocab=hf.get("draft_vocab_size"),
    )


def load_mtp(folder: Path, target: Model) -> MtpHead:
    """Read a head for a target: a folder of its own, or the target's checkpoint that holds one.

    Raises `ModelError` naming what does not fit.
    """
    hf = read_json(folder / "config.json")
    with opened(folder, target=target) as handles:
        if any(name.startswith(PREFIX) for name in handles):
            return load_gated(
                hf,
                {n: _shape(h, n) for n, h in handles.items() if n.startswith(PREFIX)},
                lambda n: handles[n].get_tensor(n),
                target,
                source=str(folder),
            )
        _same_target(hf, target.config, folder)
        config = _own_config(hf, target.config)
        names = {
            n: h
            for n, h in handles.items()
            if n in config.shapes or (n.startswith(config.prefix) and not n.endswith(_SHARED))
        }
        shapes = {n: _shape(h, n) for n, h in names.items()}
        compare_tensors(shapes, config.shapes, source=str(folder), what="an MTP head")
        tensors = {
            n: h.get_tensor(n).to(
                device=target.device, dtype=torch.int64 if n == "d2t" else target.dtype
            )
            for n, h in names.items()
        }
    if config.draft_vocab is not None:
        check_mapping(tensors["d2t"], None, target.config.vocab_size, str(folder))
    return from_tensors(config, tensors, target)


def _shape(handle: Any, name: str) -> tuple[int, ...]:
    return tuple(handle.get_slice(name).get_shape())


def _same_target(hf: Mapping[str, Any], target: ModelConfig, folder: Path) -> None:
    for name in ("hidden_size", "vocab_size"):
        if hf.get(name) != target.hf.get(name):
            raise ModelError(
                f"{folder} was made for another target: its {name} is {hf.get(name)}, not "
                f"{target.hf.get(name)}."
            )


def from_tensors(config: MtpConfig, tensors: Mapping[str, Tensor], target: Model) -> MtpHead:
    """Assemble a head from tensors by checkpoint name, in the target's dtype and device."""
    c = config.model

    def norm(name: str) -> Norm:
        weight = tensors[f"{config.prefix}{name}.weight"]
        return Norm(weight, torch.cat((weight, weight)), c.norm_eps)

    def get(name: str) -> Tensor:
        return tensors[name.replace("model.layers.0.", config.prefix)]

    return MtpHead(
        sizes=c,
        depth=config.depth,
        embedding=target.embedding,
        final=target.norm,
        token_norm=norm("enorm"),
        state_norm=norm("hnorm"),
        join=pack(tensors[f"{config.prefix}eh_proj.weight"]),
        block=build_layer(c, 0, get),
        norm=norm("shared_head.norm"),
        head=target.head if config.draft_vocab is None else pack(tensors["lm_head.weight"]),
        ids=None if config.draft_vocab is None else target_ids(tensors["d2t"]),
        rope=RopeTable(c, dtype=target.dtype, device=target.device),
    )


def save_mtp(folder: Path, config: MtpConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a head as a folder of its own, under the names it would have in a target's."""
    folder.mkdir(parents=True, exist_ok=True)
    hf: dict[str, Any] = dict(config.model.hf) | {
        "architectures": [ARCHITECTURE],
        "num_nextn_predict_layers": 1,
        "num_target_layers": config.depth,
        "draft_vocab_size": config.draft_vocab,
    }
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
