"""`slipstream texts`: a target's answers to prompts of many kinds, for `slipstream train`."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

import torch

from slipstream.engine import LLM
from slipstream.errors import InvalidConfig
from slipstream.texts_maker import Maker, Wish
from slipstream.train.data import Text
from slipstream.train.quotes import Shelf, shelf
from slipstream.train.shards import make_folder, own_tokens, resumed, write_shard

Say = Callable[[str], None]

_BETWEEN, _RESERVED = 30.0, 20
"""Seconds between writes of a shard, and how many times what a write took must lie between."""


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
    for name, share in (("code", wish.code), ("greedy", wish.greedy)):
        if not 0 <= share <= 1:
            raise InvalidConfig(f"{name} is {share}; allowed: 0 to 1, a share.")
    quotes = shelf(wish.quote)
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
    _Making(llm, wish, quotes, say).run()


class _Making:
    """Makes rounds of texts and writes them as it goes; an interrupted one is gone on with."""

    def __init__(self, llm: LLM, wish: Wish, quotes: Shelf, say: Say) -> None:
        self._llm, self._wish, self._shelf, self._say = llm, wish, quotes, say
        self._how = {
            "seed": wish.seed,
            "max_tokens": wish.max_tokens,
            "users": wish.users,  # as are prompts a round
            "code": wish.code,
            "greedy": wish.greedy,
            "quotes": quotes.digest,
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
        maker = Maker(self._llm, self._wish, self._shelf)
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

    def _round(self, maker: Maker) -> list[Text]:
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
