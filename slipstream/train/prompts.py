"""Training prompts of many kinds: templates over topics, and questions about the target's answers.

The lists are in `seeds.toml`. What the lab measures with is never among them: its chat and code
pools are written by hand, and whoever asks here hands in what must not come out.
"""

from __future__ import annotations

import random
import re
import tomllib
from functools import cache
from pathlib import Path

_LONGEST = 2400
"""Characters of a quoted text; an edit has to be copied whole within an answer."""
_EDITED = 700


@cache
def seeds() -> dict[str, dict[str, list[str]]]:
    """The lists by kind and name."""
    text = Path(__file__).with_name("seeds.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def chat(rng: random.Random) -> list[dict[str, str]]:
    """A question about a topic; one in four with a system message."""
    own = seeds()["chat"]
    asked = rng.choice(own["templates"]).format(rng.choice(own["topics"]))
    message = {"role": "user", "content": asked}
    if rng.random() < 0.25:
        return [{"role": "system", "content": rng.choice(own["systems"])}, message]
    return [message]


def code(rng: random.Random) -> list[dict[str, str]]:
    """A programming task."""
    own = seeds()["code"]
    return _user(rng.choice(own["templates"]).format(rng.choice(own["tasks"])))


def about_code(rng: random.Random, answer: str) -> list[dict[str, str]] | None:
    """A question about the first code block of an answer; None without one."""
    block = re.search(r"```\w*\n.+?\n```", answer, re.DOTALL)
    if block is None or len(block[0]) > _LONGEST:
        return None
    return _user(rng.choice(seeds()["follow"]["code"]).format(block[0]))


def about_text(rng: random.Random, answer: str) -> list[dict[str, str]] | None:
    """A question about an answer."""
    text = answer.strip()[:_LONGEST]
    if len(text) < 80:
        return None
    return _user(rng.choice(seeds()["follow"]["text"]).replace("{}", text))


def edit(rng: random.Random, answer: str) -> list[dict[str, str]] | None:
    """One word of an answer's beginning is to be replaced; None where it has too few."""
    text = answer.strip()[:_EDITED].rsplit("\n", 1)[0]
    words = sorted(set(re.findall(r"[A-Za-z_]{4,}", text)))
    if len(words) < 5 or len(text) < 120:
        return None
    old, new = rng.choice(words), rng.choice([w for w in _words() if w not in words])
    change = f'Replace "{old}" with "{new}" everywhere.'
    order = rng.choice(seeds()["follow"]["edit"])
    return _user(order.replace("{change}", change).replace("{text}", text))


def same(text: str) -> str:
    """What makes two prompts the same: their words."""
    return " ".join(text.split()).lower()


@cache
def _words() -> tuple[str, ...]:
    text = " ".join(seeds()["chat"]["topics"])
    return tuple(sorted(set(re.findall(r"[A-Za-z]{4,}", text))))


def _user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]
