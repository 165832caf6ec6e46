"""Multiplying out the accept rule: the law of what a step commits is the target's, to 1e-12.

Vocabulary of 4, a table target and a table drafter that both depend on the whole prefix. Every
draft, every acceptance and every recovered or bonus token is enumerated with its probability in
float64; what a step leaves open up to draft_len + 1 tokens is completed with the target's law, as
later steps would. Two famous mistakes go through the same check and must fail it.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable

import numpy as np
import pytest
import torch

from slipstream.engine.verifier import Verifier
from slipstream.sampling.accept import accept_probs, residual
from slipstream.sampling.state import RowSampler
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import Dense, Draft, OneHot, SamplingParams, TopK

VOCAB = 4
KINDS = ["one_hot", "dense", "top_k"]
Tokens = tuple[int, ...]
Law = dict[Tokens, float]


def table(seed: int, prefix: Tokens) -> torch.Tensor:
    """A law of the next token that depends on the whole prefix; some tokens are impossible."""
    rng = np.random.default_rng([seed, len(prefix), *prefix])
    weights = rng.dirichlet(np.full(VOCAB, 0.7))
    weights[rng.integers(VOCAB)] *= rng.random() < 0.5
    return torch.from_numpy(weights / weights.sum())


def target_of(prefix: Tokens) -> torch.Tensor:
    return table(1, prefix)


def draft_of(kind: str, prefix: Tokens) -> torch.Tensor:
    """The law the drafter really draws from."""
    probs = table(2, prefix)
    if kind == "one_hot":
        return torch.eye(VOCAB, dtype=torch.float64)[probs.argmax()]
    if kind == "top_k":
        ids = probs.topk(2).indices
        kept = torch.zeros_like(probs)
        kept[ids] = probs[ids]
        return kept / kept.sum()
    return probs


def uncut(kind: str, draft: Tokens) -> int:
    return len(draft)


def cut_by_own_token(kind: str, draft: Tokens) -> int:
    """The forbidden controller: drops a token because that very token looks unlikely."""
    for j, token in enumerate(draft):
        if draft_of(kind, draft[:j])[token] < 0.5:
            return j
    return len(draft)


def cut_by_earlier_tokens(kind: str, draft: Tokens) -> int:
    """A legal one: position j is cut for what came before it, and for how sure its law is."""
    for j in range(len(draft)):
        if (j and draft[j - 1] == 0) or draft_of(kind, draft[:j]).max() < 0.5:
            return j
    return len(draft)


def step_law(kind: str, draft_len: int, *, recover: Callable, cut: Callable) -> Law:
    """Law of the committed tokens of one step: accepted draft tokens and the next token."""
    law: Law = defaultdict(float)
    for draft in itertools.product(range(VOCAB), repeat=draft_len):
        weight = 1.0
        for j, token in enumerate(draft):
            weight *= float(draft_of(kind, draft[:j])[token])
        if weight:
            _verify(law, kind, draft[: cut(kind, draft)], weight, recover)
    return law


def _verify(law: Law, kind: str, draft: Tokens, weight: float, recover: Callable) -> None:
    for j, token in enumerate(draft):
        drafted, target = draft_of(kind, draft[:j]), target_of(draft[:j])
        kept = float(accept_probs(drafted, target, torch.tensor(token)))
        for recovered, prob in enumerate(recover(drafted, target).tolist()):
            law[(*draft[:j], recovered)] += weight * (1 - kept) * prob
        weight *= kept
    for bonus, prob in enumerate(target_of(draft).tolist()):
        law[(*draft, bonus)] += weight * prob


def completed(law: Law, length: int) -> np.ndarray:
    """Joint law of the first `length` tokens, the target filling in what the step left open."""
    joint = np.zeros((VOCAB,) * length)
    for tokens, weight in law.items():
        joint += weight * _continued(tokens, length)
    return joint


def _continued(tokens: Tokens, length: int) -> np.ndarray:
    joint = np.zeros((VOCAB,) * length)
    if len(tokens) == length:
        joint[tokens] = 1.0
        return joint
    for token, prob in enumerate(target_of(tokens).tolist()):
        if prob:
            joint += prob * _continued((*tokens, token), length)
    return joint


def gap(law: Law, draft_len: int) -> float:
    """Largest difference to the target's own joint law."""
    return float(np.abs(completed(law, draft_len + 1) - _continued((), draft_len + 1)).max())


