"""One prompt, a user's own prompt file, and the salt that keeps prompts from sharing a prefix."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidConfig

CountTokens = Callable[[str], int]
Message = dict[str, str]

_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request sends: chat `messages` (OpenAI shape) or plain `text`, never both.

    `source` is the text an edit prompt asks to copy, empty elsewhere. `id` is stable across
    releases for our own prompts, so that training can hold some out.
    """

    id: str
    messages: tuple[Message, ...] | None
    text: str | None = None
    source: str = ""

    def content(self) -> str:
        """All text the prompt carries, messages joined by blank lines, without a chat template."""
        if self.messages is None:
            return self.text or ""
        return "\n\n".join(message["content"] for message in self.messages)


def user_prompt(prompt_id: str, content: str, *, source: str = "") -> Prompt:
    """A conversation of one user message."""
    return Prompt(prompt_id, ({"role": "user", "content": content},), source=source)


def with_salt(prompt: Prompt, salt: str) -> Prompt:
    """`prompt` with the line "[ticket `salt`]" before everything else it says.

    It goes into the very first message, whatever its role, since a prefix cache would otherwise
    reuse a shared system message. Raises `InvalidConfig` for a salt that is empty or spans lines.
    """
    if not salt.strip() or "\n" in salt:
        raise InvalidConfig(f"The salt is {salt!r}; use a short non-empty string on one line.")
    line = f"[ticket {salt}]\n"
    if prompt.messages is None:
        return replace(prompt, text=line + (prompt.text or ""))
    first, *rest = prompt.messages
    salted = {**first, "content": line + first["content"]}
    return replace(prompt, messages=(salted, *rest))


def from_file(path: Path) -> list[Prompt]:
    """Prompts of a user's JSONL file, one object a line, blank lines skipped.

    A line holds `{"messages": [...]}` (OpenAI), `{"prompt": "..."}` or `{"text": "..."}`, and may
    hold `"id"` (default `NAME:LINE`). Other keys are errors, for a misspelled one would go unseen.
    Raises `InvalidConfig` naming file and line.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(
            f"The prompt file {path} cannot be read as UTF-8 text ({error}); give a JSONL file."
        ) from error
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse_line(line, where=f"{path}:{number}", default_id=f"{path.name}:{number}")
        if prompt.id in seen:
            raise InvalidConfig(
                f"{path}:{number}: id {prompt.id!r} was used on line {seen[prompt.id]}; "
                "give every prompt its own id."
            )
        seen[prompt.id] = number
        prompts.append(prompt)
    if not prompts:
        raise InvalidConfig(
            f'The prompt file {path} holds no prompts; write one {{"prompt": "..."}} a line.'
        )
    return prompts


def _parse_line(line: str, *, where: str, default_id: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidConfig(f"{where}: invalid JSON ({error}); write one object a line.") from error
    if not isinstance(record, dict):
        raise InvalidConfig(f"{where}: {type(record).__name__} found; each line is a JSON object.")
    unknown = sorted(record.keys() - {"id", "messages", "prompt", "text"})
    if unknown:
        raise InvalidConfig(f"{where}: unknown key {unknown[0]!r}; use id, messages, prompt, text.")
    kinds = [key for key in ("messages", "prompt", "text") if key in record]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "none"
        raise InvalidConfig(f"{where}: give exactly one of messages, prompt, text; found {found}.")
    prompt_id = record.get("id", default_id)
    if not isinstance(prompt_id, str) or not prompt_id:
        raise InvalidConfig(f"{where}: id is {prompt_id!r}; it must be a non-empty string.")
    value = record[kinds[0]]
    if kinds[0] == "messages":
        return Prompt(prompt_id, _parse_messages(value, where))
    if not isinstance(value, str) or not value.strip():
        raise InvalidConfig(f"{where}: {kinds[0]} is {value!r}; it must be a non-empty string.")
    return Prompt(prompt_id, None, text=value)


def _parse_messages(value: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise InvalidConfig(f"{where}: messages is {value!r}; it must be a non-empty list.")
    return tuple(_parse_message(item, f"{where}: messages[{i}]") for i, item in enumerate(value))


def _parse_message(item: Any, where: str) -> Message:
    if not isinstance(item, dict) or item.keys() != {"role", "content"}:
        raise InvalidConfig(f"{where} is {item!r}; it must be an object of role and content.")
    role, content = item["role"], item["content"]
    if role not in _ROLES:
        raise InvalidConfig(f"{where}.role is {role!r}; use one of {', '.join(_ROLES)}.")
    if not isinstance(content, str) or not content.strip():
        raise InvalidConfig(f"{where}.content is {content!r}; it must be a non-empty string.")
    return {"role": role, "content": content}
