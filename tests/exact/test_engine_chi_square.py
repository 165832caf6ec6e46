"""The whole engine at temperature 1 against the analytic law, with a control that must fail.

Requests of three tokens run through scheduler, drafter, verifier and stops. The joint law of the
three tokens is known (the toy target looks at the last token only), so a chi-square over all
64 outcomes sees any bias. The control claims another draft law than the one it drew from: the
mistake behind trap 17.
"""

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.types import Dense, Draft, SamplingParams, TopK
from tests.engine.toy import run, toy_engine

VOCAB, ROUNDS, PROMPT = 4, 20_000, (1, 2)
TABLE = np.random.default_rng(0).normal(0, 1.0, (VOCAB, VOCAB))
TARGET = np.exp(TABLE) / np.exp(TABLE).sum(1, keepdims=True)
DRAFT = np.random.default_rng(1).dirichlet(np.ones(VOCAB), VOCAB)


class TableDrafter:
    """Draws from `draft_probs[last token]` and reports `claimed` as the law."""

    name, max_draft_len, needs = "table", 2, ()

    def __init__(self, *, claimed, kind):
        self._claimed, self._kind = claimed, kind
        self._uniforms = Uniforms()

    def draft(self, rows, draft_lens):
        n, width = len(rows), int(max(draft_lens, default=0))
        tokens = np.full((n, width), -1, np.int64)
        last = np.array([r.tokens[-1] for r in rows])
        probs = np.zeros((n, width, VOCAB))
        seeds = np.array([r.seed for r in rows], np.int64)
        lengths = np.array([len(r.tokens) for r in rows], np.int64)
        for j in range(width):
            u = self._uniforms(seeds, lengths + j, Purpose.DRAFT)
            cdf = DRAFT[last].cumsum(1)
            probs[:, j] = self._claimed[last]
            last = np.minimum((u[:, None] >= cdf).sum(1), VOCAB - 1)
            tokens[:, j] = np.where(j < draft_lens, last, -1)
        return Draft(tokens, np.asarray(draft_lens, np.int64), self._law(probs))

    def _law(self, probs):
        dense = torch.from_numpy(probs).float()
        if self._kind == "dense":
            return Dense(dense)
        ids = torch.arange(VOCAB).flip(0).expand(dense.shape).contiguous()
        return TopK(ids, dense.flip(-1).contiguous())

    def open(self, rows): ...

    def advance(self, rows, verdict): ...

    def close(self, request_ids): ...

    def reset(self): ...


def p_value(claimed, kind="dense"):
    engine = toy_engine(
        lambda prefix: TABLE[prefix[-1]],
        TableDrafter(claimed=claimed, kind=kind),
        vocab=VOCAB,
        num_pages=512,
        max_users=64,
    )
    work = [(PROMPT, SamplingParams(max_tokens=3, temperature=1.0, seed=i)) for i in range(ROUNDS)]
    seen = np.zeros((VOCAB,) * 3)
    for c in run(engine, work):
        seen[c.token_ids] += 1
    first = TARGET[PROMPT[-1]]
    law = first[:, None, None] * TARGET[:, :, None] * TARGET[None, :, :]
    return stats.chisquare(seen.ravel(), law.ravel() * ROUNDS).pvalue


@pytest.mark.parametrize("kind", ["dense", "topk"])
def test_the_engine_keeps_the_target_law(kind):
    assert p_value(DRAFT, kind) > 1e-6


def test_the_control_with_a_wrong_claimed_law_fails():
    assert p_value(np.roll(DRAFT, 1, axis=1)) < 1e-9
