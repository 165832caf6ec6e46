"""MTP heads (DeepSeek-V3, arXiv 2412.19437): see `drafters.chain` and `models.mtp`."""

from __future__ import annotations

from slipstream.drafters import weights
from slipstream.drafters.chain import ChainDrafter, chain
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.models.mtp import load_mtp


def create(spec: DrafterSpec, context: DrafterContext) -> ChainDrafter:
    """The drafter of a spec `mtp[:PATH][:draft_len]`.

    Raises `ModelError` for a checkpoint that does not fit the target, and where none ships for it.
    """
    return chain(load_mtp(weights.folder(spec, context), context.target.model), spec, context)
