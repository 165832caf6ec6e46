"""Sentences for training prompts from hand-written lists: choices made, slots filled."""

from __future__ import annotations

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

Message = dict[str, str]
Lists = dict[str, list[str]]

_CHOICE = re.compile(r"\[([^\[\]|]+(?:\|[^\[\]|]*)+)\]")
_SLOT = re.compile(r"\{([a-z]+)\}")
_BARE_A = re.compile(r"\b([Aa]) (?=[aeiAEI]|o(?!ne|u))")
_ONCE = ("noun", "field")


@cache
def lists() -> dict[str, Lists]:
    """The lists of `requests.toml` by section and name."""
    text = Path(__file__).with_name("requests.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def say(
    rng: random.Random,
    template: str,
    words: Mapping[str, str] | None = None,
    *,
    keep: Sequence[str] = (),
) -> str:
    """A template with its choices made and its slots filled: from `words`, else from the list of
    that name, no word twice ("other": another language). A noun and a field of `words` are taken
    once, and where a template wants more, others follow. Slots in `keep` are left.

    Raises `KeyError` for slots nobody knows.
    """
    given, used, met = words or {}, set[str](), set[str]()

    def fill(slot: re.Match[str]) -> str:
        if slot[1] in keep:
            return slot[0]
        if slot[1] in given and (slot[1] not in _ONCE or slot[1] not in met):
            met.add(slot[1])
            return given[slot[1]]
        own = lists()["words"]["lang" if slot[1] == "other" else slot[1]]
        free = [w for w in own if w not in used and w not in given.values()] or own
        used.add(word := rng.choice(free))
        return word

    said = template
    while _CHOICE.search(said):
        said = _CHOICE.sub(lambda choice: rng.choice(choice[1].split("|")), said)
    while any(slot[1] not in keep for slot in _SLOT.finditer(said)):
        said = _SLOT.sub(fill, said)
    said = _BARE_A.sub(r"\1n ", said)
    return said[:1].upper() + said[1:] if template.startswith("{") else said


def listed(rng: random.Random, some: Sequence[str], lead: str) -> str:
    """As bullets, numbers or one paragraph; "" of nothing."""
    if not some:
        return ""
    how = rng.random()
    if len(some) < 2 or how < 0.35:
        return " ".join(some)
    bullet = rng.choice("-*") if how < 0.75 else ""
    lines = [f"{bullet or f'{i}.'} {one}" for i, one in enumerate(some, 1)]
    return "\n".join([lead, *lines] if lead else lines)


def put(template: str, **what: str) -> str:
    """Slots replaced all at once: what is put in may hold braces."""
    return re.sub(r"\{(\w+)\}", lambda slot: what.get(slot[1], slot[0]), template)


def user(content: str) -> list[Message]:
    """A conversation of one message."""
    return [{"role": "user", "content": content.strip()}]
