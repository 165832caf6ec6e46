"""A second, smaller model of the same tokenizer drafts token by token.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding" (ICML 2023).
It has its own weights, pages and cache. A step is one catch-up forward over what was committed
since its last one, then one forward a further draft token, for all rows together. Nothing is rolled
back: entries of rejected tokens lie past the agreed length and are overwritten.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.cache.pages import PageTable
from slipstream.drafters.lanes import Lane, LaneLaw, choose, law_for, pack_lanes
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.errors import ModelError
from slipstream.models.loading import LoadedModel, load
from slipstream.target.target import ForwardRow, Target
from slipstream.types import Draft, IntArray, Row, Verdict

CATCH_UP_TOKENS = 512
"""Most tokens of the catch-up forward, all rows together. A long prompt is taken in over several
steps, in which its row drafts nothing, so that the others never wait for a whole prompt."""

_PAGE_SIZE = 16


@dataclass(slots=True)
class _Memory:
    """What its cache holds of a request: the first `agreed` tokens, then `guessed` ones."""

    table: PageTable
    agreed: int
    guessed: list[int] = field(default_factory=list)

    def settle(self, tokens: Sequence[int]) -> None:
        """Keep the guesses that were committed. The last token is always left to be computed: its
        logits are what the draft begins with.
        """
        for token in self.guessed:
            if self.agreed >= len(tokens) or tokens[self.agreed] != token:
                break
            self.agreed += 1
        self.guessed = []
        self.agreed = min(self.agreed, len(tokens) - 1)


@dataclass(slots=True, kw_only=True, eq=False)
class _Lane(Lane):
    """A row of the draft and what the draft model's cache holds of it."""

    memory: _Memory

    @property
    def pending(self) -> list[int]:
        """Committed tokens the cache lacks, the anchor included."""
        return self.row.tokens[self.memory.agreed :]


