"""DSpark: DFlash with a small head that makes each draft token depend on the one before it.

Source: DeepSeek's DSpark; names and keys of the DeepSpec, RadixArk and speculators checkpoints.
Differences from DFlash: every row of the block predicts the *next* position, so a block of
`block_size` rows drafts as many tokens and the anchor's row is the first (there are checkpoints
where rows are DFlash's); a Markov head adds a bias that depends on the
token drafted before; a confidence head estimates whether a draft token will be accepted.
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
from torch.nn import functional as F

from slipstream.errors import ModelError
from slipstream.models.checkpoint import config_file, read_json
from slipstream.models.dense import Model
from slipstream.models.dflash import (
    SCALES,
    DFlash,
    DFlashConfig,
    check_target,
    config_from,
    from_tensors,
    read_tensors,
    refuse,
)
from slipstream.models.linear import Linear, linear, pack
from slipstream.models.reduced import named
from slipstream.models.speculators import flattened

ARCHITECTURES = ("DSparkDraftModel", "Qwen3DSparkModel")
MARKOV = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class DSparkConfig:
    """`flash`: the backbone, its block the draft tokens. `markov`: one of `MARKOV`, of `rank`.
    `confident`: whether there is a confidence head, `reads_markov`: which reads the Markov
    embedding too. `from_anchor` False: rows predict their own position as DFlash's do, so a block
    drafts one token less and the anchor's row none.
    """

    flash: DFlashConfig
    markov: str = "vanilla"
    rank: int = 256
    confident: bool = True
    reads_markov: bool = True
    from_anchor: bool = True

    @property
    def draft_len(self) -> int:
        """Tokens that a block drafts."""
        return self.flash.block_size - (not self.from_anchor)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of a checkpoint."""
        vocab, hidden, r = self.flash.model.vocab_size, self.flash.model.hidden_size, self.rank
        own: dict[str, tuple[int, ...]] = {
            "markov_head.markov_w1.weight": (vocab, r),
            "markov_head.markov_w2.weight": (self.flash.draft_vocab or vocab, r),
        }
        if self.markov == "gated":
            own["markov_head.gate_proj.weight"] = (r, hidden + r)
            own["markov_head.gate_proj.bias"] = (r,)
        if self.markov == "rnn":
            own["markov_head.joint_proj.weight"] = (3 * r, 2 * r + hidden)
            own["markov_head.joint_proj.bias"] = (3 * r,)
        if self.confident:
            own["confidence_head.proj.weight"] = (1, hidden + r * self.reads_markov)
            own["confidence_head.proj.bias"] = (1,)
        return self.flash.shapes | own


