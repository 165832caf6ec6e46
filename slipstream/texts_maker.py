"""Rounds of texts: which prompts a target is asked, how it is asked, and what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.engine import LLM
from slipstream.engine.llm import Prompt
from slipstream.lab.prompts import json_tasks, load, pool
from slipstream.train import orders, prompts, requests
from slipstream.train.data import Text, self_prompts, text_of
from slipstream.train.loops import without_loop
from slipstream.train.overlap import Held
from slipstream.train.quotes import Shelf
from slipstream.types import SamplingParams

Asked = list[tuple[str, Prompt]]

_FOLLOWED = 0.12
"""Of a round's prompts: they ask about the answers to the others."""
_CODE = {
    "quote": 0.38,
    "brief": 0.19,
    "task": 0.12,
    "edit": 0.14,
    "own code": 0.03,
    "long code": 0.05,
    "code": 0.09,
}
"""Of the prompts about code. Pasted code comes first: drafters that had seen little of it did well
on made prompts and missed their bars on what people write (docs/log.md). What is "own" or "long"
the target makes up, which costs as much as answers do."""
_TALK = {"prose": 0.38, "doc": 0.08, "own chat": 0.16, "long chat": 0.16, "chat": 0.22}
_AHEAD, _MANY = 4, 64
"""Rounds for which the target makes up prompts at once, with so many users or more: few prompts at
a time leave a GPU's steps empty. A small run has its first texts sooner without."""
_SHORT, _LONG = 160, 320
"""Most tokens of a prompt that the target makes up: people paste what they ask about."""
_FOLLOW = ("edit", "question", "question")
_ABOUT_CODE = ("code", "quote", "brief", "task")
_WAVES = 4
MILD, VARIED = {"temperature": 0.2, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.95}
_MILD = 2 / 3
"""Of the answers that are not greedy: as chat is asked for, and the rest varied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to make: at least `tokens` of the target's own, or what `minutes` allow.

    `code`: share of the prompts that are about code, configuration and edits. Drafters reach chat's
    bars with less, and code, where tokens follow from what was pasted, gains most. `greedy`: share
    of the answers; code is measured greedily, and a greedy answer is the only right one there, but
    answers with some chance in them lead where greedy ones never go, which keeps a drafter from
    being lost after a token it did not expect. `quote`: folders to quote from, besides Python's.
    """

    target: str
    out: Path
    tokens: int
    max_tokens: int
    minutes: float | None
    users: int
    seed: int
    device: str | None
    code: float = 0.6
    greedy: float = 0.7
    quote: tuple[Path, ...] = ()


