"""The verifier's promises: what holds, what follows, per token, whatever was drafted."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from slipstream.engine.verifier import Verifier
from slipstream.sampling.accept import accepts, invert_cdf, residual
from slipstream.sampling.probs import to_probs
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import Dense, SamplingParams, TopK
from tests.sampling.rows import ToyRow, draft_of, generate, hashed, logits_for, step

VOCAB = 12
TOY = Vocabulary(VOCAB, (11,), tokens=[bytes([97 + i]) for i in range(10)] + [b" ", b"<eos>"])
TARGET = hashed(VOCAB, seed=1)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, top_k=8)


def row(params=SAMPLED, *, seed=0, prompt=(1, 2, 3), vocabulary=TOY) -> ToyRow:
    return ToyRow(params, list(prompt), vocabulary, seed=seed, request_id=seed)


def plain(params, count, **kwargs):
    return generate(row(params, **kwargs), TARGET, count, lambda r: [])


CHANGES_TOKENS = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 4, "min_p": 0.05},
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.5, "temperature": 0.9},
    {"presence_penalty": 1.0, "logit_bias": {4: 2.0}},
    {"min_tokens": 12, "stop_token_ids": (3,), "temperature": 1.0},
    {"bad_words": ("ab", "c", "hij"), "temperature": 1.0},
    {"grammar": {"regex": "([a-e]|fgh)*"}, "temperature": 1.0},
]


@pytest.mark.parametrize("options", CHANGES_TOKENS, ids=str)
@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_deterministic_drafts_change_no_token(options, draft_len):
    """Right, wrong and half-right drafts, at any temperature: the tokens of plain decoding."""
    params = SamplingParams(**options)
    expected = plain(params, 24, seed=7)

    def scripted(r: ToyRow) -> list[int]:
        done = len(r.output)
        right = expected[done : done + draft_len]
        style = done % 3
        if style == 0:
            return right
        if style == 1 and len(right) > 1:
            return [*right[:-1], (right[-1] + 1) % VOCAB]
        return [5] * (draft_len - 1)

    assert generate(row(params, seed=7), TARGET, 24, scripted) == expected


def test_accepted_counts_and_next_tokens_by_hand():
    """Greedy: agreement up to the first mismatch, then the target's own token."""
    expected = plain(SamplingParams(), 8)
    wrong = [(t + 1) % VOCAB for t in expected]
    drafts = [expected[:4], [*expected[:2], wrong[2], expected[3]], wrong[:3], []]
    rows = [row(SamplingParams(), seed=i) for i in range(4)]
    verdict = step(rows, draft_of(drafts), TARGET)
    assert verdict.accepted.tolist() == [4, 2, 0, 0]
    assert verdict.next_tokens.tolist() == [expected[4], expected[2], expected[0], expected[0]]
    assert verdict.logprobs == (None,) * 4
    assert verdict.errors == {}


@pytest.mark.parametrize("kind", ["one_hot", "dense", "top_k"])
def test_greedy_rows_accept_only_the_argmax_whatever_the_law(kind):
    expected = plain(SamplingParams(), 4)
    drafts = [expected[:3], [expected[0], (expected[1] + 1) % VOCAB, 0]]
    verdict = step([row(SamplingParams()) for _ in drafts], _lawful(drafts, kind), TARGET)
    assert verdict.accepted.tolist() == [3, 1]
    assert verdict.next_tokens.tolist() == [expected[3], expected[1]]


def test_ties_go_to_the_lowest_id():
    flat = lambda prefix: np.zeros(VOCAB)  # noqa: E731
    verdict = step([row(SamplingParams())], draft_of([[0, 0, 3]]), flat)
    assert (verdict.accepted.tolist(), verdict.next_tokens.tolist()) == ([2], [0])


def _lawful(drafts, kind, *, seed=0):
    """Drafts with a law that gives them some of the mass."""
    if kind == "one_hot":
        return draft_of(drafts)
    rng = np.random.default_rng(seed)
    width = max(map(len, drafts))
    probs = rng.random((len(drafts), width, VOCAB)) + 0.1
    if kind == "dense":
        return draft_of(drafts, Dense(torch.from_numpy(probs / probs.sum(-1, keepdims=True))))
    ids = np.argsort(-probs, -1)[:, :, :5]
    for i, some in enumerate(drafts):
        for j, token in enumerate(some):
            if token not in ids[i, j]:
                ids[i, j, 0] = token
    kept = np.take_along_axis(probs, ids, -1)
    law = TopK(torch.from_numpy(ids), torch.from_numpy(kept / kept.sum(-1, keepdims=True)))
    return draft_of(drafts, law)


