"""Mechanical changes to a quoted text: an order to make one, and mistakes as people make them."""

from __future__ import annotations

import keyword
import random
import re
from collections.abc import Mapping, Sequence

_WORD = re.compile(r"\b[A-Za-z_][A-Za-z_]{3,}\b")
_NUMBER = re.compile(r"(?<![\w.])\d{1,5}(?![\w.])")
_FRESH = (
    "value", "entry", "source", "harbor", "silver", "record", "window", "garden", "signal",
    "market", "orange", "number_of", "first_one", "current", "result", "bridge", "candle", "folder",
    "winter", "payload", "element", "stone", "letter", "budget", "river", "handler", "output",
    "original",
)  # fmt: skip
_MISTAKES = (
    (r" <= ", " < "), (r" < ", " <= "), (r" >= ", " > "), (r" > ", " >= "), (r" == ", " != "),
    (r" and ", " or "), (r" or ", " and "), (r" && ", " || "), (r" \+ 1\b", ""), (r" - 1\b", ""),
    (r"\bnot ", ""), (r"\bTrue\b", "False"), (r"\btrue\b", "false"), (r" \+= ", " = "),
    (r"\bis None\b", "is not None"), (r"\[0\]", "[1]"), (r"\breturn (?=\w)", ""), (r" \+ ", " - "),
)  # fmt: skip


def change(rng: random.Random, text: str, orders: Mapping[str, Sequence[str]]) -> str:
    """An order to change one thing in `text`: rename a word, another number, a line less or more.

    `orders`: templates by "rename", "number", "drop" and "add", with {old} and {new}, and "lines"
    to add. What is to be changed is in the text, and what it becomes is not, except a line's place.
    """
    words = sorted(w for w in set(_WORD.findall(text)) if not keyword.iskeyword(w))
    numbers = sorted(set(_NUMBER.findall(text)))
    lines = [line.strip() for line in text.splitlines() if 8 <= len(line.strip()) <= 60]
    once = [line for line in lines if text.count(line) == 1]
    able = ["rename"] * 4 * bool(words) + ["number"] * 2 * bool(numbers) + ["add"]
    what = rng.choice(able + ["drop"] * bool(once))
    if what == "rename":
        old = rng.choice(words)
        new = rng.choice([w for w in _FRESH if w not in text])
    elif what == "number":
        old = rng.choice(numbers)
        new = rng.choice([n for n in map(str, range(2, 99)) if n not in numbers])
    else:
        old = rng.choice(once) if once else "the first one"
        new = rng.choice(list(orders["lines"]))
    order = rng.choice([o for o in orders[what] if once or what != "add" or "{old}" not in o])
    return re.sub(r"\{(old|new)\}", lambda slot: old if slot[1] == "old" else new, order)


def broken(rng: random.Random, code: str) -> str:
    """The code with one mistake: an operator, an edge, a constant, or a line that is gone.

    As it was where nothing of that kind is in it and it has too few lines to miss one.
    """
    found = [
        (match.start(), match.end(), new)
        for old, new in _MISTAKES
        for match in re.finditer(old, code)
    ]
    lines = code.split("\n")
    if found and (rng.random() < 0.8 or len(lines) < 6):
        start, end, new = rng.choice(found)
        return code[:start] + new + code[end:]
    inner = [
        i for i in range(2, len(lines) - 1) if lines[i].strip() and lines[i][-1] not in "{:([,"
    ]
    if inner and len(lines) >= 6:
        del lines[rng.choice(inner)]
    return "\n".join(lines)
