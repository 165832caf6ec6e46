"""MTP heads of Qwen3.5, 3.6 and 3.8 (dense): tensors `mtp.*`, gated attention.

Source: vLLM's `qwen3_5_mtp.py` and Hugging Face's `qwen3_5`. Differences from the heads of GLM and
DeepSeek: rows of `q_proj` are, head by head, queries and then a gate whose sigmoid multiplies what
attention puts out; norms multiply by 1 + weight; only the first part of each head is rotated. The
head stands in a checkpoint of its own or in its target's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.checkpoint import compare_tensors
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model, build_layer, expected_shapes, group_major
from slipstream.models.layers import Norm
from slipstream.models.linear import pack
from slipstream.models.mtp_head import MtpHead
from slipstream.models.rope import RopeTable, paired

ARCHITECTURE = "Qwen3_5MTP"
PREFIX = "mtp."
QWEN = ("qwen3_5", "qwen3_next")
_EXPERTS = ("mlp.experts.", "mlp.gate.", "mlp.shared_expert")
# Values of keys that the head would need more for than is here.
_ONLY: dict[str, Any] = {
    "mtp_num_hidden_layers": 1,
    "num_nextn_predict_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "attn_output_gate": True,
    "attention_bias": False,
}


@dataclass(frozen=True, slots=True)
class GatedConfig:
    """`model`: sizes of the layer, `partial_rotary_factor` among its rotary parameters. `depth`:
    layers of the target.
    """

    model: ModelConfig
    depth: int

    @property
    def rotated(self) -> int:
        """Dimensions of a head that are rotated."""
        return int(self.model.head_dim * self.model.rope_parameters["partial_rotary_factor"])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor; embedding and head are the target's."""
        hidden = self.model.hidden_size
        shapes: dict[str, tuple[int, ...]] = {
            f"{PREFIX}fc.weight": (hidden, 2 * hidden),
            f"{PREFIX}pre_fc_norm_embedding.weight": (hidden,),
            f"{PREFIX}pre_fc_norm_hidden.weight": (hidden,),
            f"{PREFIX}norm.weight": (hidden,),
        }
        for name, shape in expected_shapes(self.model).items():
            if name.startswith("model.layers.0."):
                shapes[PREFIX + name.removeprefix("model.")] = shape
        query = f"{PREFIX}layers.0.self_attn.q_proj.weight"
        shapes[query] = (2 * shapes[query][0], hidden)
        return shapes