def reversed_residual(draft_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """The well-known slip: draft - target."""
    return residual(target_probs, draft_probs)


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_committed_law_is_the_targets(kind, draft_len):
    law = step_law(kind, draft_len, recover=residual, cut=uncut)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert gap(law, draft_len) < 1e-12


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_by_earlier_tokens_is_exact(kind, draft_len):
    law = step_law(kind, draft_len, recover=residual, cut=cut_by_earlier_tokens)
    assert gap(law, draft_len) < 1e-12


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_reversed_residual_is_caught(kind, draft_len):
    law = step_law(kind, draft_len, recover=reversed_residual, cut=uncut)
    assert gap(law, draft_len) > 1e-2


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize("kind", ["dense", "top_k"])
def test_a_cut_by_the_token_itself_is_caught(kind, draft_len):
    """One-hot drafts are left out: their token is a function of the prefix, so looking tells
    nothing new."""
    law = step_law(kind, draft_len, recover=residual, cut=cut_by_own_token)
    assert gap(law, draft_len) > 1e-2


# --- the real verifier, integrated over its uniforms -------------------------------------------


class Scripted(Uniforms):
    """Row i (by its seed) gets the uniforms written for it: `values[purpose][i, position - 1]`."""

    def __init__(self, values: dict[Purpose, np.ndarray]):
        self.values = values

    def __call__(self, seeds, positions, purpose):
        return self.values[purpose][seeds, positions - 1]


class Probe:
    """A row with one prompt token, nothing generated."""

    params = SamplingParams(temperature=1.0)
    sampler = RowSampler(params, Vocabulary(VOCAB, ()), ())
    tokens, prompt_len, request_id = [0], 1, 0

    def __init__(self, seed: int):
        self.seed = seed


def cells(edges) -> list[tuple[float, float]]:
    """(midpoint, width) of each piece that some breakpoints cut [0, 1) into."""
    cuts = np.unique(np.clip([0.0, 1.0, *edges], 0, 1))
    return [((a + b) / 2, b - a) for a, b in itertools.pairwise(cuts) if b - a > 1e-9]


def branches(kind: str, draft: Tokens):
    """(weight, accept uniforms, next uniforms), one per piece on which the outcome is constant."""
    spots = range(len(draft) + 1)
    laws = [target_of(draft[:j]) for j in spots]
    if kind == "one_hot":
        accept = [[(0.5, 1.0)] for _ in draft]
        following = itertools.product(*(cells(law.cumsum(0).tolist()) for law in laws))
    else:
        drafted = [draft_of(kind, draft[:j]) for j in range(len(draft))]
        kept = [
            float(accept_probs(d, t, torch.tensor(token)))
            for d, t, token in zip(drafted, laws, draft)
        ]
        accept = [cells([k]) for k in kept]
        left = [residual(d, t) for d, t in zip(drafted, laws)]
        # Only one position draws a next token, so one uniform may stand for all of them.
        edges = [e for law in (*laws, *left) for e in law.cumsum(0).tolist()]
        following = [[cell] * len(spots) for cell in cells(edges)]
    for ahead in itertools.product(*accept):
        for after in following if isinstance(following, list) else list(following):
            weight = np.prod([w for _, w in ahead])
            weight *= np.prod([w for _, w in after]) if kind == "one_hot" else after[0][1]
            yield weight, [m for m, _ in ahead], [m for m, _ in after]


def verifier_law(kind: str, draft_len: int) -> Law:
    drafts, weights, accept, after = [], [], [], []
    for draft in itertools.product(range(VOCAB), repeat=draft_len):
        drawn = np.prod([float(draft_of(kind, draft[:j])[t]) for j, t in enumerate(draft)])
        for weight, ahead, following in branches(kind, draft) if drawn else ():
            drafts.append(draft)
            weights.append(drawn * weight)
            accept.append(ahead)
            after.append(following)
    logits = {
        d: torch.stack([target_of(d[:j]) for j in range(draft_len + 1)]).log().float()
        for d in set(drafts)
    }
    uniforms = Scripted({Purpose.ACCEPT: np.array(accept), Purpose.NEXT: np.array(after)})
    draft = Draft(np.array(drafts), np.full(len(drafts), draft_len), _as_law(kind, drafts))
    rows = [Probe(i) for i in range(len(drafts))]
    verdict = Verifier().verify(rows, draft, torch.cat([logits[d] for d in drafts]), uniforms)
    assert not verdict.errors
    law: Law = defaultdict(float)
    for i, weight in enumerate(weights):
        law[(*drafts[i][: verdict.accepted[i]], int(verdict.next_tokens[i]))] += weight
    return law


def _as_law(kind: str, drafts: list[Tokens]) -> OneHot | Dense | TopK:
    if kind == "one_hot":
        return OneHot()
    width = range(len(drafts[0]))
    memo = {d: torch.stack([draft_of(kind, d[:j]) for j in width]) for d in set(drafts)}
    probs = torch.stack([memo[d] for d in drafts])
    if kind == "dense":
        return Dense(probs)
    kept, ids = probs.topk(2)
    return TopK(ids, kept)


@pytest.mark.parametrize("draft_len", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_verifier_integrates_to_the_same_law(kind, draft_len):
    """Not the functions but `Verifier.verify`, over a grid that holds every uniform's pieces.

    1e-6 and not 1e-12 because its probabilities are float32.
    """
    law = verifier_law(kind, draft_len)
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert gap(law, draft_len) < 1e-6
    if kind != "one_hot":  # one-hot drafts hold by equality: same joint law, other branches
        functions = step_law(kind, draft_len, recover=residual, cut=uncut)
        for tokens in functions.keys() | law.keys():
            assert law[tokens] == pytest.approx(functions[tokens], abs=1e-6)
