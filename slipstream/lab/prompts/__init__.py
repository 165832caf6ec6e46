"""What the lab sends: our own chat and code prompts, generated documents and edits, gate tasks.

Chat and code are finite pools of hand-written prompts with stable ids. Documents, edits, needles
and JSON tasks are generated: the same seed gives the same text on every machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from slipstream.errors import InvalidConfig
from slipstream.lab.prompts.documents import document_prompt
from slipstream.lab.prompts.edits import copy_overlap, edit_prompts
from slipstream.lab.prompts.gates import check_json, json_tasks, needle
from slipstream.lab.prompts.pool import pool
from slipstream.lab.prompts.prompt import Prompt, from_file, with_salt

__all__ = [
    "TRAFFIC",
    "Prompt",
    "check_json",
    "copy_overlap",
    "from_file",
    "json_tasks",
    "load",
    "needle",
    "pool",
    "with_salt",
]

TRAFFIC = ("chat", "code", "doc", "edit")


def load(
    traffic: str,
    *,
    seed: int,
    count: int,
    tokens: int | None = None,
    count_tokens: Callable[[str], int],
) -> list[Prompt]:
    """`count` different prompts of a traffic class, the same ones for the same seed.

    `tokens`: length of each doc prompt (question included, chat template and salt not), reached to
    within 2 % below; required for doc, an error elsewhere. `count_tokens` measures it.
    Raises `InvalidConfig` for an unknown class, or more chat or code prompts than were written.
    """
    if traffic not in TRAFFIC:
        raise InvalidConfig(f"Traffic {traffic!r} does not exist; use one of {', '.join(TRAFFIC)}.")
    if count < 1:
        raise InvalidConfig(f"The prompt count is {count}; ask for 1 or more.")
    if traffic == "doc":
        if tokens is None:
            raise InvalidConfig("Traffic 'doc' has no length; set tokens, for example 6000.")
        return [
            document_prompt(seed=seed, index=index, tokens=tokens, count_tokens=count_tokens)
            for index in range(count)
        ]
    if tokens is not None:
        raise InvalidConfig(
            f"tokens is {tokens} for traffic {traffic!r}, whose prompts have their own length; "
            "leave it out (it applies to doc only)."
        )
    if traffic == "edit":
        return edit_prompts(seed=seed, count=count)
    prompts = pool(traffic)
    if count > len(prompts):
        raise InvalidConfig(
            f"{count} {traffic} prompts were asked for and {len(prompts)} exist; "
            "prompts are never repeated, so ask for fewer or use a prompt file."
        )
    return random.Random(f"{traffic}/{seed}").sample(prompts, count)