class Maker:
    """Asks in rounds: first about what people wrote, then about the answers."""

    def __init__(self, llm: LLM, wish: Wish, shelf: Shelf) -> None:
        self._llm, self._wish, self._shelf = llm, wish, shelf
        self._longest = min(2048, llm.loaded.config.max_context - wish.max_tokens)
        self._held = Held(lab_texts())
        self._ahead = _AHEAD if wish.users >= _MANY else 1
        self._own: tuple[int, list[Asked]] = (-1, [])

    def round(self, turn: int) -> list[Text]:
        """Texts of a few waves; the same ones for the same seed, turn and options."""
        size = _WAVES * self._wish.users
        rng = random.Random(f"texts/{self._wish.seed}/{turn}")
        first = self._first(rng, size, turn)
        told, texts = self._answers(first, rng)
        follow = self._follow(rng, told, max(1, round(_FOLLOWED * size)))
        return texts + (self._answers(follow, rng)[1] if follow else [])

    def _first(self, rng: random.Random, size: int, turn: int) -> Asked:
        parts = ((_CODE, self._wish.code), (_TALK, 1 - self._wish.code))
        count = {
            kind: round(share * of * (1 - _FOLLOWED) * size)
            for k, of in parts
            for kind, share in k.items()
        }
        block, place = divmod(turn, self._ahead)
        if self._own[0] != block:
            self._own = (block, self._made_up(block, count))
        asked = list(self._own[1][place])
        shelf = self._shelf
        # Characters: what a document may have, at three or more of them a token.
        longest = max(800, 2 * self._longest)
        makers: dict[str, Callable[[], Prompt]] = {
            "quote": lambda: requests.quoted(rng, shelf),
            "brief": lambda: orders.brief(rng),
            "task": lambda: orders.task(rng),
            "edit": lambda: requests.edit(rng, shelf),
            "code": lambda: prompts.code(rng),
            "prose": lambda: requests.document(rng, shelf, size=rng.randint(400, 2000)),
            "doc": lambda: requests.document(rng, shelf, size=rng.randint(800, longest)),
            "chat": lambda: prompts.chat(rng),
        }
        for kind, make in makers.items():
            asked += [(kind, make()) for _ in range(count[kind])]
        return asked

    def _made_up(self, block: int, count: dict[str, int]) -> list[Asked]:
        """Prompts by the target itself, for each round of a block, from shuffled openings."""
        rng = random.Random(f"texts/{self._wish.seed}/own/{block}")
        seeds = prompts.seeds()
        wanted: tuple[tuple[str, str, list[str], int], ...] = (
            ("own chat", "chat", [""], _SHORT),
            ("own code", "code", seeds["code"]["openings"], _SHORT),
            ("long chat", "chat", seeds["long"]["chat"], _LONG),
            ("long code", "code", seeds["long"]["code"], _LONG),
        )
        asked: Asked = []
        for what, kind, openings, most in wanted:
            if count[what]:
                made = self_prompts(
                    self._llm,
                    count[what] * self._ahead,
                    seed=rng.getrandbits(30),
                    openings=rng.sample(openings, len(openings)),
                    max_tokens=most,
                )
                asked += [(kind, p) for p in made]
        rng.shuffle(asked)
        return [asked[place :: self._ahead] for place in range(self._ahead)]

    def _follow(self, rng: random.Random, told: list[tuple[str, str]], count: int) -> Asked:
        asked: Asked = []
        for kind, answer in rng.sample(told, len(told)):
            what = rng.choice(_FOLLOW)
            if what == "edit":
                found = prompts.edit(rng, answer)
            elif kind in _ABOUT_CODE:
                what, found = "code", prompts.about_code(rng, answer)
            else:
                what, found = "chat", prompts.about_text(rng, answer)
            if found is not None:
                asked.append((what, found))
        return asked[:count]

    def _answers(
        self, asked: Asked, rng: random.Random
    ) -> tuple[list[tuple[str, str]], list[Text]]:
        """Kind and answer of each, and the texts; in waves, so that a GPU's steps stay full."""
        ids = [(kind, self._llm.encode(_salted(p, rng))) for kind, p in asked if self._fresh(p)]
        ids = [(kind, tokens) for kind, tokens in ids if len(tokens) <= self._longest]
        rng.shuffle(ids)
        told, texts = [], []
        for start in range(0, len(ids), self._wish.users):
            wave = ids[start : start + self._wish.users]
            params = [self._params(rng) for _ in wave]
            done = self._llm.generate([tokens for _, tokens in wave], params)
            for (kind, tokens), answer in zip(wave, done, strict=True):
                own = without_loop(answer.token_ids)
                if len(own) == len(answer.token_ids):  # nobody asks about a loop
                    told.append((kind, answer.text))
                if len(own) > 1:
                    texts.append(text_of(tokens, own, kind))
        return told, texts

    def _params(self, rng: random.Random) -> SamplingParams:
        law: dict[str, Any] = {}
        if rng.random() >= self._wish.greedy:
            law = MILD if rng.random() < _MILD else VARIED
        return SamplingParams(max_tokens=self._wish.max_tokens, seed=rng.getrandbits(31), **law)

    def _fresh(self, prompt: Prompt) -> bool:
        """Whether a prompt has no eight words in a row of those that drafters are measured with."""
        messages: list[Any] = list(prompt)
        return not any(self._held.shares(str(message["content"])) for message in messages)


def lab_texts() -> list[str]:
    """What no training prompt may share eight words with: every prompt that is written by hand, and
    some of each kind that is generated.
    """
    found = [*pool("chat"), *pool("code")]
    found += load("edit", seed=0, count=100, count_tokens=len)
    found += [p for p, _ in json_tasks(seed=0, count=40)]
    found += load("doc", seed=0, count=12, tokens=6000, count_tokens=len)
    return [message["content"] for p in found for message in p.messages or ()]


def _salted(prompt: Prompt, rng: random.Random) -> Prompt:
    """Half of the prompts begin as the lab's do, with a ticket that no other request has."""
    messages: list[Any] = list(prompt)
    if rng.random() < 0.5:
        return messages
    ticket = f"[ticket {rng.getrandbits(24):06x}]\n"
    return [{**messages[0], "content": ticket + messages[0]["content"]}, *messages[1:]]
