"""Drafting token by token with a few layers on target features: EAGLE-3 and MTP heads.

At position P the first layer reads what the target saw at P and the token after it; the last one
predicts the token after that; further ones are drafted by feeding its own output back. Keys and
values lie at the target's slots. The pass over newly committed tokens gives the first draft token's
state; entries of later draft tokens are overwritten when features of what was committed come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from slipstream.drafters.lanes import Lane, LaneLaw, Reduced, choose, law_for, pack_lanes
from slipstream.drafters.passes import Passes
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.models.attention import Segment
from slipstream.models.config import ModelConfig
from slipstream.models.rope import RopeTable
from slipstream.target.batch import Placed, Placement, lay_out, place
from slipstream.types import Draft, IntArray, OneHot, Row, Span, Verdict

if TYPE_CHECKING:
    from slipstream.drafters.chain_device import ChainForm
    from slipstream.drafters.chain_prompts import ChainPrompts
    from slipstream.models.cuda.chain import ChainKernels


class ChainWeights(Protocol):
    """Its layers and what is around them; see `models.eagle3_network.Eagle3` and
    `models.mtp_head.MtpHead`.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """`hs[i]` indices of the features."""
        ...

    @property
    def sizes(self) -> ModelConfig:
        """Heads, widths and context of the layers."""
        ...

    @property
    def embedding(self) -> Tensor:
        """The target's or its own, [vocab, hidden]."""
        ...

    @property
    def rope(self) -> RopeTable:
        """Rotation by position."""
        ...

    def fused(self, features: Tensor) -> Tensor:
        """[tokens, taps, hidden] -> the states the first layer reads, [tokens, hidden]."""
        ...

    def layer(
        self,
        tokens: Tensor,
        states: Tensor,
        rope: tuple[Tensor, Tensor],
        *,
        storage: Sequence[Tensor],
        slots: Tensor,
        segments: Sequence[Sequence[Segment]],
    ) -> Tensor:
        """Output [N, hidden] for `tokens` int64 [N], the token after each position. `storage`,
        `segments`: one each a layer.
        """
        ...

    @property
    def ids(self) -> Tensor | None:
        """The target's token of each column of its own logits, None where these are the same."""
        ...

    def logits(self, states: Tensor, vocab: int | None) -> Tensor:
        """Of outputs, over the target's vocabulary: [N, vocab]; over its own where None."""
        ...

    def recycled(self, states: Tensor) -> Tensor:
        """What is fed back of an output."""
        ...

    def kernels(self) -> ChainKernels:
        """The same on an accelerator."""
        ...


@dataclass(frozen=True, slots=True)
class _Ready:
    """The layer's output at a row's last position with features; `tokens` the row's length then."""

    tokens: int
    state: Tensor


