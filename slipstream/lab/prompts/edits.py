"""The copying workload: return a given text with one small change."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.lab.prompts.chronicle import STYLES, Chronicle, words
from slipstream.lab.prompts.grammar import Deck
from slipstream.lab.prompts.prompt import Prompt, user_prompt

_RUN = 4  # words in a row that count as copied; shorter runs happen by chance
_GENERATED_SHARE = 0.25
# Of seven phrasings tried, SmolLM2-135M copies most with this one: order first, text in tags.
_ORDER = (
    "Copy the complete text below and make only this change: {change}\n\n<text>\n{text}\n</text>"
)


@dataclass(frozen=True, slots=True)
class _Edit:
    key: str
    text: str
    change: str


def edit_prompts(*, seed: int, count: int) -> list[Prompt]:
    """`count` different edits, without a limit. `Prompt.source` is the text to be copied.

    Three in four use a hand-written text (prose, code, configuration, lists), each in turn; the
    rest, and whatever would repeat a pair of text and change, use a generated report.
    """
    rng = random.Random(f"edit/{seed}")
    records = {record["id"]: record for record in _written()}
    deck = Deck(list(records), rng)
    seen: set[tuple[str, str]] = set()
    prompts = []
    for index in range(count):
        edit = _generated(rng, index)
        if rng.random() >= _GENERATED_SHARE:
            written = _change(records[deck.draw()], rng)
            edit = edit if (written.key, written.change) in seen else written
        seen.add((edit.key, edit.change))
        content = _phrase(edit)
        prompts.append(user_prompt(f"{edit.key}-{seed}-{index}", content, source=edit.text))
    return prompts


def _phrase(edit: _Edit) -> str:
    return _ORDER.format(change=edit.change, text=edit.text)


@cache
def _written() -> tuple[dict[str, Any], ...]:
    lines = Path(__file__).with_name("edits.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def _change(record: dict[str, Any], rng: random.Random) -> _Edit:
    change = rng.choice(record["changes"])
    new = rng.choice(change["new"] or [""])
    return _Edit(record["id"], record["text"], change["instruction"].replace("{new}", new))


def _generated(rng: random.Random, index: int) -> _Edit:
    """An entry of a chronicle in which one person, or else the year, is to be changed."""
    style = rng.choice(STYLES)
    chronicle = Chronicle(style, random.Random(f"{rng.random()}/{index}"))
    for _ in range(rng.randint(1, 9)):  # not always an opening, where everybody is introduced
        section = chronicle.section()
    text = section.text()
    present = set(re.findall(r"\w+", text))
    named = [name for name in words("last") if name in present]
    if named:
        old = rng.choice(named)
        new = rng.choice([name for name in words("last") if name not in present])
    else:
        old, new = str(chronicle.day.year), str(chronicle.day.year - rng.randint(1, 9))
    return _Edit(f"edit-{style}", text, f'Replace "{old}" with "{new}" everywhere.')


def copy_overlap(source: str, answer: str) -> float:
    """Share of the answer's words that lie in runs of four or more words found in the source.

    Words are split at white space, case and punctuation kept. 0 for an empty answer.
    """
    have, said = source.split(), answer.split()
    runs = {tuple(have[i : i + _RUN]) for i in range(len(have) - _RUN + 1)}
    copied = [False] * len(said)
    for start in range(len(said) - _RUN + 1):
        if tuple(said[start : start + _RUN]) in runs:
            copied[start : start + _RUN] = [True] * _RUN
    return sum(copied) / len(said) if said else 0.0
