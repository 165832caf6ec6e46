"""`slipstream texts`: a target's answers to prompts of many kinds, for `slipstream train`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from slipstream.engine import LLM
from slipstream.engine.llm import Prompt
from slipstream.errors import InvalidConfig
from slipstream.lab.prompts import json_tasks, pool
from slipstream.lab.prompts.documents import document_prompt
from slipstream.train import prompts
from slipstream.train.data import Text, self_prompts, text_of
from slipstream.train.shards import make_folder, own_tokens, resumed, write_shard
from slipstream.types import SamplingParams

Say = Callable[[str], None]
Asked = list[tuple[str, Prompt]]

_SHARES = {
    "own chat": 0.12,
    "long chat": 0.12,
    "chat": 0.12,
    "own code": 0.08,
    "long code": 0.12,
    "code": 0.12,
    "json": 0.03,
    "doc": 0.04,
}
"""Of a round's prompts; what is left asks about the answers to these: code, texts, edits."""
_LONG = 320
"""Tokens of a long prompt: people paste what they ask about."""
_FOLLOW = ("code", "text", "edit")
_WAVES = 4
_SAMPLING: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
)
"""Drawn from: half of what is measured is greedy, the rest mild, and some of it varied."""
_BETWEEN, _RESERVED = 30.0, 20
"""Seconds between writes of a shard, and how many times what a write took must lie between."""
_SEED_OFFSET = 7_000_000
"""Documents and JSON tasks follow from a seed; the lab's grids never count this high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What to make: at least `tokens` of the target's own, or what `minutes` allow."""

    target: str
    out: Path
    tokens: int
    max_tokens: int
    minutes: float | None
    users: int
    seed: int
    device: str | None


def run_texts(wish: Wish, *, say: Say) -> None:
    """Write one shard, named after the seed; one that was interrupted is gone on with, and one that
    is complete is left as it is. Raises `InvalidConfig` for values without sense, and for a shard
    that was made otherwise.
    """
    for name, value in (("tokens", wish.tokens), ("max_tokens", wish.max_tokens)):
        if value < 2:
            raise InvalidConfig(f"{name} is {value}; allowed: 2 or more.")
    if wish.minutes is not None and wish.minutes <= 0:
        raise InvalidConfig(f"minutes is {wish.minutes}; allowed: above 0.")
    make_folder(wish.out)  # before hours of work
    device = wish.device or ("cuda" if torch.cuda.is_available() else "cpu")
    room = wish.users * (wish.max_tokens + 1024)
    llm = LLM(
        wish.target,
        drafter="ngram:3",
        dtype="bfloat16",
        device=device,
        max_users=wish.users,
        kv_tokens=room,
        prefill_chunk=4096,
    )
    _Making(llm, wish, say).run()


class _Making:
    """Makes rounds of texts and writes them as it goes; an interrupted one is gone on with."""

    def __init__(self, llm: LLM, wish: Wish, say: Say) -> None:
        self._llm, self._wish, self._say = llm, wish, say
        self._how = {
            "seed": wish.seed,
            "max_tokens": wish.max_tokens,
            "users": wish.users,  # as are prompts a round
            "sampling": list(_SAMPLING),
            "drafter": "ngram:3",
            "model": llm.loaded.name,
        }
        target = llm.loaded.fingerprint
        self._before, said = resumed(wish.out, self._name, target=target, how=self._how)
        self._first, spent = int(said.get("rounds", 0)), float(said.get("seconds", 0))
        # Rounds, not texts and a count: an interruption could come between the two.
        self._rounds: list[list[Text]] = []
        if said:
            say(f"{self._told()} are there already, of {self._first} rounds in {spent:.0f} s.")
        self._begun = time.perf_counter() - spent
        self._written, self._due = 0, 0.0

    def run(self) -> None:
        """Until there are enough, or time is over. Whatever ends it, whole rounds are kept."""
        maker = _Maker(self._llm, self._wish)
        try:
            while not self._done():
                self._rounds.append(self._round(maker))
                rate = own_tokens(self._texts()) / self._spent()
                self._say(f"{self._told()} of {self._wish.tokens:,}, {rate:,.0f} tok/s")
                if self._spent() > self._due:
                    self._write()
        finally:
            if self._written < len(self._rounds):
                self._write()
        self._say(f"{self._wish.out / self._name}.npz: {self._told()} of the target's own.")

    def _done(self) -> bool:
        minutes = self._wish.minutes
        timed_out = minutes is not None and self._spent() > 60 * minutes
        return timed_out or own_tokens(self._texts()) >= self._wish.tokens

    def _round(self, maker: _Maker) -> list[Text]:
        made = maker.round(self._first + len(self._rounds))
        if not made:
            config = self._llm.loaded.config
            raise InvalidConfig(
                f"{self._llm.loaded.name} gave no answer in a whole round; max_tokens is "
                f"{self._wish.max_tokens} of its context of {config.max_context}, try fewer."
            )
        return made

    def _write(self) -> None:
        begun, count = self._spent(), len(self._rounds)
        more = {**self._how, "rounds": self._first + count, "seconds": round(begun, 1)}
        target = self._llm.loaded.fingerprint
        write_shard(self._wish.out, self._name, self._texts(), target=target, more=more)
        self._written = count
        self._due = self._spent() + max(_BETWEEN, _RESERVED * (self._spent() - begun))

    def _spent(self) -> float:
        """Seconds, those of interrupted commands included."""
        return time.perf_counter() - self._begun

    def _told(self) -> str:
        texts = self._texts()
        return f"{len(texts)} texts, {own_tokens(texts):,} tokens"

    def _texts(self) -> list[Text]:
        return [*self._before, *chain.from_iterable(self._rounds)]

    @property
    def _name(self) -> str:
        return f"texts-{self._wish.seed}"


