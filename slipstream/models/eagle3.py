"""EAGLE-3 checkpoints: the published layouts are read, checked and written.

Names and config keys as SpecForge, NVIDIA's ModelOpt, vLLM, SGLang and speculators have them; see
`models.eagle3_network` for what they mean and `models.layer_ids` for which layers are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.checkpoint import compare_tensors, opened, read_json
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model
from slipstream.models.eagle3_network import Eagle3, from_tensors
from slipstream.models.eagle3_network import Eagle3Config as Eagle3Config
from slipstream.models.layer_ids import MARK, layers_read
from slipstream.models.layer_ids import default_taps as default_taps
from slipstream.models.reduced import SPARE, check_mapping, named
from slipstream.models.speculators import flattened

ARCHITECTURE = "LlamaForCausalLMEagle3"
# What some publishers say for what others do.
_ALIASES = {
    "model.": "",
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
# Switches of ModelOpt and vLLM that this network does not have, and the value that means "off".
_OFF: dict[str, Any] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "logit_scale": 1.0,
}


def read_eagle3_config(
    hf: Mapping[str, Any],
    target: ModelConfig,
    names: Collection[str],
    *,
    source: str,
    layer_ids: str = "auto",
) -> Eagle3Config:
    """What a `config.json` and the `names` of its tensors say, for this target.

    Where the config is silent about a norm, its tensor decides. `layer_ids`: how ids are read
    (`models.layer_ids`). Raises `ModelError` where it is not one of EAGLE-3 or does not fit.
    """
    architectures = hf.get("architectures") or ()
    if not any("Eagle3" in str(name) for name in architectures):
        raise ModelError(
            f"{source} is no EAGLE-3 drafter: its config's architectures are {architectures!r}, "
            f"{ARCHITECTURE!r} is needed."
        )
    own = {**hf, **(hf.get("eagle_config") or {})}
    for key, off in _OFF.items():
        if own.get(key) not in (None, off):
            raise ModelError(f"{source} sets {key} = {own[key]!r}; only {off!r} is supported.")
    read = layers_read(hf, target.num_layers, reading=layer_ids, source=source)
    if own.get("num_aux_hidden_states") not in (None, len(read.taps)):
        raise ModelError(
            f"{source} has num_aux_hidden_states = {own['num_aux_hidden_states']}, but "
            f"{len(read.taps)} layers are read ({read.why})."
        )

    def flag(key: str, tensor: str = "") -> bool:
        return tensor in names if own.get(key) is None else bool(own[key])

    model = _draft_layers(hf, source)
    vocab, wide = own.get("draft_vocab_size"), own.get("target_hidden_size")
    other_width = wide not in (None, model.hidden_size)
    own_head = vocab not in (None, model.vocab_size) or "lm_head.weight" in names or other_width
    config = Eagle3Config(
        model,
        read.taps,
        (vocab or model.vocab_size) if own_head else None,
        mapped=not own_head or "d2t" in names or vocab not in (None, model.vocab_size),
        norm_before_fc=flag("norm_before_fc", "input_norm.weight"),
        fc_norm=flag("fc_norm", "fc_norm.0.weight"),
        norm_output=flag("norm_output"),
        norm_before_residual=flag("norm_before_residual"),
        target_hidden=wide if other_width else None,
        own_embedding=other_width or "embed_tokens.weight" in names,
        layers=read.sentence(source),
    )
    _check_target(config, target, source)
    return config


def _draft_layers(hf: Mapping[str, Any], source: str) -> ModelConfig:
    """Sizes of the draft layers: Llama's, or Qwen3's with norms on queries and keys."""
    family = "qwen3" if hf.get("model_type") == "qwen3" else "llama"
    model = from_hf({**hf, "model_type": family, "tie_word_embeddings": False}, source=source)
    types = list(hf.get("layer_types") or ["full_attention"] * model.num_layers)
    window = hf.get("sliding_window")
    if len(types) != model.num_layers or ("sliding_attention" in types and not window):
        raise ModelError(
            f"{source} has layer_types = {types} and sliding_window = {window}; one type for each "
            f"of its {model.num_layers} layers, and a window for sliding ones, are needed."
        )
    windows = tuple(int(window) if t == "sliding_attention" else None for t in types)
    return replace(model, windows=windows)


def load_eagle3(folder: Path, target: Model, *, layer_ids: str = "auto") -> Eagle3:
    """Read a checkpoint for a target. Raises `ModelError` naming what does not fit.

    An embedding that is the target's over again is not kept twice.
    """
    hf = flattened(read_json(folder / "config.json"), "eagle3", source=str(folder))
    with opened(folder, target=target) as handles:
        names = {_plain(name): name for name in handles}
        config = read_eagle3_config(
            hf, target.config, set(names), source=str(folder), layer_ids=layer_ids
        )
        shapes = {n: tuple(handles[o].get_slice(o).get_shape()) for n, o in names.items()}
        compare_tensors(
            shapes, config.shapes, source=str(folder), what="an EAGLE-3 drafter", spare=SPARE
        )

        def get(name: str) -> Tensor:
            tensor: Tensor = handles[names[name]].get_tensor(names[name])
            dtype = torch.int64 if name == "d2t" else target.dtype
            return tensor.to(device=target.device, dtype=dtype)

        tensors = {name: get(name) for name in config.shapes}
        if "d2t" in tensors:
            taken = handles[names["t2d"]].get_tensor(names["t2d"]) if "t2d" in names else None
            check_mapping(tensors["d2t"], taken, target.config.vocab_size, str(folder))
    own = tensors.get("embed_tokens.weight")
    if own is not None and own.shape == target.embedding.shape and own.equal(target.embedding):
        config = replace(config, own_embedding=False)
        del tensors["embed_tokens.weight"]
    return from_tensors(config, tensors, target)


def save_eagle3(folder: Path, config: Eagle3Config, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that `load_eagle3` and vLLM read.

    Ids are boundaries. SGLang would add one to each: for it, write outputs (ids less one).
    """
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
            MARK: "boundaries",
            "norm_before_fc": config.norm_before_fc,
        },
    }
    if config.target_hidden is not None:
        hf["target_hidden_size"] = config.target_hidden
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    if "d2t" in kept:
        kept["t2d"] = named(kept["d2t"], config.model.vocab_size)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def _plain(name: str) -> str:
    for prefix, plain in _ALIASES.items():
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    return name


def _check_target(config: Eagle3Config, target: ModelConfig, source: str) -> None:
    said = "hidden_size" if config.target_hidden is None else "target_hidden_size"
    for what, own, theirs in (
        (said, config.feature_size, target.hidden_size),
        ("vocab_size", config.model.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise ModelError(
                f"{source} was made for another target: its {what} is {own}, not {theirs}."
            )