class DraftModelDrafter:
    """Drafts with `model`, whose token ids mean the same as the target's.

    Greedy rows draft the argmax of the processed logits; others are sampled from the same
    `logits -> probs` path as the target's, with the row's own params. The law is `OneHot` where
    every drafting row is greedy, else as `lanes.law_for` says. A row drafts nothing where its
    context or the page pool is exhausted, or where the draft model's logits are not finite.
    """

    needs: tuple[int, ...] = ()

    def __init__(
        self,
        model: Target,
        draft_len: int,
        *,
        vocab_size: int,
        name: str,
        prefix_cache: bool = True,
    ) -> None:
        self.name, self.max_draft_len = name, draft_len
        self._prefix_cache = prefix_cache
        self.model = model
        self._vocab_size = vocab_size
        self._memories: dict[int, _Memory] = {}

    def open(self, rows: Sequence[Row]) -> None:
        """Adopt known prefixes; the rest of the prompt is computed when a draft is asked for."""
        for row in rows:
            expected = len(row.tokens) + row.params.max_tokens + self.max_draft_len
            limit = min(expected, self.model.config.max_context)
            table = PageTable(self.model.pool, expected_tokens=limit)
            known = table.match(row.tokens) if self._prefix_cache else 0
            self._memories[row.request_id] = _Memory(table, known)

    def draft(self, rows: Sequence[Row], draft_lens: IntArray) -> Draft:
        """Catch up, then draft round by round the rows that still want tokens."""
        widths = draft_lens.clip(0, self.max_draft_len).tolist()
        lanes = [
            lane
            for i, (row, width) in enumerate(zip(rows, widths, strict=True))
            if width and (lane := self._lane(i, row, width)) is not None
        ]
        if not lanes:
            return Draft.empty(len(rows))
        with torch.inference_mode():
            ready, logits = self._catch_up(lanes)
            law = self._extend(ready, logits, rows=len(rows))
        return pack_lanes(ready, law, rows=len(rows))

    def advance(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """Nothing yet: the next draft compares its guesses with what was committed."""

    def close(self, request_ids: Sequence[int]) -> None:
        """Give the requests' pages back."""
        for request_id in request_ids:
            memory = self._memories.pop(request_id, None)
            if memory is not None:
                memory.table.release()

    def reset(self) -> None:
        """Forget reusable prefixes."""
        self.model.pool.reset_prefixes()

    def pad(self, *, rows: int, tokens: int, positions: int) -> None:
        """From now on the draft model's forwards are padded; none is larger than a catch-up."""
        self.model.pad(rows=rows, tokens=min(tokens, CATCH_UP_TOKENS))

    def warm_up(self) -> None:
        """Compile and capture what the draft model will run."""
        self.model.warm_up()

    def _lane(self, index: int, row: Row, width: int) -> _Lane | None:
        """The row's part of this draft, or None where it cannot draft."""
        memory = self._memories[row.request_id]
        memory.settle(row.tokens)
        # The last draft token is never computed, so its position need not exist.
        width = min(width, self.model.config.max_context - len(row.tokens) + 1)
        lane = _Lane(index=index, row=row, memory=memory, width=width)
        if width < 1 or max(lane.pending) >= self.model.config.vocab_size:
            return None
        return lane if memory.table.reserve(len(row.tokens) + width - 1) else None

    def _catch_up(self, lanes: list[_Lane]) -> tuple[list[_Lane], Tensor]:
        """One forward over pending tokens; the lanes that are up to date, and their logits."""
        budget, parts, ready = CATCH_UP_TOKENS, [], []
        for lane in sorted(lanes, key=lambda lane: len(lane.pending)):
            tokens = lane.pending[:budget]
            if not tokens:
                break
            budget -= len(tokens)
            memory = lane.memory
            whole = memory.agreed + len(tokens) == len(lane.row.tokens)
            parts.append(ForwardRow(tokens, memory.agreed, memory.table.pages, int(whole)))
            memory.agreed += len(tokens)
            if whole:
                ready.append(lane)
        logits = self.model.forward(parts).logits
        if self._prefix_cache:
            for lane in lanes:
                lane.memory.table.publish(lane.row.tokens, lane.memory.agreed)
        return ready, logits

    def _extend(self, lanes: list[_Lane], logits: Tensor, *, rows: int) -> LaneLaw:
        """Choose a token for each lane, feed it, and go on while lanes want more."""
        law = law_for(lanes, rows=rows, vocab=self._vocab_size, device=logits.device)
        while lanes:
            lanes = choose(lanes, _fit(logits, self._vocab_size), law)
            lanes = [lane for lane in lanes if len(lane.chosen) < lane.width]
            if lanes:
                logits = self.model.forward([self._next(lane) for lane in lanes]).logits
        return law

    def _next(self, lane: _Lane) -> ForwardRow:
        token, at = lane.chosen[-1], len(lane.row.tokens) + len(lane.chosen) - 1
        lane.memory.guessed.append(token)
        return ForwardRow([token], at, lane.memory.table.pages, 1)


def _fit(logits: Tensor, width: int) -> Tensor:
    """Logits as wide as the target's: families pad one vocabulary to different sizes."""
    missing = width - logits.shape[-1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def create(spec: DrafterSpec, context: DrafterContext) -> DraftModelDrafter:
    """The drafter of a spec `draft_model:PATH:draft_len`.

    Raises `ModelError` where the model cannot be read or has another tokenizer than the target.
    """
    if spec.path is None:
        raise ValueError(f"{spec} has no path")  # parse() never lets one through
    loaded = load(spec.path, dtype=context.dtype, device=context.device)
    check_tokenizer(loaded, context)
    pages = -(-_kv_tokens(loaded, context) // _PAGE_SIZE)
    model = Target(loaded, num_pages=pages, page_size=_PAGE_SIZE)
    return DraftModelDrafter(
        model,
        spec.draft_len,
        vocab_size=context.vocab_size,
        name=str(spec),
        prefix_cache=context.prefix_cache,
    )


def check_tokenizer(loaded: LoadedModel, context: DrafterContext) -> None:
    """Raise `ModelError` unless each token id means the same string in both models."""
    advice = "use a draft model with the target's tokenizer."
    if context.tokenizer is None:
        if loaded.model.config.vocab_size != context.vocab_size:
            raise ModelError(
                f"Draft model {loaded.name} has {loaded.model.config.vocab_size} tokens and the "
                f"target {context.vocab_size}; {advice}"
            )
        return
    theirs, ours = loaded.tokenizer.get_vocab(), context.tokenizer.get_vocab()
    if theirs == ours:
        return
    if len(theirs) != len(ours):
        difference = f"its vocabulary has {len(theirs)} tokens, the target's {len(ours)}"
    else:
        token = min(ours, key=lambda t: (theirs.get(t) == ours[t], ours[t]))
        difference = f"token {token!r} is {ours[token]} in the target and {theirs.get(token)} there"
    raise ModelError(f"Draft model {loaded.name} has another tokenizer ({difference}); {advice}")


def _kv_tokens(loaded: LoadedModel, context: DrafterContext) -> int:
    """Cache positions all users can need, within a quarter of the free memory: the target has the
    greater claim, and a row without pages merely drafts nothing.
    """
    config = loaded.model.config
    item = torch.empty((), dtype=context.dtype).element_size()
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item
    if loaded.model.device.type == "cuda":
        free = torch.cuda.mem_get_info(loaded.model.device)[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    wanted = context.max_users * min(config.max_context, context.max_context)
    return int(max(_PAGE_SIZE, min(wanted, free // 4 // per_token)))