class ChainDrafter:
    """Drafts up to `draft_len` tokens one after the other, all rows together.

    `slots`: positions of the target's cache, in pages of `page_size`; `max_users` rows at most. A
    row past the drafter's own context drafts nothing.
    """

    shifted = True

    def __init__(
        self,
        weights: ChainWeights,
        draft_len: int,
        *,
        slots: int,
        page_size: int,
        vocab_size: int,
        max_users: int,
        name: str,
    ) -> None:
        self.name, self.max_draft_len = name, draft_len
        self.needs = weights.taps
        self.weights = weights
        self._page_size, self._vocab_size, self._max_users = page_size, vocab_size, max_users
        self._reduced = Reduced.of(weights.ids, vocab_size)
        c, embedding = weights.sizes, weights.embedding
        # Room behind the end, as in `target.target`: rows at equal strides are viewed past it.
        shape = (slots + c.max_context, 2 * c.num_kv_heads, c.head_dim)
        self.storage = [
            torch.zeros(shape, dtype=embedding.dtype, device=embedding.device)
            for _ in range(c.num_layers)
        ]
        self._ready: dict[int, _Ready] = {}
        self._one_hot = False
        self._kernels: ChainKernels | None = None
        self._prompts: ChainPrompts | None = None

    @torch.inference_mode()
    def absorb(self, spans: Sequence[Span]) -> None:
        """One pass over newly committed tokens, each with the token after it."""
        limit = self.weights.sizes.max_context
        spans = [s for s in spans if s.start + len(s.features) <= limit]
        if not spans:
            return
        tokens = [s.row.tokens[s.start + 1 : s.start + 1 + len(s.features)] for s in spans]
        states = self._run(
            [(s.row, s.start) for s in spans],
            tokens,
            self.weights.fused(torch.cat([s.features for s in spans])),
        )
        ends = np.cumsum([len(s.features) for s in spans])
        last = states[torch.from_numpy(ends - 1).to(states.device, non_blocking=True)]
        for span, state in zip(spans, last, strict=True):
            reached = span.start + 1 + len(span.features)
            self._ready[span.row.request_id] = _Ready(reached, state)

    def open(self, rows: Sequence[Row]) -> None:
        """Nothing: the prompt was absorbed chunk by chunk."""

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], draft_lens: IntArray) -> Draft:
        """Token by token; each further one takes a pass over one position a row."""
        lanes = []
        limit = self.weights.sizes.max_context
        for i, (row, wanted) in enumerate(zip(rows, draft_lens.tolist(), strict=True)):
            ready = self._ready.get(row.request_id)
            width = min(wanted, self.max_draft_len, limit - len(row.tokens))
            if width > 0 and ready is not None and ready.tokens == len(row.tokens):
                lanes.append(Lane(index=i, row=row, width=width))
        if not lanes:
            return Draft.empty(len(rows))
        made = list(lanes)
        device = self.weights.embedding.device
        law: LaneLaw = OneHot()
        if not self._one_hot:
            law = law_for(lanes, rows=len(rows), vocab=self._vocab_size, device=device)
        states = torch.stack([self._ready[lane.row.request_id].state for lane in lanes])
        passes: Passes | None = None
        while True:
            alive = choose(lanes, self.weights.logits(states, None), law, self._reduced)
            going = [i for i, lane in enumerate(lanes) if len(lane.chosen) < lane.width]
            if len(alive) < len(lanes):
                going = [i for i in going if lanes[i] in alive]
            if not going:
                return pack_lanes(made, law, rows=len(rows))
            if passes is None or len(going) < len(lanes):
                passes, order = self._passes([lanes[i] for i in going])
                going = [going[i] for i in order]
                lanes, states = [lanes[i] for i in going], states[going]
            states = self._further(passes, lanes, states)

    def advance(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """Nothing: what was committed was absorbed."""

    def close(self, request_ids: Sequence[int]) -> None:
        """Drop the requests' states; what is in the cache belongs to pages."""
        for request_id in request_ids:
            self._ready.pop(request_id, None)

    def reset(self) -> None:
        """Nothing is kept across requests but with the target's own pages."""

    def on_device(self) -> ChainForm | None:
        """The same passes where the tokens are, greedy; those here are greedy too from now on.

        None for heads of a size that the attention kernel has no tiles for.
        """
        dim, tiled = self.weights.sizes.head_dim, self.weights.embedding.device.type != "cpu"
        if dim & (dim - 1) or (tiled and dim < 16):
            return None
        from slipstream.drafters.chain_device import ChainForm

        self._one_hot = True
        self._kernels = self._kernels or self.weights.kernels()
        return ChainForm(
            self._kernels,
            needs=self.needs,
            draft_len=self.max_draft_len,
            storage=self.storage,
            known=self._ready,
            slots=self._max_users,
        )

    def pad(self, *, rows: int, tokens: int, positions: int) -> None:
        """From now on its own passes at the host's word run through the kernels, padded; see
        `chain_prompts.ChainPrompts`. Nothing changes where `on_device` gave no form.
        """
        if self._kernels is None:
            return
        from slipstream.drafters.chain_prompts import ChainPrompts

        self._prompts = ChainPrompts(
            self._kernels,
            self.storage,
            rows=rows,
            tokens=tokens,
            positions=positions,
            page_size=self._page_size,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture the padded passes, before there are requests."""
        if self._prompts is not None:
            self._prompts.warm_up()

    def _passes(self, lanes: Sequence[Lane]) -> tuple[Passes | None, list[int]]:
        """Passes over each lane's next position until one of them ends, and the lanes' order there.

        None where a window cuts what a layer sees, and on an accelerator, whose attention kernels
        want masks that begin at multiples of 16 bytes: a later pass's mask is part of the last's.
        """
        w = self.weights
        at = [(lane.row.pages, _next_position(lane)) for lane in lanes]
        count = min(lane.width - len(lane.chosen) for lane in lanes)
        longest = max(position for _, position in at) + count
        cut = any(window is not None and window < longest for window in w.sizes.windows)
        if cut or w.embedding.device.type != "cpu":
            return None, list(range(len(lanes)))
        found = Passes(
            at,
            count,
            page_size=self._page_size,
            config=w.sizes,
            rope=w.rope,
            dtype=w.embedding.dtype,
            device=w.embedding.device,
        )
        return found, found.order

    def _further(self, passes: Passes | None, lanes: Sequence[Lane], states: Tensor) -> Tensor:
        """The layer over each lane's next position, whose token is the one just chosen."""
        states, tokens = self.weights.recycled(states), [lane.chosen[-1] for lane in lanes]
        if passes is None:
            where = [(lane.row, _next_position(lane)) for lane in lanes]
            return self._run(where, [[token] for token in tokens], states)
        now = passes.next()
        return self.weights.layer(
            torch.tensor(tokens, device=states.device),
            states,
            now.rope,
            storage=self.storage,
            slots=now.slots,
            segments=now.segments,
        )

    def _run(
        self, where: Sequence[tuple[Row, int]], tokens: Sequence[Sequence[int]], states: Tensor
    ) -> Tensor:
        """The layer over `tokens[i]` of each row from position `where[i][1]` on, in that order."""
        w = self.weights
        if self._prompts is not None:
            rows = [
                Placement(len(own), start, row.pages)
                for (row, start), own in zip(where, tokens, strict=True)
            ]
            return self._prompts.run([t for own in tokens for t in own], rows, states)
        placed: list[Placed] = [
            place(i, len(own), start, row.pages, self._page_size)
            for i, ((row, start), own) in enumerate(zip(where, tokens, strict=True))
        ]
        device = states.device
        flat = lay_out(placed, w.sizes, states.dtype, device)
        ids = torch.tensor([t for p in flat.rows for t in tokens[p.order]], device=device)
        at = torch.from_numpy(flat.positions).to(device)
        back = np.concatenate(flat.order)
        moved = bool((back[1:] < back[:-1]).any())
        if moved:
            states = states[torch.from_numpy(np.argsort(back)).to(device)]
        found = w.layer(
            ids,
            states,
            w.rope.rows(at, int(flat.positions.max())),
            storage=self.storage,
            slots=flat.slots,
            segments=[flat.plans[i] for i in flat.plan_of],
        )
        return found[torch.from_numpy(back).to(device)] if moved else found


def _next_position(lane: Lane) -> int:
    """Where the last token chosen is the one after: the next pass's position."""
    return len(lane.row.tokens) + len(lane.chosen) - 2


def chain(weights: ChainWeights, spec: DrafterSpec, context: DrafterContext) -> ChainDrafter:
    """The drafter of a spec `name:PATH:draft_len` with these weights."""
    return ChainDrafter(
        weights,
        spec.draft_len,
        slots=context.pages * context.page_size,
        page_size=context.page_size,
        vocab_size=context.vocab_size,
        max_users=context.max_users,
        name=str(spec),
    )
