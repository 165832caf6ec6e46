"""The target: one forward over ragged rows, prompt chunks and verify rows alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.cache.pages import PagePool
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.config import ModelConfig
from slipstream.models.loading import LoadedModel
from slipstream.target.batch import Placement, lay_out, place

if TYPE_CHECKING:
    from slipstream.target.padded import PaddedTarget

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ForwardRow:
    """Tokens of one request to run: they sit at positions `start`, `start + 1`, ...

    `pages` is the request's page table and covers `start + len(tokens)` positions; everything
    before `start` is in the cache. `logits`: how many of the last positions want logits.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    logits: int


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """`logits` [sum(row.logits), vocab] in the model's dtype, rows in the order given, positions
    ascending. `features` [total tokens, taps, hidden] in the same order, or None without taps.
    `broken`: rows with a token whose hidden state was not finite; its cache entries are zeroed, so
    the row must not go on.
    """

    logits: Tensor
    features: Tensor | None
    broken: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Launched:
    """A forward that may still run. `total`: the sum of its hidden states, finite if all are."""

    rows: Sequence[ForwardRow]
    flat: _Flat
    logits: Tensor
    features: Tensor | None
    total: Tensor


class Target:
    """A model with a KV pool of its own. Several targets may share one `LoadedModel`'s weights.

    `taps`: which hidden states to return as features (0 the embeddings, i + 1 the output of layer i
    before the final norm). `ahead[i]`: in layer i every token sees its own row to the end, as
    drafters that denoise a block want it; empty: in none. Memory for keys and values is zero pages
    until it is used, so a large pool costs nothing. Raises `ModelError` if it cannot even be
    reserved.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_pages: int,
        page_size: int = 16,
        taps: tuple[int, ...] = (),
        ahead: tuple[bool, ...] = (),
    ) -> None:
        self.loaded = loaded
        self.config: ModelConfig = loaded.model.config
        bad = [t for t in taps if not 0 <= t <= self.config.num_layers]
        if bad:
            raise InvalidConfig(
                f"Feature tap {bad[0]} does not exist; this model has taps 0 to "
                f"{self.config.num_layers}."
            )
        self.taps, self.ahead = taps, ahead
        self.forwards = 0
        self._model = loaded.model
        self.storage = _storage(
            self.config, num_pages * page_size, self._model.dtype, self._model.device
        )
        """One [slots, 2 * kv_heads, head_dim] tensor a layer: keys, then values."""
        self.pool = PagePool(num_pages, page_size)
        if self._model.device.type != "cpu":
            require_kernel_shape(self.config)
        self.kernels = self._model.device.type != "cpu"
        """Whether forwards run through the Triton kernels (in tests also on a CPU)."""
        self._padded: PaddedTarget | None = None

    def forward(self, rows: Sequence[ForwardRow]) -> ForwardOutput:
        """Run all rows at once, write their keys and values, return logits and features.

        Each token sees exactly the cached positions before it and the earlier tokens of its own
        row: what one-by-one decoding would have seen.
        """
        return self.settle(self.launch(rows))

    @torch.inference_mode()
    def launch(self, rows: Sequence[ForwardRow]) -> Launched:
        """Enqueue a forward; before the next one is launched, it has to be settled."""
        if not rows:
            raise ValueError("a forward needs at least one row")
        self.forwards += 1
        flat = self._run_device(rows) if self.kernels else self._run_cpu(rows)
        logits, features = self._read(rows, flat)
        return Launched(rows, flat, logits, features, flat.hidden.sum(dtype=torch.float32))

    @torch.inference_mode()
    def settle(self, launched: Launched) -> ForwardOutput:
        """What a launched forward gave; waits for the device."""
        flat, logits, features = launched.flat, launched.logits, launched.features
        if bool(torch.isfinite(launched.total)):
            return ForwardOutput(logits, features)
        if not self.kernels:
            # Rows at equal strides are viewed across each other's pages, hidden by a mask that
            # multiplies by zero: a NaN gets through. Alone, a row sees its own positions only.
            flat = self._run_cpu(launched.rows, alone=True)
            logits, features = self._read(launched.rows, flat)
        return ForwardOutput(logits, features, self._wipe(flat))

    def pads(self, tokens: int) -> bool:
        """Whether forwards of so many tokens run padded: launching them is what takes time."""
        return self._padded is not None and tokens <= self._padded.padded.largest

    @property
    def positions(self) -> int:
        """How far a request's cache can reach."""
        return min(self.pool.num_pages * self.pool.page_size, self.config.max_context)

    def pad(self, *, rows: int, tokens: int) -> None:
        """From now on kernels run forwards of up to so many rows and tokens padded to a few sizes,
        on CUDA each one graph (`target.padded`); with 0 tokens none.
        """
        from slipstream.target.padded import PaddedTarget

        pool = self.pool
        self._padded = PaddedTarget(
            self._model,
            self.storage,
            page_size=pool.page_size,
            positions=self.positions,
            rows=rows,
            tokens=tokens,
            taps=self.taps,
            ahead=self.ahead,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """On an accelerator: compile and capture everything now. Only before there are requests."""
        from slipstream.target.device import warm_up

        warm_up(self._model, storage=self.storage, page_size=self.pool.page_size)
        self._logits(self._model.embedding[:1])
        if self._padded is not None:
            self._padded.padded.warm_up()

    def _read(self, rows: Sequence[ForwardRow], flat: _Flat) -> tuple[Tensor, Tensor | None]:
        """Logits where they are wanted, and features, in the rows' order."""
        wanted = np.concatenate(
            [own[len(own) - row.logits :] for row, own in zip(rows, flat.order, strict=True)]
        )
        features = flat.features
        if features is not None:
            features = _take(features, np.concatenate(flat.order))
        return self._logits(_take(flat.hidden, wanted)), features

    def _logits(self, hidden: Tensor) -> Tensor:
        if not self.kernels:
            return self._model.logits(hidden)
        from slipstream.models.cuda.layers import logits

        return logits(self._model, hidden)

    def _run_device(self, rows: Sequence[ForwardRow]) -> _Flat:
        from slipstream.target.device import run_rows

        lengths = [len(row.tokens) for row in rows]
        ends = np.cumsum(lengths)
        order = [np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)]
        ids = [t for row in rows for t in row.tokens]
        placed = [Placement(n, row.start, row.pages) for n, row in zip(lengths, rows, strict=True)]
        if self._padded is not None:
            found = self._padded.run(ids, placed)
            if found is not None:
                hidden, features, slots = found
                return _Flat(hidden, features, slots, order)
        hidden, tapped, slots = run_rows(
            self._model,
            ids,
            placed,
            storage=self.storage,
            page_size=self.pool.page_size,
            taps=self.taps,
            ahead=self.ahead,
        )
        return _Flat(hidden, _stacked(tapped), slots, order)

    def _run_cpu(self, rows: Sequence[ForwardRow], *, alone: bool = False) -> _Flat:
        size = self.pool.page_size
        placed = [
            place(i, len(row.tokens), row.start, row.pages, size) for i, row in enumerate(rows)
        ]
        device, model = self._model.device, self._model
        flat = lay_out(placed, self.config, model.dtype, device, ahead=self.ahead, alone=alone)
        ids = torch.tensor([t for p in flat.rows for t in rows[p.order].tokens], device=device)
        at = torch.from_numpy(flat.positions).to(device)
        hidden, tapped = model.hidden(
            ids,
            model.rope.rows(at, int(flat.positions.max())),
            storage=self.storage,
            slots=flat.slots,
            plans=flat.plans,
            plan_of=flat.plan_of,
            taps=self.taps,
        )
        return _Flat(hidden, _stacked(tapped), flat.slots, flat.order)

    def read_cache(self, pages: Sequence[int], tokens: int) -> Tensor:
        """Keys and values of the first `tokens` positions: [layers, tokens, 2 * kv_heads,
        head_dim].

        Keys come first along dimension 2, rotated. For tests and inspection: it copies.
        """
        p = place(0, tokens, 0, pages, self.pool.page_size)
        slots = torch.from_numpy(p.own_slots()).to(self._model.device)
        return torch.stack([layer.index_select(0, slots) for layer in self.storage])

    def _wipe(self, flat: _Flat) -> frozenset[int]:
        """Zero the entries of tokens whose hidden state is NaN or infinite, for whoever is padded
        across their pages later. A token sees itself, so broken entries show in its hidden state.
        Returns the rows that had such tokens.
        """
        broken = ~torch.isfinite(flat.hidden).all(-1)
        slots = flat.slots[broken].long()
        for layer in self.storage:
            layer.index_fill_(0, slots, 0.0)
        bad = broken.cpu().numpy()
        return frozenset(i for i, own in enumerate(flat.order) if bad[own].any())


