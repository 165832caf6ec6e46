"""Drafters' shapes without weights: from a `config.json`, or as published, scaled to a target.

What is published has the target's width, heads and MLP; these are the rest of it. DFlash: five
layers on five taps (z-lab). DFlash2: the same with a window of 2,048, kernels of two taps in groups
of 16 channels and a selector of rank 256 over 16 candidates (inco). DSpark: DFlash's layers, a
Markov head of rank 256 and a confidence head (DeepSeek, RadixArk). EAGLE-3: one Llama layer on
three taps and a head of 32,000 tokens (SpecForge, NVIDIA). MTP: one of the target's own layers
behind a join of two widths, and the target's head (DeepSeek-V3, GLM-4.5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.checkpoint import config_file, opened, read_json, weight_files
from slipstream.models.config import ModelConfig
from slipstream.models.dense import Model
from slipstream.models.dflash import DFlashConfig, check_target, read_dflash_config
from slipstream.models.dflash2 import DFlash2Config, read_dflash2_config
from slipstream.models.dspark import DSparkConfig, read_dspark_config
from slipstream.models.eagle3 import read_eagle3_config
from slipstream.models.eagle3_network import Eagle3Config
from slipstream.models.layer_ids import default_taps
from slipstream.models.mtp import MtpConfig, head_config, read_mtp_config
from slipstream.models.mtp_gated import GatedConfig
from slipstream.models.speculators import flattened

_LAYERS, _TAPS = 5, 5
_WINDOW = 2048
_HEAD = 32_000

ShapeConfig = DFlashConfig | DFlash2Config | DSparkConfig | Eagle3Config | MtpConfig | GatedConfig


@dataclass(frozen=True, slots=True)
class Sizes:
    """What to change of a published shape: `layers` of the drafter and rows of a head of its own
    (`vocab`); None keeps it.
    """

    layers: int | None = None
    vocab: int | None = None


def block_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Feature indices `hs[i]` evenly from the output of layer 1 to that of layer n - 3, as far as
    there are layers (DFlash's default).
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    evenly = (round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))
    return tuple(sorted({min(max(tap, 0), num_layers) for tap in evenly}))


def published(method: str, target: ModelConfig, *, draft_len: int, sizes: Sizes) -> ShapeConfig:
    """The shape of `method` (one with weights) for a target, for `draft_len` draft tokens."""
    if method == "mtp":
        return head_config(target, draft_vocab=sizes.vocab)
    if method == "eagle3":
        head = sizes.vocab or (_HEAD if target.vocab_size > _HEAD else None)
        plain = replace(
            target, family="llama", qk_norm=False, qkv_bias=False, out_bias=False, mlp_bias=False
        )
        layers = _layers(plain, sizes.layers or 1)
        return Eagle3Config(layers, default_taps(target.num_layers), head)
    window = _WINDOW if method == "dflash2" else None
    block = DFlashConfig(
        _layers(target, sizes.layers or _LAYERS, window),
        draft_len + (method != "dspark"),
        mask_token_id=0,
        taps=block_taps(target.num_layers, _TAPS),
        sliding_causal=False,
        draft_vocab=sizes.vocab,
    )
    if method == "dflash2":
        group = gcd(16, target.hidden_size)
        candidates = min(16, sizes.vocab or target.vocab_size)
        return DFlash2Config(block, group=group, top_k=candidates)
    return DSparkConfig(block) if method == "dspark" else block


def _layers(target: ModelConfig, count: int, window: int | None = None) -> ModelConfig:
    return replace(
        target, num_layers=count, rope=(True,) * count, windows=(window,) * count, tied=False
    )


def read_shape_of(method: str, path: Path, target: ModelConfig, *, layer_ids: str) -> ShapeConfig:
    """The shape that a drafter's folder or `config.json` says; its weights are not read.

    `layer_ids`: see `models.layer_ids`. Raises `ModelError` for a config that is not one of
    `method` or was made for a target of other sizes.
    """
    if method == "mtp":
        return read_mtp_config(path, target)
    if method == "eagle3":
        hf = flattened(read_json(config_file(path)), "eagle3", source=str(path))
        names = _tensor_names(path)
        return read_eagle3_config(hf, target, names, source=str(path), layer_ids=layer_ids)
    config: DFlashConfig | DFlash2Config | DSparkConfig
    if method == "dflash":
        config = read_dflash_config(path)
    else:
        config = (read_dflash2_config if method == "dflash2" else read_dspark_config)(path)
    check_target(config if isinstance(config, DFlashConfig) else config.flash, target, path)
    return config


def _tensor_names(path: Path) -> frozenset[str]:
    """Names of a folder's tensors, which decide where a config is silent; none where it has no
    weights.
    """
    if not path.is_dir() or not any(path.glob("*.safetensors")) or not weight_files(path):
        return frozenset()
    with opened(path) as handles:
        return frozenset(handles)


def block_of(config: ShapeConfig) -> int:
    """Positions from the anchor on that a block covers; 0 for drafters without blocks."""
    if isinstance(config, DFlash2Config | DSparkConfig):
        config = config.flash
    return config.block_size if isinstance(config, DFlashConfig) else 0


def random_tensors(config: ShapeConfig, target: Model, *, seed: int) -> dict[str, Tensor]:
    """Tensors of a shape by checkpoint name, in the target's dtype and device: N(0, 0.02), norms
    that change nothing, a reduced head for the first tokens.

    Raises `ModelError` where the device has no room for them.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    # Gated heads multiply by 1 + weight.
    one = 0.0 if isinstance(config, GatedConfig) else 1.0

    def drawn(name: str, shape: tuple[int, ...]) -> Tensor:
        if name == "d2t":
            return torch.zeros(shape, dtype=torch.int64, device=target.device)
        values = torch.empty(shape, dtype=target.dtype, device=target.device)
        if len(shape) == 1:
            return values.fill_(one if "norm" in name else 0.0)
        return values.normal_(0.0, 0.02, generator=generator)

    try:
        return {name: drawn(name, shape) for name, shape in _shapes(config).items()}
    except torch.OutOfMemoryError as error:
        size = sum(torch.Size(s).numel() for s in _shapes(config).values())
        raise ModelError(
            f"A drafter of this shape needs {size * target.dtype.itemsize / 2**30:.1f} GiB, more "
            f"than {target.device} has free."
        ) from error


def _shapes(config: ShapeConfig) -> Mapping[str, tuple[int, ...]]:
    shapes: Any = config.shapes
    return dict(shapes)
