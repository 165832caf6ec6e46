"""The real verifier against float64 laws: chi-square over three committed tokens, with controls.

Target and drafter look at the last token. Rounds run side by side as rows of one batch: a draft of
two, then plain steps for rows that are short of three tokens. All 64 outcomes are counted, so a
bias at any position shows. The controls draw drafts from another law than the one they report,
which is the mistake behind trap 17, and must fail by the same measure. Seeds are fixed; the
thresholds leave no room for bad luck if they ever change.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from slipstream.engine.verifier import Verifier
from slipstream.sampling.uniforms import Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import Dense, Draft, OneHot, SamplingParams, TopK
from tests.sampling.rows import ToyRow
from tests.sampling.test_probs import reference
from tests.sampling.test_state import by_the_book

VOCAB, LENGTH, PROMPT = 4, 3, [2, 1]
VOCABULARY = Vocabulary(VOCAB, ())
TARGET = np.random.default_rng(0).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
DRAFT = np.random.default_rng(1).dirichlet(np.ones(VOCAB), VOCAB)
PASS, FAIL = 1e-6, 1e-9


def draft_table(kind: str) -> np.ndarray:
    """Law of a draft token given the last token, [last, token]."""
    if kind == "one_hot":
        return np.eye(VOCAB)[DRAFT.argmax(1)]
    if kind == "top_k":
        kept = np.where(np.argsort(np.argsort(DRAFT, 1), 1) >= VOCAB - 2, DRAFT, 0)
        return kept / kept.sum(1, keepdims=True)
    return DRAFT


def drawn_from(laws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (laws.cumsum(1) < rng.random((len(laws), 1)) * laws.sum(1, keepdims=True)).sum(1)


def drafted(rows, kind: str, *, draws: np.ndarray, rng) -> Draft:
    """Two draft tokens a row, drawn from `draws` and reported as the law of `kind`."""
    last = np.array([row.tokens[-1] for row in rows])
    first = drawn_from(draws[last], rng)
    tokens = np.stack([first, drawn_from(draws[first], rng)], 1)
    claimed = torch.from_numpy(draft_table(kind)[np.stack([last, first], 1)])
    lens = np.full(len(rows), 2)
    if kind == "one_hot":
        return Draft(tokens, lens, OneHot())
    if kind == "dense":
        return Draft(tokens, lens, Dense(claimed))
    kept, ids = claimed.topk(2)
    return Draft(tokens, lens, TopK(ids, kept))


def outcomes(kind: str, params: SamplingParams, rounds: int, *, draws=None) -> np.ndarray:
    """Counts of the three tokens committed, [4, 4, 4]."""
    rng = np.random.default_rng(5)
    rows = [ToyRow(params, PROMPT, VOCABULARY, seed=i) for i in range(rounds)]
    draws = draft_table(kind) if draws is None else draws
    draft = drafted(rows, kind, draws=draws, rng=rng)
    left = rows
    while left:
        last = np.array([row.tokens[-1] for row in left])[:, None]
        inputs = np.concatenate([last, draft.tokens], 1)[:, : draft.lens[0] + 1]
        logits = torch.from_numpy(TARGET[inputs.ravel()])
        verdict = Verifier().verify(left, draft, logits, Uniforms())
        for i, row in enumerate(left):
            row.commit([*draft.row(i)[: verdict.accepted[i]], int(verdict.next_tokens[i])])
        left = [row for row in left if len(row.output) < LENGTH]
        draft = Draft.empty(len(left))
    counts = np.zeros((VOCAB,) * LENGTH)
    np.add.at(counts, tuple(np.array([row.output[:LENGTH] for row in rows]).T), 1)
    return counts


def law(params: SamplingParams) -> np.ndarray:
    """The float64 joint law of three tokens of plain decoding."""
    joint = np.zeros((VOCAB,) * LENGTH)
    for tokens in itertools.product(range(VOCAB), repeat=LENGTH):
        weight = 1.0
        for j, token in enumerate(tokens):
            context = [*PROMPT, *tokens[:j]]
            scores = by_the_book(TARGET[context[-1]], params, PROMPT, list(tokens[:j]))
            weight *= reference(scores, params)[token]
        joint[tokens] = weight
    return joint


def p_value(counts: np.ndarray, params: SamplingParams) -> float:
    """Smallest p-value over the joint law and each position's own; 0 if the impossible happened."""
    expected = law(params) * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    found = [_chi_square(counts, expected)]
    for position in range(LENGTH):
        others = tuple(i for i in range(LENGTH) if i != position)
        found.append(_chi_square(counts.sum(others), expected.sum(others)))
    return min(found)


def _chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    order = np.argsort(expected.ravel())
    counts, expected = counts.ravel()[order], expected.ravel()[order]
    rare = int((np.cumsum(expected) < 10).sum()) + 1  # pooled: the approximation needs a few each
    pooled = [np.append(x[rare:], x[:rare].sum()) for x in (counts, expected)]
    keep = pooled[1] > 0
    if keep.sum() < 2:
        return 1.0
    return float(stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue)


@pytest.mark.parametrize("kind", ["one_hot", "dense", "top_k"])
def test_temperature_one(kind):
    params = SamplingParams(temperature=1.0)
    assert p_value(outcomes(kind, params, 24_000), params) > PASS


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("dense", {"temperature": 0.6}),
        ("top_k", {"temperature": 1.5, "top_p": 0.8}),
        ("dense", {"temperature": 1.0, "top_k": 3}),
        ("dense", {"temperature": 1.2, "min_p": 0.25}),
        ("one_hot", {"temperature": 0.9, "top_k": 3, "top_p": 0.9, "min_p": 0.05}),
        ("dense", {"temperature": 1.0, "frequency_penalty": 0.8, "presence_penalty": 0.4}),
        ("top_k", {"temperature": 1.0, "repetition_penalty": 1.6, "logit_bias": {0: 0.7}}),
    ],
    ids=str,
)
def test_shaped_laws(kind, options):
    params = SamplingParams(**options)
    assert p_value(outcomes(kind, params, 6_000), params) > PASS


@pytest.mark.parametrize("kind", ["dense", "top_k"])
@pytest.mark.parametrize("slip", ["greedy", "cooler"])
def test_control_drafts_from_another_law_than_reported(kind, slip):
    """Greedy draft tokens, or tokens drawn a little cooler, reported as the honest law."""
    params, honest = SamplingParams(temperature=1.0), draft_table(kind)
    draws = np.eye(VOCAB)[honest.argmax(1)] if slip == "greedy" else honest**2
    draws = draws / draws.sum(1, keepdims=True)
    assert p_value(outcomes(kind, params, 24_000, draws=draws), params) < FAIL


def test_control_the_measure_sees_a_wrong_target():
    """Penalties ignored inside drafts would look like this."""
    params = SamplingParams(temperature=1.0, frequency_penalty=0.8)
    counts = outcomes("dense", SamplingParams(temperature=1.0), 6_000)
    assert p_value(counts, params) < FAIL


def test_a_one_hot_draft_cannot_bias_however_it_was_chosen():
    """Even tokens drawn at random under the one-hot law: a draft token holds by equality only."""
    params = SamplingParams(temperature=1.0)
    counts = outcomes("one_hot", params, 24_000, draws=DRAFT)
    assert p_value(counts, params) > PASS
    assert (counts == outcomes("one_hot", params, 24_000)).all()
