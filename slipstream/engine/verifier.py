"""Which draft tokens hold, and the token that follows them. Pure: randomness comes in as uniforms.

One-hot law: the token at each position is drawn from `target_probs` as if nothing had been drafted,
and a draft token holds iff it is that token. The output then depends on the seed alone, not on what
or how much was drafted. Dense and top-k laws: a draft token holds with probability
min(1, target / draft); after a rejection the recovered token comes from the residual, after a full
run the bonus token from `target_probs`. Greedy rows: a draft token holds iff it is the argmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.sampling.accept import accepts, invert_cdf, residual
from slipstream.sampling.few import FewProbs, few, left_over, mass_at, pick
from slipstream.sampling.probs import argmax, draw, is_open, process_logits, shape_probs
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.types import (
    Dense,
    Draft,
    IntArray,
    OneHot,
    Row,
    SamplingParams,
    TokenLogprobs,
    TopK,
    Verdict,
)


class Verifier:
    """Turns the target's logits over a draft into a `Verdict`. Holds no state."""

    def verify(
        self, rows: Sequence[Row], draft: Draft, logits: Tensor, uniforms: Uniforms
    ) -> Verdict:
        """Decide one step.

        `logits`: float [sum(draft.lens + 1), vocab]; row i's are `lens[i] + 1` consecutive ones,
        the first for the token after its anchor. A row that meets logits which cannot be sampled
        gets an entry in `Verdict.errors` and next token -1, and keeps the draft tokens accepted
        before, as plain decoding would; other rows are unharmed.
        Raises ValueError where the count of logits rows does not fit the draft.
        """
        flat = _Flat.of(rows, draft)
        if len(logits) != len(flat.owner):
            raise ValueError(f"{len(logits)} rows of logits for {len(flat.owner)} positions")
        with torch.inference_mode():
            raw = logits.detach()
            if raw.dtype != torch.bfloat16:
                raw = raw.float()
            decision = _Decision(rows, draft, flat, raw, uniforms)
            accepted = decision.run()
            following = decision.chosen[flat.starts + accepted]
            errors = _errors(rows, flat, accepted, decision.broken, raw)
            following[list(errors)] = -1
            logprobs = _logprobs(rows, flat, accepted, following, raw, errors)
        return Verdict(accepted, following, logprobs, errors)


@dataclass(frozen=True, slots=True)
class _Flat:
    """A ragged draft as flat positions: int64 [positions] each, `starts` int64 [rows].

    `proposed` is the draft token at a position, -1 at each row's last one, which has none.
    """

    starts: IntArray
    owner: IntArray
    depth: IntArray
    proposed: IntArray

    @classmethod
    def of(cls, rows: Sequence[Row], draft: Draft) -> _Flat:
        counts = draft.lens + 1
        starts = np.cumsum(counts) - counts
        owner = np.repeat(np.arange(len(rows)), counts)
        depth = np.arange(len(owner)) - starts[owner]
        proposed = np.full(len(owner), -1, np.int64)
        inside = depth < draft.lens[owner]
        proposed[inside] = draft.tokens[owner[inside], depth[inside]]
        return cls(starts, owner, depth, proposed)

    def leading(self, held: NDArray[np.bool_]) -> IntArray:
        """How many draft tokens of each row hold before the first that does not."""
        stops = np.where(held, np.iinfo(np.int64).max, self.depth)
        return np.minimum.reduceat(stops, self.starts)


