"""Who takes part in the next step: decode rows, prompt chunks, admission, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from slipstream.cache.pages import PagePool
from slipstream.engine.sequence import Sequence
from slipstream.types import FinishReason


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of a prompt (or of a preempted request's tokens) to be put in the cache this step.

    `ends_prompt`: it reaches the last committed token, so that a next token is due.
    """

    row: Sequence
    length: int
    ends_prompt: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work. `decoding` rows hold an anchor each; `chunks` share the same forward."""

    decoding: list[Sequence]
    chunks: list[Chunk]

    @property
    def in_order(self) -> list[Chunk]:
        """Chunks as a forward takes them: those that end a prompt first."""
        return sorted(self.chunks, key=lambda c: not c.ends_prompt)

    @property
    def ending(self) -> list[Sequence]:
        """Rows whose prompt ends in this step."""
        return [c.row for c in self.chunks if c.ends_prompt]

    @property
    def rows(self) -> list[Sequence]:
        """Rows that get a next token: decoding first, then those whose prompt ends."""
        return self.decoding + self.ending


class Scheduler:
    """Continuous batching over a page pool: first come, first served; the latest is preempted."""

    def __init__(
        self,
        pool: PagePool,
        *,
        max_users: int,
        prefill_chunk: int,
        prefix_cache: bool,
        spare_pages: int = 0,
        on_preempt: Callable[[Sequence], None],
    ) -> None:
        self._pool = pool
        self._max_users = max_users
        self.prefill_chunk = prefill_chunk
        self._prefix_cache, self._spare_pages = prefix_cache, spare_pages
        self._on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.exhausted: list[Sequence] = []
        self.preemptions = 0

    def add(self, row: Sequence) -> None:
        """Queue a request."""
        self.waiting.append(row)

    def remove(self, row: Sequence) -> None:
        """Take a finished or cancelled request out and give its pages back."""
        if row in self.running:
            self.running.remove(row)
        else:
            self.waiting.remove(row)
        self.release(row)

    def release(self, row: Sequence) -> None:
        """Give pages back; full pages of verified tokens stay reusable until they are needed."""
        self.publish(row)
        row.table.release()

    def publish(self, row: Sequence) -> None:
        """Offer full pages of committed, cached tokens to later requests."""
        if self._prefix_cache and row.computed:
            row.table.publish(row.tokens, row.computed)

    def schedule(self) -> Batch:
        """Pick the rows of the next step; may preempt. Rows that can never go on, because the
        whole pool is too small for them, end up in `exhausted`.
        """
        decoding = [r for r in self.decoding if self._make_room(r, len(r.tokens))]
        decoding = [r for r in decoding if r in self.running]
        return Batch(decoding, self.prompts().chunks)

    def prompts(self) -> Batch:
        """The next prompt chunks alone; lets requests in where there is room, preempts nobody."""
        chunks = self._chunks(self.prefill_chunk)
        self._admit(chunks, self.prefill_chunk - sum(c.length for c in chunks))
        return Batch([], chunks)

    @property
    def reads(self) -> bool:
        """Whether some running request's prompt is not read yet, or one waits to be let in."""
        if self.waiting and len(self.running) < self._max_users:
            return True
        return len(self.decoding) < len(self.running)

    @property
    def decoding(self) -> list[Sequence]:
        """The running rows that decode."""
        return [row for row in self.running if row.opened and row.pending == 1]

    def reserve_draft(self, row: Sequence, draft_len: int, *, reach: int = 0) -> int:
        """`draft_len` where there are pages for it, else 0: drafting never preempts.

        `reach`: positions from the anchor's on that making the draft takes, if more.
        """
        need = len(row.tokens) + max(draft_len, reach - 1)
        return draft_len if row.table.reserve(need) else 0

    def _make_room(self, row: Sequence, tokens: int) -> bool:
        """Cover `tokens` positions, preempting latest arrivals; False if the row itself went."""
        while row in self.running and not row.table.reserve(tokens):
            if self._trim_drafts(keep=row):
                continue
            victim = self.running[-1]
            if victim is row and len(self.running) == 1:
                self._exhaust(row)
                return False
            self._preempt(victim)
        return row in self.running

    def _trim_drafts(self, *, keep: Sequence) -> bool:
        """Take back pages held for rejected draft tokens; True if there were any."""
        before = self._pool.available
        for row in self.running:
            if row is not keep:
                row.table.trim(len(row.tokens))
        return self._pool.available > before

    def _exhaust(self, row: Sequence) -> None:
        row.finish_reason = FinishReason.LENGTH
        self.exhausted.append(row)

    def _preempt(self, row: Sequence) -> None:
        self.running.remove(row)
        self.release(row)
        row.computed = 0
        self._on_preempt(row)
        self.waiting.appendleft(row)
        self.preemptions += 1

    def _chunks(self, budget: int) -> list[Chunk]:
        chunks = []
        for row in self.running:
            if budget > 0 and not row.opened:
                chunks.append(_chunk(row, budget))
                budget -= chunks[-1].length
        return chunks

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        while budget > 0 and self.waiting and len(self.running) < self._max_users:
            row = self.waiting[0]
            if self._prefix_cache and row.computed == 0:
                row.computed = row.table.match(row.tokens, spare=self._spare_pages)
            if not row.table.reserve(len(row.tokens)):
                row.table.release()
                row.computed = 0
                if not self.running:
                    self._exhaust(row)
                return
            if row.cached_tokens is None:  # later, after a preemption, the pages are its own
                row.cached_tokens = row.computed
            self.waiting.popleft()
            self.running.append(row)
            chunks.append(_chunk(row, budget))
            budget -= chunks[-1].length


def _chunk(row: Sequence, budget: int) -> Chunk:
    length = min(budget, row.pending)
    return Chunk(row, length, length == row.pending)