@pytest.mark.parametrize("kind", ["one_hot", "dense", "top_k"])
def test_the_same_seed_alone_and_among_sixteen(kind):
    """Other rows, their order, their drafts and padding do not reach a request's tokens."""
    mixed = [SAMPLED, SamplingParams(), SamplingParams(temperature=1.0), SAMPLED]
    mixed[3] = replace(SAMPLED, repetition_penalty=1.2, logprobs=2)
    rng = np.random.default_rng(0)
    seeds = rng.permutation(16)
    drafts = [[int(t) for t in rng.integers(0, VOCAB, 1 + int(s) % 4)] for s in seeds]
    rows = [row(mixed[s % 4], seed=int(s), prompt=[int(s) % 5, 2]) for s in seeds]
    draft = _lawful(drafts, kind)
    logits = logits_for(rows, draft, TARGET)
    together = Verifier().verify(rows, draft, logits, Uniforms())
    start = 0
    for i, r in enumerate(rows):
        own = draft_of([drafts[i]], _row_law(draft.law, i))
        part = logits[start : start + len(drafts[i]) + 1]
        start += len(drafts[i]) + 1
        alone = Verifier().verify([r], own, part, Uniforms())
        assert alone.accepted[0] == together.accepted[i]
        assert alone.next_tokens[0] == together.next_tokens[i]
        assert alone.logprobs[0] == together.logprobs[i]


def _row_law(law, i):
    if isinstance(law, Dense):
        return Dense(law.probs[i : i + 1])
    if isinstance(law, TopK):
        return TopK(law.ids[i : i + 1], law.probs[i : i + 1])
    return law


@pytest.mark.parametrize("kind", ["one_hot", "dense", "top_k"])
def test_a_bonus_token_is_what_plain_decoding_would_have_drawn(kind):
    """After a full acceptance nothing tells the draft law: the target's own draw follows."""
    full = 0
    for seed in range(200):
        drafts = [[(seed + j) % VOCAB for j in range(1 + seed % 2)]]
        verdict = step([row(seed=seed)], _lawful(drafts, kind, seed=seed), TARGET)
        if verdict.accepted[0] == len(drafts[0]):
            full += 1
            after = row(seed=seed)
            after.commit(drafts[0])
            assert step([after], draft_of([[]]), TARGET).next_tokens[0] == verdict.next_tokens[0]
    assert full


def test_a_row_without_draft_tokens_inside_a_dense_batch_is_a_plain_step():
    drafts = [[1, 2], [], [3]]
    rows = [row(seed=i) for i in range(3)]
    verdict = step(rows, _lawful(drafts, "dense"), TARGET)
    assert verdict.next_tokens[1] == plain(SAMPLED, 1, seed=1)[0]


def test_equal_laws_always_accept_and_never_divide_by_zero():
    rows = [row(seed=i) for i in range(64)]
    drafts = [[]] * 64
    logits = logits_for(rows, draft_of(drafts), TARGET)
    probs = to_probs(logits, [r.sampler for r in rows], drafts)
    tokens = [[int(p.argmax())] for p in probs]
    verdict = step(rows, draft_of(tokens, Dense(probs.unsqueeze(1))), TARGET)
    assert verdict.accepted.tolist() == [1] * 64


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED, SamplingParams(min_tokens=3)])
def test_broken_logits_end_their_own_row_only(value, params):
    expected = [plain(params, 3, seed=i) for i in range(3)]
    drafts = [e[:2] for e in expected]
    rows = [row(params, seed=i) for i in range(3)]
    draft = draft_of(drafts)
    logits = logits_for(rows, draft, TARGET)
    if value == "-inf":
        logits[4] = float(value)
    else:
        logits[4, 11] = float(value)  # 11 is EOS, which min_tokens bans: still reported
    before = logits.clone()
    verdict = Verifier().verify(rows, draft, logits, Uniforms())
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert set(verdict.errors) == {1}
    assert "position 4" in verdict.errors[1]
    assert ("NaN" if value == "nan" else "infinite") in verdict.errors[1]
    assert verdict.accepted.tolist() == [2, 1, 2]
    assert verdict.next_tokens.tolist() == [expected[0][2], -1, expected[2][2]]


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
def test_broken_logits_behind_a_rejection_are_never_seen(params):
    """Plain decoding would not have computed them."""
    expected = plain(params, 2, seed=1)
    wrong = (expected[1] + 1) % VOCAB
    rows, draft = [row(params, seed=1)], draft_of([[expected[0], wrong, 0]])
    logits = logits_for(rows, draft, TARGET)
    logits[2:] = float("nan")
    verdict = Verifier().verify(rows, draft, logits, Uniforms())
    assert verdict.errors == {}
    assert (verdict.accepted.tolist(), verdict.next_tokens.tolist()) == ([1], [expected[1]])


def test_bans_that_leave_no_token_are_an_error_not_a_crash():
    everything = (*"abcdefghij", " ")
    params = SamplingParams(bad_words=everything, min_tokens=2, temperature=1.0)
    verdict = step([row(params), row()], draft_of([[], []]), TARGET)
    assert "leave no token" in verdict.errors[0]
    assert list(verdict.errors) == [0]