@dataclass(frozen=True, slots=True)
class DSpark:
    """Weights on one device. `first` [vocab, rank]; `second` maps [N, rank] to a bias of the head;
    `mix` is the gate or the joint projection; `confidence` None without such a head.
    """

    config: DSparkConfig
    flash: DFlash
    first: Tensor
    second: Linear
    mix: Linear | None
    confidence: Linear | None

    def bias(self, tokens: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What the token before adds to the head's logits, and the state after it.

        `tokens` int64 [N]; `hidden` [N, hidden] normed; `state` [N, rank], zeros at the anchor.
        """
        read, state = markov(self.config.markov, F.embedding(tokens, self.first), hidden, state,
                             self._mixed)  # fmt: skip
        return linear(read, self.second), state

    def survival(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """The chance that a draft token is accepted if those before it were, float32 [N].

        `tokens`: the token before it.
        """
        if self.confidence is None:
            return torch.ones(len(tokens), device=tokens.device)
        read = hidden
        if self.config.reads_markov:
            read = torch.cat((hidden, F.embedding(tokens, self.first)), 1)
        return linear(read, self.confidence)[:, 0].float().sigmoid()

    def _mixed(self, x: Tensor) -> Tensor:
        assert self.mix is not None
        return linear(x, self.mix)


def markov(
    kind: str, embedded: Tensor, hidden: Tensor, state: Tensor, mix: Any
) -> tuple[Tensor, Tensor]:
    """What `markov_w2` reads, [N, rank], and the next state; shared by serving and training.

    `embedded` [N, rank] of the token before; `mix` maps [N, ...] by the gate's or joint projection.
    """
    if kind == "vanilla":
        return embedded, state
    if kind == "gated":
        return mix(torch.cat((hidden, embedded), -1)).sigmoid() * embedded, state
    gate, change, out = mix(torch.cat((state, embedded, hidden), -1)).chunk(3, -1)
    keep = gate.sigmoid()
    return out.tanh(), keep * state + (1 - keep) * change.tanh()


def read_dspark_config(folder: Path) -> DSparkConfig:
    """The config of a checkpoint folder; keys may be nested or not, as published ones are.

    Raises `ModelError` where it is not one of DSpark.
    """
    hf = flattened(read_json(config_file(folder)), "dspark", source=str(folder))
    names = hf.get("architectures") or ()
    if not set(names) & set(ARCHITECTURES):
        raise ModelError(
            f"{folder} is no DSpark drafter: its config's architectures are {names!r}, "
            f"one of {', '.join(ARCHITECTURES)} is needed."
        )
    refuse(hf, folder, *SCALES)
    own = {**(hf.get("dflash_config") or {}), **(hf.get("dspark_config") or {})}

    def key(name: str, default: Any) -> Any:
        return own.get(name, hf.get(name, default))

    kind = key("markov_head_type", "vanilla")
    if kind not in MARKOV:
        raise ModelError(f"{folder} has markov_head_type {kind!r}; known: {', '.join(MARKOV)}.")
    rank = key("markov_rank", 256)
    if not isinstance(rank, int) or rank < 1:
        raise ModelError(
            f"{folder} has markov_rank = {rank!r}; only drafters with a Markov head are read."
        )
    from_anchor = not key("dspark_bonus_anchor", False)
    return DSparkConfig(
        config_from(hf, folder, least=1 if from_anchor else 2),
        kind,
        rank,
        bool(key("enable_confidence_head", True)),
        bool(key("confidence_head_with_markov", True)),
        from_anchor,
    )


def load_dspark(folder: Path, target: Model) -> DSpark:
    """Read a checkpoint for a target. Raises `ModelError` naming what does not fit."""
    config = read_dspark_config(folder)
    check_target(config.flash, target.config, folder)
    tensors = read_tensors(folder, config.shapes, target, what="a DSpark drafter")
    return dspark_from(config, tensors, target)


def dspark_from(config: DSparkConfig, tensors: Mapping[str, Tensor], target: Model) -> DSpark:
    """Assemble a drafter from tensors by checkpoint name, in the target's dtype and device."""
    mixed = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}.get(config.markov)

    def joined(name: str) -> Linear:
        return pack(tensors[f"{name}.weight"], tensors[f"{name}.bias"])

    return DSpark(
        config,
        from_tensors(config.flash, tensors, target),
        tensors["markov_head.markov_w1.weight"],
        pack(tensors["markov_head.markov_w2.weight"]),
        joined(mixed) if mixed else None,
        joined("confidence_head.proj") if config.confident else None,
    )


def save_dspark(folder: Path, config: DSparkConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write a checkpoint that `load_dspark`, vLLM and SGLang read."""
    folder.mkdir(parents=True, exist_ok=True)
    hf: dict[str, Any] = dict(config.flash.model.hf)
    hf |= {
        "architectures": [ARCHITECTURES[0]],
        "block_size": config.flash.block_size,
        "dflash_config": {
            "projector_type": "dspark",
            "mask_token_id": config.flash.mask_token_id,
            "target_layer_ids": [tap - 1 for tap in config.flash.taps],
            "markov_head_type": config.markov,
            "markov_rank": config.rank,
            "enable_confidence_head": config.confident,
            "confidence_head_with_markov": config.reads_markov,
            "dspark_bonus_anchor": not config.from_anchor,
        },
        "draft_vocab_size": config.flash.draft_vocab,
    }
    if not config.flash.sliding_causal:
        hf["is_causal"] = False
    (folder / "config.json").write_text(json.dumps(hf, indent=1) + "\n", encoding="utf-8")
    kept = {name: tensors[name].detach().cpu().contiguous() for name in config.shapes}
    if "d2t" in kept:
        kept["t2d"] = named(kept["d2t"], config.flash.model.vocab_size)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
