"""The engine's public names."""

from slipstream.engine.engine import Engine, StepOutput
from slipstream.engine.llm import LLM

__all__ = ["LLM", "Engine", "StepOutput"]
