"""Drafters of a true shape with random weights: what drafting costs, before one is trained.

A spec is a drafter's own, except that the PATH may be a bare `config.json` and that without one the
shape is the published one for the target (`models.shaped`), of which `layers` and `vocab` can be
changed: `eagle3:4`, `dspark:7,layers=2`, `mtp:FOLDER:3`. Only the shape is read of a folder; what
drafts is the method's own drafter, on the host and on the device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slipstream.drafters import chain, dflash, dflash2, dspark
from slipstream.drafters.base import Drafter
from slipstream.drafters.specs import METHODS, DrafterContext, DrafterSpec, build, parse
from slipstream.errors import InvalidConfig
from slipstream.models import eagle3_network, mtp, mtp_gated, shaped
from slipstream.models.config import ModelConfig
from slipstream.models.dense import Model
from slipstream.models.dflash import from_tensors
from slipstream.models.dflash2 import dflash2_from
from slipstream.models.dspark import dspark_from
from slipstream.models.mtp_gated import GatedConfig

_SIZE = re.compile(r",(layers|vocab)=([^,:/]*)")
_ASSEMBLE: dict[str, Callable[[Any, DrafterSpec, DrafterContext], Drafter]] = {
    "mtp": chain.chain,
    "eagle3": chain.chain,
    "dflash": dflash.assembled,
    "dflash2": dflash2.assembled,
    "dspark": dspark.assembled,
}
MEASURED = ("none", "ngram", "suffix", *_ASSEMBLE)
"""Methods whose cost can be told from a shape."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A drafter before it is built. `config` is None for methods without weights."""

    spec: DrafterSpec
    config: shaped.ShapeConfig | None

    @property
    def reach(self) -> int:
        """Positions from the anchor on that a step may use."""
        block = 0 if self.config is None else shaped.block_of(self.config)
        return max(self.spec.draft_len + 1, block)

    def built(self, context: DrafterContext) -> Drafter:
        """The drafter, its weights drawn at random. `context.target` is a `LoadedModel`.

        Raises `InvalidConfig` for more draft tokens than its block holds, `ModelError` where memory
        is short.
        """
        if self.config is None:
            return build(self.spec, context=context)
        model = context.target.model
        tensors = shaped.random_tensors(self.config, model, seed=1)
        weights = _weights(self.spec.method, self.config, tensors, model)
        return _ASSEMBLE[self.spec.method](weights, self.spec, context)


def shape_of(text: str, target: ModelConfig) -> Shape:
    """Read a spec. Raises `InvalidConfig` for one that makes no sense or has no cost to tell, and
    `ModelError` for a config that does not fit the target.
    """
    given = {key: _count(key, value, text) for key, value in _SIZE.findall(text)}
    spec = parse(_SIZE.sub("", text))
    if spec.method not in MEASURED:
        raise InvalidConfig(
            f"drafter is {text!r}; costs are measured of {', '.join(MEASURED)}: use one of these."
        )
    if given and (spec.path is not None or spec.method not in _ASSEMBLE):
        why = "its config says its sizes" if spec.path is not None else "it has no weights"
        raise InvalidConfig(f"{next(iter(given))} is given for {text!r}, but {why}; leave it out.")
    if spec.method == "mtp" and "layers" in given:
        raise InvalidConfig(f"layers is given for {text!r}; an MTP head has one: leave it out.")
    if given.get("vocab", 1) > target.vocab_size:
        raise InvalidConfig(
            f"vocab is {given['vocab']} in drafter {text!r}; allowed: 1 to {target.vocab_size}, "
            "the target's."
        )
    if not METHODS[spec.method].takes_path:
        return Shape(spec, None)
    if spec.path is None:
        sizes = shaped.Sizes(given.get("layers"), given.get("vocab"))
        return Shape(
            spec, shaped.published(spec.method, target, draft_len=spec.draft_len, sizes=sizes)
        )
    reading = spec.choice("layer_ids") if spec.method == "eagle3" else "auto"
    path = Path(spec.path).expanduser()
    return Shape(spec, shaped.read_shape_of(spec.method, path, target, layer_ids=reading))


def _count(key: str, text: str, spec: str) -> int:
    if not re.fullmatch(r"\d{1,9}", text) or int(text) < 1:
        raise InvalidConfig(
            f"{key} is {text!r} in drafter {spec!r}; allowed: a whole number from 1."
        )
    return int(text)


def _weights(method: str, config: Any, tensors: Mapping[str, Tensor], target: Model) -> Any:
    """The network of a shape."""
    if method == "mtp":
        gated = isinstance(config, GatedConfig)
        return (mtp_gated if gated else mtp).from_tensors(config, tensors, target)
    if method == "eagle3":
        return eagle3_network.from_tensors(config, tensors, target)
    if method == "dflash":
        return from_tensors(config, tensors, target)
    return (dflash2_from if method == "dflash2" else dspark_from)(config, tensors, target)
