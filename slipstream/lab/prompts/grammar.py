"""Sentence templates: "[this|that]" chooses, "{slot}" asks a function for a word."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Generic, TypeVar

Card = TypeVar("Card")

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_BARE_A = re.compile(r"\b([Aa]) (?=[aeiouAEIO](?!ni|s[eu]|ne\b))")
_SLOT = re.compile(r"\{([a-z]+)(?::(\d+)-(\d+))?\}")


def expand(template: str, rng: random.Random, fill: Callable[[str], str]) -> str:
    """One sentence from a template. Choices may nest; `{number:2-9}` is drawn from that range."""
    while choice := _CHOICE.search(template):
        picked = rng.choice(choice[1].split("|"))
        template = template[: choice.start()] + picked + template[choice.end() :]

    def value(slot: re.Match[str]) -> str:
        if slot[2]:
            return str(rng.randint(int(slot[2]), int(slot[3])))
        return fill(slot[1])

    sentence = _SLOT.sub(value, template)
    sentence = _BARE_A.sub(r"\1n ", sentence)
    return re.sub(r"(^|[.?!] )([a-z])", lambda start: start[1] + start[2].upper(), sentence)


class Deck(Generic[Card]):
    """Draws every card before any comes back, so that a long text uses all its templates evenly."""

    def __init__(self, cards: list[Card], rng: random.Random) -> None:
        self._cards = cards
        self._rng = rng
        self._left: list[Card] = []

    def draw(self) -> Card:
        """The next card, of a fresh shuffle where the last one is used up."""
        if not self._left:
            self._left = self._rng.sample(self._cards, len(self._cards))
        return self._left.pop()


def parse_sections(text: str) -> dict[str, list[str]]:
    """Lines of a style file by their "# heading"; blank lines are skipped."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("# "):
            lines = sections.setdefault(line[2:].strip(), [])
        elif line.strip():
            lines.append(line.strip())
    return sections
