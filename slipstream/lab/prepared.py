"""A grid's prompts, made and checked before anything is measured."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from slipstream.errors import InvalidConfig
from slipstream.lab import gate_runner, traffic
from slipstream.lab.backends.base import Backend, TargetInfo
from slipstream.lab.grid import Cell, Grid
from slipstream.lab.prompts import Prompt
from slipstream.lab.samples import Request

TEMPLATE_TOKENS = 64  # what a chat template and a salt add to a prompt, generously
DRAFT_ROOM = 64  # positions past the answer that a draft may take

Block = tuple[str, int]
"""A cell's slug and a repeat."""


class Prepared:
    """A grid with its prompts, checked against the target before anything is measured."""

    def __init__(self, grid: Grid, backend: Backend, own: Sequence[Prompt] | None) -> None:
        self.grid, self.backend = grid, backend
        self.cells = {cell.slug: cell for cell in grid.cells}
        self.prompts = {
            cell.slug: traffic.cell_prompts(grid, cell, count_tokens=backend.count_tokens, own=own)
            for cell in grid.cells
        }
        self.gate_tasks = gate_runner.prepare(grid, backend.count_tokens, first=self._first())
        self._lengths: dict[str, int] = {}
        self.prompt_tokens = {
            slug: float(sum(map(self._length, repeats[0])))
            for slug, repeats in self.prompts.items()
        }
        for cell in grid.cells:
            self._check_room(cell, backend.info)

    @property
    def digest(self) -> str:
        """Changes with any prompt."""
        texts = [p.content() for repeats in self.prompts.values() for one in repeats for p in one]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()

    @property
    def users(self) -> int:
        """Most requests in flight at once, gates included."""
        return max(*(c.users for c in self.grid.cells), gate_runner.users(self.grid.gates), 1)

    @property
    def kv_tokens(self) -> int:
        """Room for the dearest wave, so that no arm is ever short of pages."""
        most = gate_runner.kv_tokens(self.grid.gates)
        for cell in self.grid.cells:
            lengths = sorted(map(self._length, self._all(cell)), reverse=True)[: cell.users]
            most = max(most, sum(lengths) + cell.users * (cell.max_tokens + DRAFT_ROOM))
        again, width = self.gate_tasks.control, gate_runner.control_users(self.grid.gates)
        lengths = sorted((self._length(r.prompt) for r in again), reverse=True)[:width]
        most = max(most, sum(lengths) + width * (gate_runner.longest(again) + DRAFT_ROOM))
        warmup = self.backend.count_tokens(traffic.WARMUP) + TEMPLATE_TOKENS + DRAFT_ROOM
        return max(most, self.users * (warmup + self.grid.warmup_tokens))

    def units(self, block: Block) -> list[list[Request]]:
        """Requests of a block, prompt by prompt or wave by wave."""
        slug, repeat = block
        return traffic.cell_requests(
            self.grid, self.cells[slug], repeat, self.prompts[slug][repeat]
        )

    def lint(self) -> dict[str, list[str]]:
        """Cell slug -> why its rows must not be published."""
        info = self.backend.info
        found = {c.slug: traffic.lint(self._distinct(c), info) for c in self.grid.cells}
        return {slug: reasons for slug, reasons in found.items() if reasons}

    def tokens_of(self, requests: Sequence[Request]) -> float:
        """Prompt tokens of `requests` together."""
        return float(sum(self._length(request.prompt) for request in requests))

    def _first(self) -> list[Request]:
        """Every cell's requests of the first repeat, by names that say the cell."""
        return [
            gate_runner.named(request, cell.slug)
            for cell in self.grid.cells
            for unit in self.units((cell.slug, 0))
            for request in unit
        ]

    def _all(self, cell: Cell) -> list[Prompt]:
        return [p for one in self.prompts[cell.slug] for p in one]

    def _distinct(self, cell: Cell) -> list[Prompt]:
        repeats = self.prompts[cell.slug]
        return self._all(cell) if cell.fresh_prompts else repeats[0]

    def _length(self, prompt: Prompt) -> int:
        """Tokens of a prompt, counted once."""
        text = prompt.content()
        if text not in self._lengths:
            self._lengths[text] = self.backend.count_tokens(text) + TEMPLATE_TOKENS
        return self._lengths[text]

    def _check_room(self, cell: Cell, info: TargetInfo) -> None:
        if info.context is None:
            return
        longest = max(map(self._length, self._all(cell)))
        if longest + cell.max_tokens > info.context:
            raise InvalidConfig(
                f"Cell {cell.name} needs {longest} prompt tokens and {cell.max_tokens} more, and "
                f"{info.target} holds {info.context}; lower document_tokens or max_tokens."
            )