class _Decision:
    """One step's tokens as they come to be decided.

    Flat arrays: `chosen` int64, the token the target's side settled on; `held` bool, whether that
    keeps the draft token; `broken` bool, positions met that have no law (NaN or infinite logits, or
    every token banned).
    """

    def __init__(
        self, rows: Sequence[Row], draft: Draft, flat: _Flat, raw: Tensor, uniforms: Uniforms
    ) -> None:
        self.rows, self.draft, self.flat = rows, draft, flat
        self.raw, self.uniforms = raw, uniforms
        self.chosen = np.full(len(flat.owner), -1, np.int64)
        self.held = np.zeros(len(flat.owner), np.bool_)
        self.broken = np.zeros(len(flat.owner), np.bool_)
        self.greedy = np.array([row.params.greedy for row in rows], np.bool_)

    def run(self) -> IntArray:
        """Accepted counts, int64 [rows].

        Rows that are a bare argmax are decided at once. The others go position by position and only
        as far as their tokens hold: a law behind a rejection is never computed.
        """
        plain = np.array([row.sampler.plain for row in self.rows], np.bool_)
        at_once = self.greedy & plain
        self.settle(np.flatnonzero(at_once[self.flat.owner]))
        where = self.flat.starts[~at_once]
        while len(where):
            self.settle(where)
            where = where[self.held[where]] + 1
        return self.flat.leading(self.held)

    def settle(self, where: IntArray) -> None:
        """Decide some positions whose earlier draft tokens, as far as they matter, hold."""
        if not len(where):
            return
        everything = len(where) == len(self.raw)
        scores = self.raw if everything else self.raw[torch.from_numpy(where)]
        likeliest, peaks = argmax(scores)
        sound = np.isfinite(peaks)
        processed = self.processed(where, scores)
        if processed is not scores:
            scores = processed
            likeliest, peaks = argmax(scores)
            sound &= np.isfinite(peaks)
        self.broken[where] = ~sound
        self.chosen[where] = likeliest
        self.held[where] = sound & (likeliest == self.flat.proposed[where])
        sampled = sound & ~self.greedy[self.flat.owner[where]]
        if isinstance(self.draft.law, OneHot):
            self.draw(where, scores, sampled)
        else:
            drafted = self.flat.proposed[where] >= 0
            self.draw(where, scores, sampled & ~drafted)
            self.speculate(self.draft.law, where, scores, sampled & drafted)

    def processed(self, where: IntArray, scores: Tensor) -> Tensor:
        """Penalties and bans at some positions, the draft tokens before each counted."""
        owners = self.flat.owner[where]
        if all(self.rows[i].sampler.plain for i in owners):
            return scores
        depths = self.flat.depth[where]
        prefixes = [self.draft.tokens[i, :j].tolist() for i, j in zip(owners, depths, strict=True)]
        return process_logits(scores, [self.rows[i].sampler for i in owners], prefixes)

    def draw(self, where: IntArray, scores: Tensor, which: NDArray[np.bool_]) -> None:
        """Tokens from the target's own law; a draft token holds if it is that token."""
        if not which.any():
            return
        where, scores = where[which], _rows_of(scores, which).float()
        tokens = draw(scores, self.params(where), self.uniform(where, Purpose.NEXT))
        self.chosen[where] = tokens
        self.held[where] = tokens == self.flat.proposed[where]

    def speculate(
        self, law: Dense | TopK, where: IntArray, scores: Tensor, which: NDArray[np.bool_]
    ) -> None:
        """Accept the draft token by the rule of its law, or draw the recovered token."""
        if not which.any():
            return
        scores, where = _rows_of(scores, which).float(), where[which]
        wide = np.array([is_open(one) for one in self.params(where)], np.bool_)
        if not wide.all():
            self.speculate_few(law, where[~wide], _rows_of(scores, ~wide))
            scores, where = _rows_of(scores, wide), where[wide]
        if not len(where):
            return
        target_probs = shape_probs(scores, self.params(where))
        tokens = torch.from_numpy(self.flat.proposed[where]).to(target_probs.device)
        target = target_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        draft = _draft_prob(law, self.flat, where, tokens)
        drawn = torch.from_numpy(self.uniform(where, Purpose.ACCEPT)).to(target.device)
        keeps = accepts(draft, target, drawn).cpu().numpy()
        self.held[where] = keeps
        fell = where[~keeps]
        if len(fell):
            left = _rows_of(target_probs, ~keeps)
            left = residual(_draft_probs(law, self.flat, fell, left), left)
            drawn = torch.from_numpy(self.uniform(fell, Purpose.NEXT))
            self.chosen[fell] = invert_cdf(left, drawn).cpu().numpy()

    def speculate_few(self, law: Dense | TopK, where: IntArray, scores: Tensor) -> None:
        """The same for rows whose own law is of few tokens: no row is written out."""
        drawn, again = self.uniform(where, Purpose.ACCEPT), self.uniform(where, Purpose.NEXT)
        table = scores.cpu().numpy()
        for i, (at, params) in enumerate(zip(where, self.params(where), strict=True)):
            ids, target = few(table[i], params)
            draft, token = _LawAt.of(law, self.flat, at), self.flat.proposed[at]
            kept = drawn[i] * draft.mass(token) < target[ids == token].sum()
            self.held[at] = kept
            if not kept:
                self.chosen[at] = pick(ids, left_over(target, draft.masses(ids)), again[i])

    def params(self, where: IntArray) -> list[SamplingParams]:
        """Sampling params of the requests that own some positions."""
        return [self.rows[row].params for row in self.flat.owner[where]]

    def uniform(self, where: IntArray, purpose: Purpose) -> NDArray[np.float64]:
        """Keyed by the owner's seed and the index the token will have in `row.tokens`."""
        owners = self.flat.owner[where]
        seeds = np.array([self.rows[i].seed for i in owners], np.int64)
        lengths = np.array([len(self.rows[i].tokens) for i in owners], np.int64)
        return self.uniforms(seeds, lengths + self.flat.depth[where], purpose)


def _rows_of(table: Tensor, which: NDArray[np.bool_]) -> Tensor:
    """Some rows of a table, without a copy where that is all of them."""
    return table if which.all() else table[torch.from_numpy(which).to(table.device)]


