"""Chain drafting (EAGLE-3, MTP heads) inside a captured step: the passes of `drafters.chain`.

A step first runs the layers over all positions of the step before, rejected ones included: what
these leave is overwritten when their positions are fed again, and of each row only the output at
its last committed position is kept. It stays on the device from step to step, by slot. Then it
drafts greedily, one position a row and pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.attention import Tiles
from slipstream.models.cuda.chain import ChainKernels
from slipstream.models.cuda.launch import overlap, wait
from slipstream.models.cuda.layers import Flat, product
from slipstream.sampling.fused import Chooser
from slipstream.target.device import scratch_of, splits_for
from slipstream.target.graphs import Step
from slipstream.types import Row


class Ready(Protocol):
    """A state that the host made; see `drafters.chain`."""

    @property
    def tokens(self) -> int:
        """The row's length it belongs to."""
        ...

    @property
    def state(self) -> Tensor:
        """[hidden]."""
        ...


class ChainForm:
    """What passes of every size share. `states` [slots + 1, hidden]: the output at a slot's last
    position with features; `ready` int32 [slots + 1]: how long its text was then, -1 for never. A
    row whose text is longer drafts nothing until features come.

    `storage`: keys and values at the target's slots, one tensor a layer, shared with the host's
    own passes; `known` the states these made, by request.
    """

    def __init__(
        self,
        kernels: ChainKernels,
        *,
        needs: tuple[int, ...],
        draft_len: int,
        storage: Sequence[Tensor],
        known: dict[int, Any],
        slots: int,
    ) -> None:
        self.kernels, self.needs, self.draft_len, self.storage = kernels, needs, draft_len, storage
        self._known = known
        model = kernels.model
        self.max_context = model.config.max_context
        self.states = torch.zeros(
            slots + 1, model.config.hidden_size, dtype=model.dtype, device=model.device
        )
        self.ready = torch.full((slots + 1,), -1, dtype=torch.int32, device=model.device)

    def sized(self, rows: int, device: Any) -> ChainPass:
        """The launches for so many rows."""
        return ChainPass(self, rows, device)

    def entered(self, rows: Sequence[Row], slots: Sequence[int]) -> None:
        """Rows that take a slot: what the host knows of them."""
        if not rows:
            return
        found: list[Ready | None] = [self._known.get(row.request_id) for row in rows]
        lengths = [ready.tokens if ready is not None else -1 for ready in found]
        sent = torch.tensor([list(slots), lengths]).to(self.states.device, non_blocking=True)
        at = sent[0]
        self.ready[at] = sent[1].int()
        nothing = self.states.new_zeros(self.states.shape[1])
        self.states[at] = torch.stack([r.state if r is not None else nothing for r in found])


