"""DFlash2: DFlash with short convolutions along the block, and a selector that joins its tokens.

Source: DFlash2 of inco and z-lab (names, keys and shapes of incoai/Qwen3.8-27B-DFlash2). Around
both sublayers of every layer, a causal convolution whose kernel depends on the token lets a mask
read the rows before it. And where DFlash's masks each take their own likeliest token, a selector
scores the likeliest few of each given the token chosen before:
`S(c) = U(c) + sum_r A[before]_r * (W h)_r * B[c]_r`, U being the target head's logits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.models.checkpoint import config_file, read_json
from slipstream.models.dense import Model
from slipstream.models.dflash import (
    DFlash,
    DFlashConfig,
    check_target,
    config_from,
    from_tensors,
    read_tensors,
    refuse,
)
from slipstream.models.layers import Conv, Mix
from slipstream.models.linear import Linear, linear, pack

ARCHITECTURES = ("DFlash2DraftModel", "DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel")
CONVS = ("attention_conv", "mlp_conv")
BEFORE = "candidate_selector.predecessor_codebook"
AFTER = "candidate_selector.successor_codebook"
PROJECTION = "candidate_selector.hidden_projection.weight"


@dataclass(frozen=True, slots=True)
class DFlash2Config:
    """`flash`: the backbone. `kernel`: rows of the block a convolution reads, the row itself
    included; `group`: channels that share what a token adds to its kernel. `rank` and `top_k`: of
    the selector. Logits are multiplied by `multiplier`, then, with a `softcap` c, bent into c *
    tanh(z / c).
    """

    flash: DFlashConfig
    kernel: int = 2
    group: int = 16
    rank: int = 256
    top_k: int = 16
    multiplier: float = 1.0
    softcap: float | None = None

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint; codebooks are bare parameters there."""
        c = self.flash.model
        own: dict[str, tuple[int, ...]] = {}
        for i in range(c.num_layers):
            for conv in CONVS:
                name = f"layers.{i}.{conv}"
                own[f"{name}.base_kernel"] = (2, self.kernel, c.hidden_size)
                rows = 2 * self.kernel * (c.hidden_size // self.group)
                own[f"{name}.kernel_projection.weight"] = (rows, c.hidden_size)
        own[BEFORE] = own[AFTER] = (c.vocab_size, self.rank)
        own[PROJECTION] = (self.rank, c.hidden_size)
        return self.flash.shapes | own

    def scaled(self, logits: Tensor) -> Tensor:
        """Unary logits, float32, of what the target's head says."""
        logits = logits.float()
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


@dataclass(frozen=True, slots=True)
class DFlash2:
    """Weights on one device. `before`, `after`: the codebooks, [vocab, rank]; `projection` maps
    [N, hidden] to [N, rank].
    """

    config: DFlash2Config
    flash: DFlash
    before: Tensor
    after: Tensor
    projection: Linear

    def bonds(self, tokens: Tensor, hidden: Tensor, candidates: Tensor) -> Tensor:
        """What the token before adds to the scores of some candidates, float32 [N, K].

        `tokens` int64 [N]; `hidden` [N, hidden] normed; `candidates` int64 [N, K].
        """
        return bonds(
            F.embedding(tokens, self.before),
            linear(hidden, self.projection),
            F.embedding(candidates, self.after),
        )


def bonds(before: Tensor, projected: Tensor, after: Tensor) -> Tensor:
    """The selector's sums, float32 [..., K]; shared by serving and training.

    `before` [..., rank] of the token before, `projected` [..., rank] of the row's state, `after`
    [..., K, rank] of the candidates.
    """
    # No matrix product: under autocast one would be rounded to bfloat16.
    return ((before.float() * projected.float()).unsqueeze(-2) * after.float()).sum(-1)


def read_dflash2_config(folder: Path) -> DFlash2Config:
    """The config of a checkpoint folder. Raises `ModelError` where it is not one of DFlash2."""
    hf = read_json(config_file(folder))
    names = hf.get("architectures") or ()
    if not set(names) & set(ARCHITECTURES):
        raise ModelError(
            f"{folder} is no DFlash2 drafter: its config's architectures are {names!r}, "
            f"one of {', '.join(ARCHITECTURES)} is needed."
        )
    refuse(hf, folder, "input_embedding_scale")
    flash = config_from(hf, folder, least=2)
    own = hf.get("dflash_config") or {}

    def size(key: str, most: int) -> int:
        value = own.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise ModelError(f"{folder} has dflash_config.{key} = {value!r}; allowed: 1 to {most}.")
        return value

    def scale(key: str) -> float | None:
        value = hf.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{folder} has {key} = {value!r}; it must be above 0.")
        return float(value)

    c = flash.model
    group = size("conv_group_size", c.hidden_size)
    if c.hidden_size % group:
        raise ModelError(
            f"{folder} has conv_group_size = {group}; it must divide hidden_size, {c.hidden_size}."
        )
    return DFlash2Config(
        flash,
        size("conv_kernel_size", flash.block_size),
        group,
        size("selector_rank", c.vocab_size),
        size("selector_top_k", flash.draft_vocab or c.vocab_size),
        scale("output_multiplier") or 1.0,
        scale("final_logit_softcapping"),
    )


def load_dflash2(folder: Path, target: Model) -> DFlash2:
    """Read a checkpoint for a target. Raises `ModelError` naming what does not fit."""
    config = read_dflash2_config(folder)
    check_target(config.flash, target.config, folder)
    tensors = read_tensors(folder, config.shapes, target, what="a DFlash2 drafter")
    return dflash2_from(config, tensors, target)


def dflash2_from(config: DFlash2Config, tensors: Mapping[str, Tensor], target: Model) -> DFlash2:
    """Assemble a drafter from tensors by checkpoint name, in the target's dtype and device."""
    flash = from_tensors(config.flash, tensors, target)

    def conv(name: str) -> Conv:
        base = tensors[f"{name}.base_kernel"].flatten(0, 1)
        return Conv(base, pack(tensors[f"{name}.kernel_projection.weight"]), config.group)

    flash.model.layers = [
        layer._replace(mix=Mix(*(conv(f"layers.{i}.{c}") for c in CONVS), config.flash.block_size))
        for i, layer in enumerate(flash.model.layers)
    ]
    return DFlash2(config, flash, tensors[BEFORE], tensors[AFTER], pack(tensors[PROJECTION]))


def save_dflash2(folder: Path, config: DFlash2Config, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that `load_dflash2`, vLLM and SGLang read."""
    folder.mkdir(parents=True, exist_ok=True)
    hf: dict[str, Any] = {k: v for k, v in config.flash.model.hf.items() if k != "block_size"}
    hf |= {
        "architectures": [ARCHITECTURES[0]],
        "dflash_config": {
            "block_size": config.flash.block_size,
            "conv_kernel_size": config.kernel,
            "conv_group_size": config.group,
            "selector_rank": config.rank,
            "selector_top_k": config.top_k,
            "mask_token_id": config.flash.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in config.flash.taps],
        },
        "draft_vocab_size": config.flash.draft_vocab,
    }
    if not config.flash.sliding_causal:
        hf["is_causal"] = False
    if config.multiplier != 1.0:
        hf["output_multiplier"] = config.multiplier
    if config.softcap is not None:
        hf["final_logit_softcapping"] = config.softcap
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