@dataclass(frozen=True, slots=True)
class _LawAt:
    """The draft law of one position on the host: probabilities of `ids`, of all tokens if None."""

    ids: IntArray | None
    probs: FewProbs

    @classmethod
    def of(cls, law: Dense | TopK, flat: _Flat, at: int) -> _LawAt:
        where = int(flat.owner[at]), int(flat.depth[at])
        ids = law.ids[where].cpu().numpy() if isinstance(law, TopK) else None
        return cls(ids, law.probs[where].cpu().numpy())

    def mass(self, token: int) -> float:
        """What it gives to a token."""
        own = self.probs[token] if self.ids is None else self.probs[self.ids == token].sum()
        return float(own)

    def masses(self, tokens: IntArray) -> FewProbs:
        """What it gives to tokens, ids ascending."""
        return self.probs[tokens] if self.ids is None else mass_at(tokens, self.ids, self.probs)


def _draft_prob(law: Dense | TopK, flat: _Flat, where: IntArray, tokens: Tensor) -> Tensor:
    """Draft probability of the drafted tokens, float [n]."""
    at = torch.from_numpy(flat.owner[where]), torch.from_numpy(flat.depth[where])
    if isinstance(law, Dense):
        dense: Tensor = law.probs[(*at, tokens)]
        return dense
    hits: Tensor = law.ids[at].to(tokens.device) == tokens.unsqueeze(-1)
    kept: Tensor = law.probs[at].to(tokens.device)
    return (kept * hits).sum(-1)


def _draft_probs(law: Dense | TopK, flat: _Flat, where: IntArray, like: Tensor) -> Tensor:
    """Draft law at some positions, shaped as `like` [n, vocab]; zero outside a top-k law's ids."""
    at = torch.from_numpy(flat.owner[where]), torch.from_numpy(flat.depth[where])
    kept: Tensor = law.probs[at].to(like)
    if isinstance(law, Dense):
        return kept
    return torch.zeros_like(like).scatter_add_(-1, law.ids[at].to(like.device), kept)


def _errors(
    rows: Sequence[Row],
    flat: _Flat,
    accepted: IntArray,
    broken: NDArray[np.bool_],
    raw: Tensor,
) -> dict[int, str]:
    """Sentences for rows that reached a broken position; plain decoding never sees the others."""
    errors: dict[int, str] = {}
    for at in np.flatnonzero(broken):
        row = int(flat.owner[at])
        if flat.depth[at] <= accepted[row] and row not in errors:
            errors[row] = _sentence(rows[row], int(flat.depth[at]), raw[at])
    return errors


def _sentence(row: Row, depth: int, logits: Tensor) -> str:
    position = len(row.tokens) + depth
    if not bool(torch.isfinite(logits.max())):
        kind = "NaN" if bool(torch.isnan(logits).any()) else "infinite"
        return (
            f"The target produced {kind} logits at position {position} of request "
            f"{row.request_id}; check its weights and dtype."
        )
    grammar = row.sampler.grammar
    if grammar is not None and grammar.error:
        return f"{grammar.error} Simplify the grammar of request {row.request_id}."
    return (
        f"bad_words, min_tokens and logit_bias leave no token at position {position} of request "
        f"{row.request_id}; relax them."
    )


def _logprobs(
    rows: Sequence[Row],
    flat: _Flat,
    accepted: IntArray,
    following: IntArray,
    raw: Tensor,
    errors: dict[int, str],
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """Of accepted and next tokens, from the unprocessed logits, for the rows that ask."""
    found: list[tuple[TokenLogprobs, ...] | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        count = row.params.logprobs
        if count is None:
            continue
        settled = int(accepted[i]) + (i not in errors)
        span = slice(int(flat.starts[i]), int(flat.starts[i]) + settled)
        tokens = np.append(flat.proposed[span][: accepted[i]], following[i])[:settled]
        found[i] = _token_logprobs(raw[span], torch.from_numpy(tokens).to(raw.device), count)
    return tuple(found)


def _token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[TokenLogprobs, ...]:
    """`logits`: float [n, vocab], `tokens`: int64 [n]; `count` alternatives each."""
    logs = torch.log_softmax(logits.float(), -1)
    chosen = logs.gather(-1, tokens.unsqueeze(-1))
    ranks = (logs > chosen).sum(-1) + 1
    top, ids = logs.topk(min(count, logs.shape[-1]), -1)
    likeliest = zip(ids.tolist(), top.tolist(), strict=True)
    return tuple(
        TokenLogprobs(token, logprob, rank, tuple(zip(*pair, strict=True)))
        for token, logprob, rank, pair in zip(
            tokens.tolist(), chosen.squeeze(-1).tolist(), ranks.tolist(), likeliest, strict=True
        )
    )