class ChainPass:
    """The drafting of a step for `rows` rows: up to `draft_len` tokens each, greedy."""

    def __init__(self, form: ChainForm, rows: int, device: torch.device) -> None:
        self.needs = form.needs
        self._form, self._rows = form, rows
        count = rows * (form.draft_len + 1)

        def buffer(*size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._after = buffer(count, dtype=torch.int64)
        self._picked, self._first = buffer(rows), buffer(rows)
        self._token = buffer(rows, dtype=torch.int64)
        self._positions, self._cells = buffer(rows), buffer(rows)
        self._current = torch.empty(
            rows, form.states.shape[1], dtype=form.states.dtype, device=device
        )
        head = form.kernels.model.head.weight
        self._chooser = Chooser(rows, 1, vocab=len(head), device=device)
        self._flats: tuple[Step, Flat, Flat] | None = None

    def enqueue(self, step: Step) -> None:
        """Launch all passes; `step.features` are of the step before."""
        taken, one = self._laid_out(step)
        self._take_in(step, taken)
        kernels, states = self._form.kernels, self._current
        self._choose(step, kernels.read(states), 0)
        for place in range(1, self._form.draft_len):
            fed = kernels.recycled(states)
            states, read = kernels.run(self._token, fed, one, self._form.storage)
            self._choose(step, read, place)

    def _laid_out(self, step: Step) -> tuple[Flat, Flat]:
        """Where the tokens of both kinds of pass lie; made once a step, with room for attention."""
        if self._flats is None or self._flats[0] is not step:
            # Rotations for every position the target has: a row past the drafter's own context is
            # still computed, and not offered.
            model, capacity = self._form.kernels.model, step.slots.capacity
            model.rope.tables(max(model.config.max_context, capacity))
            width = self._form.draft_len + 1
            self._flats = (
                step,
                self._flat(step, step.positions, step.cells, width),
                self._flat(step, self._positions, self._cells, 1),
            )
        return self._flats[1:]

    def _flat(self, step: Step, positions: Tensor, cells: Tensor, width: int) -> Flat:
        slots, config = step.slots, self._form.kernels.model.config
        tiles = Tiles(
            row=step.slot_of,
            first=self._first,
            start=slots.start,
            length=slots.length,
            token=slots.token,
            pages=slots.pages,
            tokens=width,
            splits=splits_for(self._rows * config.num_kv_heads, positions.device),
        )
        scratch = scratch_of(tiles, config, positions.device)
        return Flat(positions, cells, tiles, scratch, slots.page_size)

    def _take_in(self, step: Step, flat: Flat) -> None:
        """The layers over what the target saw last; `_current` [rows, hidden] is what to draft
        from.
        """
        form, slots, width = self._form, step.slots, self._form.draft_len + 1
        _after_kernel[(self._rows,)](
            step.slot_of,
            step.positions,
            step.cells,
            slots.lengths,
            slots.tokens,
            *(slots.start, slots.length, slots.token),
            self._after,
            self._picked,
            slots.capacity,
            WIDTH=width,
            WIDTH_PADDED=triton.next_power_of_2(width),
            num_warps=1,
            **overlap(self._after),
        )
        states = form.kernels.fused(step.features)
        out, _ = form.kernels.run(self._after, states, flat, form.storage)
        _keep_kernel[(self._rows,)](
            out,
            *(step.slot_of, self._picked, slots.lengths),
            *(form.states, form.ready, self._current, step.counts),
            form.max_context,
            out.shape[1],
            DRAFT=form.draft_len,
            BLOCK=triton.next_power_of_2(out.shape[1]),
            num_warps=4,
            **overlap(out),
        )

    def _choose(self, step: Step, read: Tensor, place: int) -> None:
        """Draft token `place` of every row, and where the pass over it lies."""
        kernels, slots = self._form.kernels, step.slots
        head = kernels.model.head
        peaks, ids = self._chooser.parts(product(read, head.weight, head.bias))
        _choose_kernel[(self._rows,)](
            peaks,
            ids,
            kernels.ids if kernels.ids is not None else ids,
            *(step.slot_of, slots.lengths, slots.stop_at, slots.pages),
            step.drafts,
            *(self._token, self._positions, self._cells),
            *(slots.start, slots.length, slots.token),
            place,
            peaks.shape[1],
            slots.pages.shape[1],
            PAGE=slots.page_size,
            DRAFT=self._form.draft_len,
            PARTS=triton.next_power_of_2(peaks.shape[1]),
            MAPPED=kernels.ids is not None,
            num_warps=1,
            **overlap(read),
        )


@triton.jit
def _after_kernel(
    slot_of,
    positions,
    cells,
    lengths,
    tokens,
    start,
    length,
    token,
    after,
    picked,
    capacity,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0)
    slot = tl.load(slot_of + row)
    place = tl.arange(0, WIDTH_PADDED)
    at, inside = row * WIDTH + place, place < WIDTH
    there = tl.load(cells + at, mask=inside, other=-1) >= 0
    fed = tl.sum(there.to(tl.int32), 0)
    position = tl.load(positions + at, mask=there, other=0)
    # Behind rejected tokens stands what the text once held, or 0: a token all the same.
    line = tokens + slot.to(tl.int64) * capacity
    following = tl.load(line + position + 1, mask=there & (position + 1 < capacity), other=0)
    tl.store(after + at, following.to(tl.int64), mask=inside)
    first = tl.load(positions + row * WIDTH)
    last = tl.load(lengths + slot) - 2 - first
    tl.store(picked + row, tl.where((last >= 0) & (last < fed), row * WIDTH + last, -1))
    tl.store(start + slot, tl.where(fed > 0, first, 0))
    tl.store(length + slot, fed)
    tl.store(token + slot, row * WIDTH)


@triton.jit
def _keep_kernel(
    out,
    slot_of,
    picked,
    lengths,
    states,
    ready,
    current,
    counts,
    limit,
    size,
    DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_of + row).to(tl.int64)
    source = tl.load(picked + row).to(tl.int64)
    known = tl.load(lengths + slot)
    made = source >= 0
    at = tl.arange(0, BLOCK)
    fresh = tl.load(out + source * size + at, mask=(at < size) & made, other=0.0)
    kept = tl.load(states + slot * size + at, mask=at < size, other=0.0)
    state = tl.where(made, fresh, kept)
    tl.store(states + slot * size + at, state, mask=(at < size) & made)
    tl.store(current + row * size + at, state, mask=at < size)
    right = made | (tl.load(ready + slot) == known)
    tl.store(ready + slot, known, mask=made)
    room = tl.minimum(tl.maximum(limit - known, 0), DRAFT)
    tl.store(counts + row, tl.where(right, room, 0))


@triton.jit(do_not_specialize=["place"])
def _choose_kernel(
    peaks,
    ids,
    mapping,
    slot_of,
    lengths,
    stop_at,
    pages,
    drafts,
    chosen,
    positions,
    cells,
    start,
    length,
    token,
    place,
    parts,
    pages_width,
    PAGE: tl.constexpr,
    DRAFT: tl.constexpr,
    PARTS: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    peak = tl.load(peaks + row * parts + part, mask=part < parts, other=float("-inf"))
    best = tl.min(tl.where(peak == tl.max(peak, 0), part, parts - 1), 0)
    draft = tl.load(ids + row * parts + best)
    if MAPPED:
        draft = tl.load(mapping + draft).to(tl.int32)
    tl.store(drafts + row * DRAFT + place, draft)
    tl.store(chosen + row, draft.to(tl.int64))
    slot = tl.load(slot_of + row)
    known = tl.load(lengths + slot)
    position = known - 1 + place
    there = (known > 0) & (position < tl.load(stop_at + slot))
    position = tl.where(there, position, 0)
    page = tl.load(pages + slot.to(tl.int64) * pages_width + position // PAGE)
    tl.store(positions + row, position)
    tl.store(cells + row, tl.where(there, page * PAGE + position % PAGE, -1))
    tl.store(start + slot, position)
    tl.store(length + slot, there.to(tl.int32))
    tl.store(token + slot, row)
