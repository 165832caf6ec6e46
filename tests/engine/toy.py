"""A toy target: logits are a function of the prefix, and the prefix is read back from the pages.

Nothing is passed around the page table, so a wrong page, a stale entry or a position off by one
changes the output.
"""

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch

from slipstream.cache.pages import PagePool
from slipstream.control.static import StaticController
from slipstream.engine.engine import Engine
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.target.target import ForwardOutput
from slipstream.types import Completion, Draft, OneHot, SamplingParams

EMPTY = -7


def hashed_logits(vocab: int, *, seed: int = 0, scale: float = 2.0) -> Callable:
    """Random-looking logits keyed by the whole prefix."""

    @functools.cache
    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        key = hash((seed, prefix)) & 0xFFFFFFFF
        return np.random.default_rng(key).normal(0, scale, vocab)

    return logits


def counting_logits(vocab: int) -> Callable:
    """The next token is the last one plus one (mod vocab), by a margin of 10."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        out = np.zeros(vocab)
        out[(prefix[-1] + 1) % vocab] = 10.0
        return out

    return logits


class ToyTarget:
    """Stands where `Target` stands; `cells` is the paged cache, one token id a position."""

    def __init__(self, logits_of, *, vocab=32, num_pages=64, page_size=4, max_context=256):
        self.config = SimpleNamespace(vocab_size=vocab, max_context=max_context, eos_ids=())
        self.pool = PagePool(num_pages, page_size)
        self.cells = np.full(num_pages * page_size, EMPTY, np.int64)
        self.logits_of = logits_of
        self.forwards = 0
        self.fed = []

    def _cell(self, pages: Sequence[int], position: int) -> int:
        size = self.pool.page_size
        return pages[position // size] * size + position % size

    def prefix(self, pages: Sequence[int], length: int) -> tuple[int, ...]:
        """Tokens the pages hold for positions 0..length-1."""
        return tuple(int(self.cells[self._cell(pages, i)]) for i in range(length))

    def forward(self, rows) -> ForwardOutput:
        self.forwards += 1
        out = []
        self.fed.append(sum(len(r.tokens) for r in rows))
        for row in rows:
            for j, token in enumerate(row.tokens):
                self.cells[self._cell(row.pages, row.start + j)] = token
            for j in range(len(row.tokens) - row.logits, len(row.tokens)):
                prefix = self.prefix(row.pages, row.start + j + 1)
                assert EMPTY not in prefix, "a position was read before it was written"
                out.append(self.logits_of(prefix))
        logits = np.array(out, np.float32).reshape(len(out), self.config.vocab_size)
        return ForwardOutput(torch.from_numpy(logits), None)


class Oracle:
    """Drafts what `next_of(prefix)` says comes next, every `wrong_every`-th token spoiled."""

    needs = ()

    def __init__(self, next_of, draft_len, *, wrong_every=0, vocab=32):
        self.name = f"oracle:{draft_len}"
        self.max_draft_len = draft_len
        self._next_of, self._wrong, self._vocab = next_of, wrong_every, vocab
        self._count = 0
        self.opened, self.closed = [], []

    def open(self, rows):
        self.opened += [r.request_id for r in rows]

    def draft(self, rows, draft_lens):
        width = int(max(draft_lens, default=0))
        tokens = np.full((len(rows), width), -1, np.int64)
        for i, row in enumerate(rows):
            prefix = tuple(row.tokens)
            for j in range(int(draft_lens[i])):
                token = self._next_of(prefix)
                self._count += 1
                if self._wrong and self._count % self._wrong == 0:
                    token = (token + 1) % self._vocab
                tokens[i, j] = token
                prefix += (token,)
        return Draft(tokens, np.asarray(draft_lens, np.int64), OneHot())

    def advance(self, rows, verdict):
        assert len(rows) == len(verdict.accepted)

    def close(self, request_ids):
        self.closed += request_ids

    def reset(self):
        self._count = 0


def argmax_of(logits_of):
    """The greedy continuation of a prefix under `logits_of`."""
    return lambda prefix: int(np.argmax(np.float32(logits_of(prefix))))


def toy_engine(logits_of, drafter, *, vocab=32, eos=(), **kwargs) -> Engine:
    target_keys = {"num_pages", "page_size", "max_context"}
    target = ToyTarget(
        logits_of, vocab=vocab, **{k: v for k, v in kwargs.items() if k in target_keys}
    )
    return Engine(
        target,
        drafter,
        StaticController(drafter.max_draft_len, max_context=target.config.max_context),
        vocabulary=Vocabulary(size=vocab, eos_ids=tuple(eos)),
        tokenizer=None,
        **{k: v for k, v in kwargs.items() if k not in target_keys},
    )


def run(engine: Engine, jobs: Sequence[tuple[Sequence[int], SamplingParams]]) -> list[Completion]:
    """Submit everything at once and step until all is done; completions in job order."""
    ids = [engine.submit(list(prompt), params) for prompt, params in jobs]
    done = {}
    for _ in range(10_000):
        if not engine.has_work:
            break
        for output in engine.step():
            if output.completion:
                done[output.request_id] = output.completion
    return [done[i] for i in ids]
