"""The hand-written prompts: JSONL files beside this module, one prompt a line."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from slipstream.lab.prompts.prompt import Prompt, from_file


@cache
def pool(traffic: str) -> tuple[Prompt, ...]:
    """Every hand-written prompt of `chat` or `code`, in file order. Ids never change meaning."""
    return tuple(from_file(Path(__file__).with_name(f"{traffic}.jsonl")))