def require_kernel_shape(config: ModelConfig) -> None:
    """Raise `ModelError` for a head size that the attention kernel cannot tile."""
    dim = config.head_dim
    if dim < 16 or dim & (dim - 1):
        raise ModelError(
            f"head_dim is {dim}; on a GPU it must be a power of two from 16. Use device='cpu'."
        )


@dataclass(frozen=True, slots=True)
class _Flat:
    """What a run over the flat batch gave. `order[i]`: where the caller's row i lies in it."""

    hidden: Tensor
    features: Tensor | None
    slots: Tensor
    order: list[Index]


def _storage(
    config: ModelConfig, slots: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One [slots, 2 * kv_heads, head_dim] view a layer, of one allocation with room behind the end:
    a segment of rows at equal strides may be viewed past the last row's own pages.
    """
    shape = (config.num_layers * slots + config.max_context, 2 * config.num_kv_heads)
    size = (*shape, config.head_dim)
    try:
        if device.type == "cpu":
            # calloc: the operating system hands out zero pages when they are touched.
            count = math.prod(size) * dtype.itemsize
            whole = torch.from_numpy(np.zeros(count, np.uint8)).view(dtype).view(size)
        else:
            whole = torch.zeros(size, dtype=dtype, device=device)
    except (MemoryError, RuntimeError, ValueError) as error:  # the last for absurd sizes
        gigabytes = math.prod(size) * dtype.itemsize / 2**30
        raise ModelError(
            f"A cache of {slots} tokens needs {gigabytes:.1f} GiB, more than there is; use fewer."
        ) from error
    return [whole[i * slots : (i + 1) * slots] for i in range(config.num_layers)]


def _stacked(tapped: Sequence[Tensor]) -> Tensor | None:
    """[tokens, taps, hidden] of the taps, None without any."""
    return torch.stack(list(tapped), 1) if tapped else None


def _take(x: Tensor, index: Index) -> Tensor:
    """x[index] along dimension 0, without a copy where the index is all of it in order."""
    if len(index) == x.shape[0] and bool((index == np.arange(len(index))).all()):
        return x
    return x.index_select(0, torch.from_numpy(index).to(x.device, non_blocking=True))