def test_logprobs_cover_every_committed_token_from_unprocessed_logits():
    params = SamplingParams(temperature=0.5, top_k=3, logit_bias={0: -50.0}, logprobs=4)
    rows = [row(params, seed=5), row(SamplingParams(logprobs=0)), row()]
    drafts = [plain(params, 2, seed=5), [(plain(SamplingParams(), 1)[0] + 1) % VOCAB], [1]]
    draft = draft_of(drafts)
    logits = logits_for(rows, draft, TARGET)
    verdict = Verifier().verify(rows, draft, logits, Uniforms())
    assert verdict.accepted.tolist()[:2] == [2, 0]
    tokens = [*drafts[0], int(verdict.next_tokens[0])]
    found = verdict.logprobs[0]
    assert [f.token for f in found] == tokens
    for j, entry in enumerate(found):
        logs = torch.log_softmax(logits[j].double(), -1)
        order = logs.argsort(descending=True).tolist()
        assert entry.logprob == pytest.approx(float(logs[tokens[j]]), abs=1e-5)
        assert entry.rank == order.index(tokens[j]) + 1
        assert [t for t, _ in entry.top] == order[:4]
        assert [v for _, v in entry.top] == pytest.approx(logs[order[:4]].tolist(), abs=1e-5)
    assert len(verdict.logprobs[1]) == 1
    assert verdict.logprobs[1][0].top == ()
    assert verdict.logprobs[1][0].rank == 1
    assert verdict.logprobs[2] is None


def test_bf16_logits_decide_like_their_float32_values():
    rows, draft = [row(seed=i) for i in range(8)], draft_of([[1, 2]] * 8)
    logits = logits_for(rows, draft, TARGET).bfloat16()
    low = Verifier().verify(rows, draft, logits, Uniforms())
    high = Verifier().verify(rows, draft, logits.float(), Uniforms())
    assert low.next_tokens.tolist() == high.next_tokens.tolist()
    assert low.accepted.tolist() == high.accepted.tolist()


def test_a_count_of_logits_that_does_not_fit_the_draft_is_refused():
    with pytest.raises(ValueError, match="3 rows of logits for 2 positions"):
        Verifier().verify([row()], draft_of([[1]]), torch.zeros(3, VOCAB), Uniforms())


def test_an_empty_batch_is_an_empty_verdict():
    verdict = Verifier().verify([], draft_of([]), torch.zeros(0, VOCAB), Uniforms())
    assert verdict.accepted.tolist() == verdict.next_tokens.tolist() == []


@pytest.mark.parametrize("kind", ["dense", "top_k"])
def test_a_law_of_few_tokens_decides_as_whole_rows_would(kind):
    """Position by position: the same acceptance and the same recovered token, by the rule's own
    functions over the whole vocabulary."""
    cold = SamplingParams(temperature=0.4, top_p=0.9)
    mixed = [
        SAMPLED,
        cold,
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1, min_p=0.2),
    ]
    fell = 0
    for seed in range(150):
        rows = [row(one, seed=4 * seed + i) for i, one in enumerate(mixed)]
        draft = _lawful([[(seed + i) % VOCAB] for i in range(4)], kind, seed=seed)
        logits = logits_for(rows, draft, TARGET)
        verdict = Verifier().verify(rows, draft, logits, Uniforms())
        target = to_probs(logits[::2], [r.sampler for r in rows], [[]] * 4).double()
        law = draft.law.probs[:, 0]
        if kind == "top_k":
            law = torch.zeros_like(target).scatter_add_(-1, draft.law.ids[:, 0], law)
        tokens = torch.from_numpy(draft.tokens[:, 0])
        seeds, at = np.array([r.seed for r in rows]), np.array([len(r.tokens) for r in rows])
        drawn, again = (
            torch.from_numpy(Uniforms()(seeds, at, purpose))
            for purpose in (Purpose.ACCEPT, Purpose.NEXT)
        )
        own = [p.gather(-1, tokens[:, None])[:, 0] for p in (law, target)]
        kept = accepts(own[0], own[1], drawn)
        recovered = invert_cdf(residual(law, target), again)
        assert verdict.accepted.tolist() == kept.long().tolist()
        assert verdict.next_tokens[~kept.numpy()].tolist() == recovered[~kept].tolist()
        fell += int((~kept).sum())
    assert 100 < fell < 500


@pytest.mark.parametrize("kind", ["one_hot", "top_k"])
def test_bfloat16_logits_are_decided_as_their_floats(kind):
    mixed = [
        SAMPLED,
        SamplingParams(),
        SamplingParams(temperature=1.0),
        replace(SAMPLED, logprobs=2),
    ]
    rows = [row(one, seed=i) for i, one in enumerate(mixed)]
    draft = _lawful([[i, 2, 3] for i in range(4)], kind)
    logits = logits_for(rows, draft, TARGET).bfloat16()
    found, expected = (
        Verifier().verify(rows, draft, x, Uniforms()) for x in (logits, logits.float())
    )
    assert found.accepted.tolist() == expected.accepted.tolist()
    assert found.next_tokens.tolist() == expected.next_tokens.tolist()
    assert found.logprobs == expected.logprobs
