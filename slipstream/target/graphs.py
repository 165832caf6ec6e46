"""A decoding step as one CUDA graph: draft, verify, choose and accept, nothing in between.

A graph is captured for each size it is asked for. Its inputs are the tables of `Slots`; the host
replays it and reads what was committed one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.cuda.attention import Tiles
from slipstream.models.cuda.layers import Flat, logits, run_layers
from slipstream.models.dense import Model
from slipstream.sampling.fused import Chooser
from slipstream.sampling.uniforms import Purpose
from slipstream.target.device import scratch_of, splits_for
from slipstream.target.slots import Slots, prepare


class DeviceDrafter(Protocol):
    """A drafter's form on the device: fills `drafts` and `counts` without the host.

    `needs`: target layer outputs it takes in from the step before: when it is enqueued, row i of
    `Step.features` is what the target saw at `positions[i]`, in the cache at `cells[i]`; a cell of
    -1 is nothing to take in. Rows of rejected drafts are among them, behind the row's tokens.
    """

    needs: tuple[int, ...]

    def enqueue(self, step: Step) -> None:
        """Launch the drafting of one step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a graph is captured for. `forced`: mean accepted tokens a row-step where acceptance is
    synthetic (a lossy class of its own, for cost measurements only), else None.
    """

    rows: int
    draft_len: int
    sampled: bool
    forced: float | None = None


class Step:
    """Buffers and launches of one step of a given shape; `capture` makes it one graph."""

    def __init__(
        self,
        model: Model,
        storage: Sequence[Tensor],
        slots: Slots,
        shape: StepShape,
        *,
        drafter: DeviceDrafter | None,
    ) -> None:
        self.shape = shape
        self.slots, self._model, self._storage = slots, model, storage
        self._drafter = drafter
        rows, width, device = shape.rows, shape.draft_len + 1, model.device
        config = model.config

        def buffer(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.slot_of = torch.full((rows,), slots.count, dtype=torch.int32, device=device)
        self.drafts, self.counts = buffer(rows, max(1, shape.draft_len)), buffer(rows)
        self.result = buffer(rows, width + 2)
        self._ids = buffer(rows * width, dtype=torch.int64)
        self.positions = buffer(rows * width)
        self.cells = torch.full((rows * width,), -1, dtype=torch.int32, device=device)
        needs = drafter.needs if drafter is not None else ()
        self.features = torch.zeros(
            rows * width, len(needs), config.hidden_size, dtype=model.dtype, device=device
        )
        """Outputs of the layers `needs`, of the step before, at its `positions` and `cells`."""
        self._chooser = Chooser(rows, width, vocab=config.vocab_size, device=device)
        self._graph: Any = None
        splits = splits_for(rows * config.num_kv_heads, device)
        tiles = Tiles(
            row=self.slot_of,
            first=buffer(rows),
            start=slots.start,
            length=slots.length,
            token=slots.token,
            pages=slots.pages,
            tokens=width,
            splits=splits,
        )
        scratch = scratch_of(tiles, config, device)
        self._flat = Flat(self.positions, self.cells, tiles, scratch, slots.page_size)

    @property
    def drafts_here(self) -> bool:
        """Whether the step drafts by itself."""
        return self._drafter is not None

    def launch(self) -> None:
        """Enqueue the step: the captured graph, or launch by launch before `capture`."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self._enqueue()

    def capture(self) -> None:
        """Record the launches. All rows must be nobody's: a warm-up run commits nothing then."""
        self.slot_of.fill_(self.slots.count)
        self._graph = capture(self._enqueue)

    def _enqueue(self) -> None:
        self.enqueue_draft()
        self.enqueue_accept(self.enqueue_verify())

    def enqueue_draft(self) -> None:
        """Launch the drafting, if it is done here. Synthetic acceptance needs drafts to accept, so
        then a row without any gets `draft_len` of token 0.
        """
        if self._drafter is not None:
            self._drafter.enqueue(self)
        if self.shape.forced is not None:
            self.drafts.clamp_(min=0)
            self.counts.fill_(self.shape.draft_len)

    def enqueue_verify(self) -> Tensor:
        """Launch the target over anchors and drafts; logits [rows * (draft_len + 1), vocab]."""
        prepare(
            self.slots,
            self.slot_of,
            drafts=self.drafts,
            counts=self.counts,
            ids=self._ids,
            positions=self.positions,
            cells=self.cells,
        )
        x = F.embedding(self._ids, self._model.embedding)
        needs = self._drafter.needs if self._drafter is not None else ()
        hidden, tapped = run_layers(self._model, x, self._flat, self._storage, needs)
        if needs:
            torch.stack(tapped, 1, out=self.features)
        return logits(self._model, hidden)

    def enqueue_accept(self, scores: Tensor) -> None:
        """Launch the choice of tokens and their commitment."""
        slots, slot_of = self.slots, self.slot_of
        salt = Purpose.NEXT.value if self.shape.sampled else 0
        self._chooser.choose(
            scores,
            slot_of=slot_of,
            row_start=slots.start,
            knobs=slots.knobs,
            salt=salt,
        )
        self._chooser.accept(
            self._ids,
            slot_of=slot_of,
            row_start=slots.start,
            row_length=slots.length,
            knobs=slots.knobs,
            tokens=slots.tokens,
            lengths=slots.lengths,
            result=self.result,
            sampled=self.shape.sampled,
            forced=self.shape.forced,
        )


def capture(enqueue: Callable[[], Any], *, pool: Any = None) -> Any:
    """The launches of `enqueue` as a `torch.cuda.CUDAGraph`, after a run that compiles them.

    `pool`: a `torch.cuda.graph_pool_handle` that graphs share of which no two ever run at once and
    whose results lie elsewhere; None for memory of its own.
    """
    stream = _beside(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        enqueue()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        enqueue()
    return graph


@cache
def _beside(device: int) -> torch.cuda.Stream:
    """The stream of the runs that compile: cuBLAS keeps a work space for every one it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