class _Maker:
    """Asks in rounds: first about topics, then about the answers."""

    def __init__(self, llm: LLM, wish: Wish) -> None:
        self._llm, self._wish = llm, wish
        self._longest = min(2048, llm.loaded.config.max_context - wish.max_tokens)
        self._held = {prompts.same(p.content()) for kind in ("chat", "code") for p in pool(kind)}

    def round(self, turn: int) -> list[Text]:
        """Texts of a few waves."""
        size = _WAVES * self._wish.users
        rng = random.Random(f"texts/{self._wish.seed}/{turn}")
        first = self._first(rng, size, self._wish.seed * 1_000_000 + turn * size * 8)
        told, texts = self._answers(first, rng)
        follow = self._follow(rng, told, size - len(first))
        return texts + (self._answers(follow, rng)[1] if follow else [])

    def _first(self, rng: random.Random, size: int, seed: int) -> Asked:
        count = {kind: max(1, round(share * size)) for kind, share in _SHARES.items()}
        own, llm = seed + _SEED_OFFSET, self._llm
        asked: Asked = [("chat", p) for p in self_prompts(llm, count["own chat"], seed=seed)]
        openings = list(prompts.seeds()["code"]["openings"])
        rng.shuffle(openings)
        made = self_prompts(llm, count["own code"], seed=seed + 5 * size, openings=openings)
        asked += [("code", p) for p in made]
        for kind in ("chat", "code"):
            openings = list(prompts.seeds()["long"][kind])
            rng.shuffle(openings)
            made = self_prompts(
                llm,
                count[f"long {kind}"],
                seed=rng.getrandbits(30),
                openings=openings,
                max_tokens=_LONG,
            )
            asked += [(kind, p) for p in made]
        asked += [("chat", prompts.chat(rng)) for _ in range(count["chat"])]
        asked += [("code", prompts.code(rng)) for _ in range(count["code"])]
        asked += [
            ("json", _messages(p)) for p, _ in json_tasks(seed=own, count=min(count["json"], 40))
        ]
        for index in range(count["doc"]):
            length = rng.randint(320, max(320, self._longest * 3 // 4))
            made_up = document_prompt(
                seed=own, index=index, tokens=length, count_tokens=self._count
            )
            asked.append(("doc", _messages(made_up)))
        return asked

    def _follow(self, rng: random.Random, told: list[tuple[str, str]], count: int) -> Asked:
        asked: Asked = []
        for kind, answer in rng.sample(told, len(told)):
            what = rng.choice(_FOLLOW)
            if what == "edit":
                found = prompts.edit(rng, answer)
            elif kind == "code":
                found = prompts.about_code(rng, answer)
            else:
                found = prompts.about_text(rng, answer)
            if found is not None:
                asked.append(("edit" if what == "edit" else kind, found))
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
                if len(answer.token_ids) > 1:
                    told.append((kind, answer.text))
                    texts.append(text_of(tokens, answer.token_ids, kind))
        return told, texts

    def _params(self, rng: random.Random) -> SamplingParams:
        law: dict[str, Any] = rng.choice(_SAMPLING)
        return SamplingParams(max_tokens=self._wish.max_tokens, seed=rng.getrandbits(31), **law)

    def _fresh(self, prompt: Prompt) -> bool:
        """Whether a prompt is none of those that drafters are measured with."""
        messages: list[Any] = list(prompt)
        return prompts.same(str(messages[-1]["content"])) not in self._held

    def _count(self, text: str) -> int:
        return len(self._llm.tokenizer(text, add_special_tokens=False).input_ids)


def _salted(prompt: Prompt, rng: random.Random) -> Prompt:
    """Half of the prompts begin as the lab's do, with a ticket that no other request has."""
    messages: list[Any] = list(prompt)
    if rng.random() < 0.5:
        return messages
    ticket = f"[ticket {rng.getrandbits(24):06x}]\n"
    return [{**messages[0], "content": ticket + messages[0]["content"]}, *messages[1:]]


def _messages(prompt: Any) -> list[dict[str, str]]:
    found: Sequence[Any] = prompt.messages
    return [dict(m) for m in found]