def is_gated(hf: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of this family: a head's own, or a target's that holds one."""
    kinds = [hf.get("model_type"), (hf.get("text_config") or {}).get("model_type")]
    named = ARCHITECTURE in (hf.get("architectures") or ())
    return named or any(str(kind).startswith(QWEN) for kind in kinds)


def gated_config(
    hf: Mapping[str, Any], target: ModelConfig, *, source: str, names: Collection[str] = ()
) -> GatedConfig:
    """Sizes from a `config.json`, nested in `text_config` or not. `names`: the head's tensors.

    Raises `ModelError` for what is not read and for a head of another target.
    """
    expert = next((n for n in names if any(e in n for e in _EXPERTS)), None)
    if expert is not None:
        raise ModelError(
            f"{source} has an MTP head that is a mixture of experts ({expert}); only dense ones "
            "are read."
        )
    own = {**hf, **(hf.get("text_config") or {}), "text_config": None}
    for key, only in _ONLY.items():
        if own.get(key) not in (None, only):
            raise ModelError(f"{source} sets {key} = {own[key]!r}; only {only!r} is supported.")
    rope = dict(own.get("rope_parameters") or own.get("rope_scaling") or {})
    qwen = str(own.get("model_type")).startswith(QWEN)
    top = own.pop("partial_rotary_factor", None)
    partial = rope.pop("partial_rotary_factor", None) or top or (0.25 if qwen else 1.0)
    own["rope_parameters"] = rope or None
    own |= {"num_hidden_layers": 1, "layer_types": ["full_attention"], "use_sliding_window": False}
    if qwen:
        own["head_dim"] = own.get("head_dim") or 256
    model = from_hf({**own, "model_type": "qwen3", "tie_word_embeddings": False}, source=source)
    kind = model.rope_parameters["rope_type"]
    if kind != "default" or not 0 < partial <= 1 or int(model.head_dim * partial) % 2:
        raise ModelError(
            f"{source} has an MTP head with rotary type {kind!r} on {partial} of each head of "
            f"{model.head_dim}; the type 'default' on an even part is needed."
        )
    rope = {**model.rope_parameters, "partial_rotary_factor": float(partial)}
    for what, mine, theirs in (
        ("hidden_size", model.hidden_size, target.hidden_size),
        ("vocab_size", model.vocab_size, target.vocab_size),
    ):
        if mine != theirs:
            raise ModelError(
                f"{source} was made for another target: its {what} is {mine}, not {theirs}."
            )
    return GatedConfig(replace(model, rope_parameters=rope), target.num_layers)


def load_gated(
    hf: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    get: Callable[[str], Tensor],
    target: Model,
    *,
    source: str,
) -> MtpHead:
    """Read a head: `shapes` of the tensors `mtp.*` there are, `get` reads one."""
    config = gated_config(hf, target.config, source=source, names=shapes)
    compare_tensors(shapes, config.shapes, source=source, what="a dense gated MTP head")
    return from_tensors(config, {name: get(name) for name in config.shapes}, target)


def from_tensors(config: GatedConfig, tensors: Mapping[str, Tensor], target: Model) -> MtpHead:
    """Assemble a head from tensors by checkpoint name; they may be of any dtype and device."""
    c, order = config.model, paired(config.model.head_dim, config.rotated)

    def get(name: str) -> Tensor:
        tensor = tensors[name.replace("model.", PREFIX, 1)]
        if name.endswith("norm.weight") or "pre_fc_norm" in name:
            tensor = 1 + tensor.float()
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                tensor = tensor[order]
        elif "q_proj" in name:
            tensor = _halves(tensor)[0][:, order].flatten(0, 1)
        elif "k_proj" in name:
            tensor = tensor.unflatten(0, (-1, c.head_dim))[:, order].flatten(0, 1)
        return tensor.to(device=target.device, dtype=target.dtype)

    def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of queries and of gates, [heads, head_dim, hidden] each."""
        both = rows.unflatten(0, (c.num_heads, 2, c.head_dim))
        return both[:, 0], both[:, 1]

    def norm(name: str) -> Norm:
        weight = get(f"model.{name}.weight")
        return Norm(weight, torch.cat((weight, weight)), c.norm_eps)

    gate = _halves(tensors[f"{PREFIX}layers.0.self_attn.q_proj.weight"])[1].flatten(0, 1)
    return MtpHead(
        sizes=c,
        depth=config.depth,
        embedding=target.embedding,
        final=target.norm,
        token_norm=norm("pre_fc_norm_embedding"),
        state_norm=norm("pre_fc_norm_hidden"),
        join=pack(get("model.fc.weight")),
        block=build_layer(c, 0, get),
        norm=norm("norm"),
        head=target.head,
        rope=RopeTable(c, dtype=target.dtype, device=target.device),
        gate=pack(group_major(gate.to(device=target.device, dtype=target.dtype), c)),
    )


def save_gated(folder: Path, config: GatedConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a head as a folder of its own, under the names it has in a target's."""
    folder.mkdir(parents=True, exist_ok=True)
    hf: dict[str, Any] = dict(config.model.hf) | {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3_5_text",
        "head_dim": config.model.head_dim,
        "rope_parameters": dict(config.model.rope_parameters),
        "mtp_num_hidden_layers": 1,
        "num_target_layers": config.depth,
    }
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
