"""Rows and a one-request loop for verifier tests: a table target, scripted drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.engine.verifier import Verifier
from slipstream.sampling.state import RowSampler
from slipstream.sampling.uniforms import Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import Draft, DraftLaw, OneHot, SamplingParams, Verdict

Logits = Callable[[tuple[int, ...]], np.ndarray]


@dataclass
class ToyRow:
    """What `slipstream.types.Row` asks for."""

    params: SamplingParams
    tokens: list[int]
    vocabulary: Vocabulary
    seed: int = 0
    request_id: int = 0
    prompt_len: int = field(init=False)
    sampler: RowSampler = field(init=False)

    def __post_init__(self):
        self.tokens = list(self.tokens)
        self.prompt_len = len(self.tokens)
        self.sampler = RowSampler(self.params, self.vocabulary, self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def commit(self, tokens: Sequence[int]) -> None:
        self.sampler.commit(tokens)
        self.tokens.extend(tokens)


def draft_of(tokens: Sequence[Sequence[int]], law: DraftLaw | None = None) -> Draft:
    lens = np.array([len(t) for t in tokens], np.int64)
    padded = np.full((len(tokens), max(lens, default=0)), -1, np.int64)
    for row, some in enumerate(tokens):
        padded[row, : len(some)] = some
    return Draft(padded, lens, law if law is not None else OneHot())


def logits_for(rows: Sequence[ToyRow], draft: Draft, target: Logits) -> torch.Tensor:
    out = []
    for i, row in enumerate(rows):
        drafted = draft.row(i)
        out += [target((*row.tokens, *drafted[:j])) for j in range(len(drafted) + 1)]
    return torch.from_numpy(np.array(out, np.float32))


def step(
    rows: Sequence[ToyRow],
    draft: Draft,
    target: Logits,
    uniforms: Uniforms | None = None,
) -> Verdict:
    """One verify, committed without stops."""
    logits = logits_for(rows, draft, target)
    verdict = Verifier().verify(rows, draft, logits, uniforms or Uniforms())
    for i, row in enumerate(rows):
        if i not in verdict.errors:
            row.commit([*draft.row(i)[: verdict.accepted[i]], int(verdict.next_tokens[i])])
    return verdict


def generate(row: ToyRow, target: Logits, count: int, drafts: Callable[[ToyRow], list[int]]):
    """`count` output tokens of one request; `drafts(row)` proposes for each step."""
    while len(row.output) < count:
        step([row], draft_of([drafts(row)]), target)
    return row.output[:count]


def hashed(vocab: int, *, seed: int = 0, scale: float = 2.0) -> Logits:
    """Logits that depend on the last two tokens and the length."""

    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, *prefix[-2:], len(prefix)])
        return rng.normal(0, scale, vocab)

    return logits
