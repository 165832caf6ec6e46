"""Slipstream: exact speculative decoding, and the lab that proves what it pays.

from slipstream import LLM, SamplingParams
print(LLM(drafter="ngram:3").generate("Once upon a time")[0].text)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from slipstream.errors import InvalidConfig, InvalidRequest, ModelError, SlipstreamError
from slipstream.types import Completion, FinishReason, SamplingParams
from slipstream.version import __version__

# Read by torch's thread pool when torch is first loaded. A step is hundreds of short parallel
# regions; on a shared machine the default (spin for milliseconds at each barrier) makes a step ten
# times slower whenever another program wants the core. Spinning briefly costs nothing measurable on
# a quiet machine (docs/log.md, 2026-11-30).
os.environ.setdefault("GOMP_SPINCOUNT", "20000")

if TYPE_CHECKING:
    from slipstream.engine.llm import LLM

__all__ = [
    "LLM",
    "Completion",
    "FinishReason",
    "InvalidConfig",
    "InvalidRequest",
    "ModelError",
    "SamplingParams",
    "SlipstreamError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """`LLM` is loaded on first use, so that the lab and `--help` start without torch."""
    if name == "LLM":
        from slipstream.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
