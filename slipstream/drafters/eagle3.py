"""EAGLE-3 (arXiv 2503.01840): see `drafters.chain` and `models.eagle3`."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from slipstream.drafters.chain import ChainDrafter, chain
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.models.eagle3 import load_eagle3


def create(spec: DrafterSpec, context: DrafterContext) -> ChainDrafter:
    """The drafter of a spec `eagle3:PATH:draft_len,layer_ids=...`; says which layers it reads.

    Raises `ModelError` for a checkpoint that does not fit the target.
    """
    if spec.path is None:
        raise ValueError(f"{spec} has no path")  # parse() never lets one through
    weights = load_eagle3(
        Path(spec.path).expanduser(), context.target.model, layer_ids=spec.choice("layer_ids")
    )
    _say(weights.config.layers)
    return chain(weights, spec, context)


@cache
def _say(line: str) -> None:
    """Once a line and process, where the command line puts its errors too."""
    print(f"slipstream: {line}", file=sys.stderr)
