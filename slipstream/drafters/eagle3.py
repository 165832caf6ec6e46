"""EAGLE-3 (arXiv 2503.01840): see `drafters.chain` and `models.eagle3`."""

from __future__ import annotations

import sys
from functools import cache

from slipstream.drafters import weights
from slipstream.drafters.chain import ChainDrafter, chain
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.models.eagle3 import load_eagle3


def create(spec: DrafterSpec, context: DrafterContext) -> ChainDrafter:
    """The drafter of a spec `eagle3[:PATH][:draft_len],layer_ids=...`; says which layers it reads.

    Raises `ModelError` for a checkpoint that does not fit the target, and where none ships for it.
    """
    folder, reading = weights.folder(spec, context), spec.choice("layer_ids")
    head = load_eagle3(folder, context.target.model, layer_ids=reading)
    _say(head.config.layers)
    return chain(head, spec, context)


@cache
def _say(line: str) -> None:
    """Once a line and process, where the command line puts its errors too."""
    print(f"slipstream: {line}", file=sys.stderr)
