"""DFlash: a drafter that fills a block of mask tokens in one pass, looking at target features.

Source: arXiv 2602.06036; names and config keys of the published checkpoints (z-lab, SpecForge,
speculators).
Keys and values of committed tokens come from the target's features, not from a residual stream of
their own: `fc` joins the tapped layers, and each draft layer's own projections read the result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.checkpoint import compare_tensors, config_file, opened, read_json
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model, build, expected_shapes
from slipstream.models.layers import Norm, rms_norm, rotate_
from slipstream.models.linear import Linear, linear, pack
from slipstream.models.reduced import SPARE, check_mapping, named, target_ids, widened
from slipstream.models.speculators import flattened

ARCHITECTURE = "DFlashDraftModel"
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_NEUTRAL_AT_ONE = ("input_embedding_scale", "output_multiplier", "attention_value_scale")
_SWITCHES = ("use_swa", "attention_sink_bias", "attention_value_scale")
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""The target's; some publishers store them again, frozen as they are in training."""
_ALIASES = {
    "model.": "",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """`model`: the draft layers. `block_size`: anchor and masks. `taps`: `hs[i]` indices of the
    features (a checkpoint counts layer outputs, one less). `sliding_causal`: in layers with a
    window a row of the block sees none after itself; elsewhere it always sees the whole block.
    `draft_vocab`: rows of a head of its own, which `d2t` maps to the target's tokens; None to use
    the target's head.
    """

    model: ModelConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    sliding_causal: bool = True
    draft_vocab: int | None = None

    @property
    def ahead(self) -> tuple[bool, ...]:
        """For each layer, whether the block is seen to its end (see `target.target.Target`)."""
        return tuple(w is None or not self.sliding_causal for w in self.model.windows)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint; the embedding is the target's."""
        hidden = self.model.hidden_size
        own = {n.removeprefix("model."): s for n, s in expected_shapes(self.model).items()}
        own = {n: s for n, s in own.items() if n not in SHARED}
        if self.draft_vocab is not None:
            own |= {"lm_head.weight": (self.draft_vocab, hidden), "d2t": (self.draft_vocab,)}
        return own | {
            "fc.weight": (hidden, len(self.taps) * hidden),
            "hidden_norm.weight": (hidden,),
        }


@dataclass(frozen=True, slots=True)
class DFlash:
    """Weights on one device. `model`: draft layers with the target's embedding and head. `kv`: key
    and value rows of all layers, one product because all read the same context. `ids` int64
    [draft_vocab]: the target's token of each row of the head, None where it is the target's own.
    """

    config: DFlashConfig
    model: Model
    fc: Linear
    norm: Norm
    kv: Linear
    ids: Tensor | None = None

    def over_target(self, logits: Tensor) -> Tensor:
        """The head's logits over the target's vocabulary, [N, vocab]; -inf without a row."""
        return widened(logits, self.ids, self.config.model.vocab_size)

    def context(self, features: Tensor, positions: Tensor, last: int) -> list[Tensor]:
        """Keys (rotated) and values of committed tokens: a [tokens, 2 * kv, dim] a layer.

        `features` [tokens, taps, hidden]; `positions` int64 [tokens], the largest being `last`.
        """
        c = self.model.config
        fused = rms_norm(linear(features.flatten(1), self.fc), self.norm)
        both = linear(fused, self.kv).view(len(fused), c.num_layers, 2 * c.num_kv_heads, c.head_dim)
        cos, sin = self.model.rope.rows(positions, last)
        found = []
        for layer, own in zip(self.model.layers, both.unbind(1), strict=True):
            keys = own[:, : c.num_kv_heads]
            if layer.qk_norm is not None:
                keys = torch.rms_norm(keys, [c.head_dim], None, c.norm_eps)
                keys = keys * layer.qk_norm[c.num_heads :]
            keys = keys.contiguous()
            rotate_(keys, cos, sin)
            found.append(torch.cat((keys, own[:, c.num_kv_heads :]), 1))
        return found


def read_dflash_config(folder: Path) -> DFlashConfig:
    """The config of a checkpoint folder. Raises `ModelError` where it is not one of DFlash."""
    hf = flattened(read_json(config_file(folder)), "dflash", source=str(folder))
    if ARCHITECTURE not in (hf.get("architectures") or ()):
        raise ModelError(
            f"{folder} is no DFlash drafter: its config's architectures are "
            f"{hf.get('architectures')!r}, {ARCHITECTURE!r} is needed."
        )
    refuse(hf, folder, *SCALES)
    return config_from(hf, folder, least=2)


def config_from(hf: dict[str, Any], folder: Path, *, least: int) -> DFlashConfig:
    """The keys that DFlash and its descendants share; blocks have at least `least` rows.

    Raises `ModelError` for missing or unsupported values.
    """
    own = {**(hf.get("dflash_config") or {}), **(hf.get("dspark_config") or {})}
    layers = own.get("target_layer_ids", hf.get("target_layer_ids"))
    mask = own.get("mask_token_id", hf.get("mask_token_id"))
    block = hf.get("block_size", own.get("block_size"))
    for name, value in (("target_layer_ids", layers), ("mask_token_id", mask)):
        if value is None:
            raise ModelError(f"{folder} has no dflash_config.{name} in its config; it is needed.")
    if not isinstance(block, int) or not least <= block <= 33:
        raise ModelError(f"{folder} has block_size = {block!r}; allowed: {least} to 33.")
    refuse({**hf, **own}, folder, *_SWITCHES)
    model = from_hf({**hf, "tie_word_embeddings": False}, source=str(folder))
    causal = hf.get("is_causal", own.get("causal"))
    if causal:
        raise ModelError(
            f"{folder} sets causal = {causal!r}; only drafters whose full layers see the whole "
            "block are supported."
        )
    narrow = [w for w in model.windows if w is not None and w < block]
    if narrow:
        raise ModelError(
            f"{folder} has sliding_window = {narrow[0]}; its block of {block} must fit into it."
        )
    taps = tuple(int(i) + 1 for i in layers)
    vocab = hf.get("draft_vocab_size")
    reduced = None if vocab == model.vocab_size else vocab
    return DFlashConfig(model, block, int(mask), taps, causal is None, reduced)


def refuse(hf: dict[str, Any], folder: Path, *keys: str) -> None:
    """Raise `ModelError` where a config sets one of these; a scale of 1 changes nothing."""
    for key in keys:
        value = hf.get(key)
        if value not in (None, False) and not (value == 1.0 and key in _NEUTRAL_AT_ONE):
            raise ModelError(f"{folder} has {key} = {value!r} in its config; it is not supported.")


def load_dflash(folder: Path, target: Model) -> DFlash:
    """Read a checkpoint for a target. Raises `ModelError` naming what does not fit."""
    config = read_dflash_config(folder)
    check_target(config, target.config, folder)
    tensors = read_tensors(folder, config.shapes, target, what="a DFlash drafter")
    return from_tensors(config, tensors, target)


def read_tensors(
    folder: Path, expected: Mapping[str, tuple[int, ...]], target: Model, *, what: str
) -> dict[str, Tensor]:
    """The tensors of a folder by plain name, in the target's dtype and device.

    Raises `ModelError` naming what does not fit `expected` shapes, or a mapping that is broken.
    """
    if (folder / "mask_embedding.pt").is_file():
        raise ModelError(
            f"{folder} brings an embedding of its mask token (mask_embedding.pt); it is not read."
        )
    spare = (*SPARE, *SHARED)
    with opened(folder, target=target) as handles:
        names = {plain_name(name): name for name in handles}
        shapes = {n: tuple(handles[o].get_slice(o).get_shape()) for n, o in names.items()}
        compare_tensors(shapes, expected, source=str(folder), what=what, spare=spare)

        def get(name: str) -> Tensor:
            tensor: Tensor = handles[names[name]].get_tensor(names[name])
            return tensor

        if "d2t" in expected:
            known = get("t2d") if "t2d" in names else None
            check_mapping(get("d2t"), known, target.config.vocab_size, str(folder))
        return {
            name: get(name).to(
                device=target.device, dtype=torch.int64 if name == "d2t" else target.dtype
            )
            for name in expected
        }


def from_tensors(config: DFlashConfig, tensors: Mapping[str, Tensor], target: Model) -> DFlash:
    """Assemble a drafter from tensors by checkpoint name, in the target's dtype and device."""

    def get(name: str) -> Tensor:
        if name == "model.embed_tokens.weight":
            return target.embedding
        return tensors[name.removeprefix("model.")]

    c = config.model
    own = config.draft_vocab is not None
    model = build(c, get, head=pack(tensors["lm_head.weight"]) if own else target.head)
    kinds = ("k_proj", "v_proj")
    prefixes = [f"layers.{i}.self_attn.{kind}" for i in range(c.num_layers) for kind in kinds]
    biases = [tensors[f"{p}.bias"] for p in prefixes] if c.qkv_bias else []
    norm = tensors["hidden_norm.weight"]
    return DFlash(
        config,
        model,
        pack(tensors["fc.weight"]),
        Norm(norm, torch.cat((norm, norm)), c.norm_eps),
        pack(
            torch.cat([tensors[f"{p}.weight"] for p in prefixes]),
            torch.cat(biases) if biases else None,
        ),
        target_ids(tensors["d2t"]) if own else None,
    )


def save_dflash(folder: Path, config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that `load_dflash`, vLLM and SGLang read."""
    folder.mkdir(parents=True, exist_ok=True)
    hf: dict[str, Any] = dict(config.model.hf)
    hf |= {
        "architectures": [ARCHITECTURE],
        "block_size": config.block_size,
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in config.taps],
        },
        "draft_vocab_size": config.draft_vocab,
    }
    if not config.sliding_causal:
        hf["is_causal"] = False
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    if "d2t" in kept:
        kept["t2d"] = named(kept["d2t"], config.model.vocab_size)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def plain_name(name: str) -> str:
    """A tensor's name without what some publishers put before it."""
    for prefix, plain in _ALIASES.items():
        if name.startswith(prefix):
            name = plain + name.removeprefix(prefix)
    return name


def check_target(config: DFlashConfig, target: ModelConfig, folder: Path) -> None:
    """Raise `ModelError` where a drafter was made for another target."""
    for what, own, theirs in (
        ("hidden_size", config.model.hidden_size, target.hidden_size),
        ("vocab_size", config.model.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise ModelError(
                f"{folder} was made for another target: its {what} is {own}, not {theirs}."
            )
    if not config.taps or not all(0 <= tap <= target.num_layers for tap in config.taps):
        raise ModelError(
            f"{folder} reads target layers {[t - 1 for t in config.taps]}; this target has layers "
            f"0 to {target.num_layers - 1}."
        )
    if not 0 <= config.mask_token_id < target.vocab_size:
        raise ModelError(
            f"{folder} has mask_token_id = {config.mask_token_id}; this target's ids are 0 to "
            f"{target.vocab_size - 1}."
        )
