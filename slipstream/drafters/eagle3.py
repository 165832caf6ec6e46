"""EAGLE-3 (arXiv 2503.01840): see `drafters.chain` and `models.eagle3`."""

from __future__ import annotations

from slipstream.drafters import weights
from slipstream.drafters.chain import ChainDrafter, chain
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.models.eagle3 import load_eagle3


def create(spec: DrafterSpec, context: DrafterContext) -> ChainDrafter:
    """The drafter of a spec `eagle3[:PATH][:draft_len]`.

    Raises `ModelError` for a checkpoint that does not fit the target, and where none ships for it.
    """
    return chain(load_eagle3(weights.folder(spec, context), context.target.model), spec, context)
