"""Traps 11, 14 and 15 of the reference list, at the verifier: grammar, penalties, seeds."""

import numpy as np
import pytest

from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import SamplingParams
from tests.sampling.rows import ToyRow, draft_of, generate, hashed, step

A, B, SPACE, EOS = range(4)
LETTERS = Vocabulary(4, (EOS,), tokens=[b"a", b"b", b" ", b"<eos>"])
NOISE = hashed(4, seed=2)


def favoring(*values):
    return lambda prefix: np.array(values, float)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "script",
    [
        [[A, A, B]],  # legal twice, then not
        [[A] * 8],  # legal past the end
        [[A, A, A, A, A, EOS, EOS]],
        [[]],
        [[B, B]],
        [[A, A, B], [], [A] * 8],
        [[EOS], [A, A, A, EOS, A]],
    ],
    ids=str,
)
def test_trap_11_a_grammar_holds_under_any_draft(temperature, script):
    """Exactly aaaaa, then EOS; a neighbor without a grammar goes on as if alone."""
    params = SamplingParams(
        temperature=temperature, grammar={"regex": "a{5}"}, max_tokens=20, seed=1
    )
    free = SamplingParams(temperature=temperature)
    ours = ToyRow(params, [B], LETTERS, seed=1)
    other = ToyRow(free, [B, B], LETTERS, seed=2)
    alone = generate(ToyRow(free, [B, B], LETTERS, seed=2), NOISE, 40, lambda r: [])
    for turn in range(20):
        if EOS in ours.output:
            break
        drafts = [script[turn % len(script)], [A, A]]
        assert step([ours, other], draft_of(drafts), NOISE).errors == {}
    end = ours.output.index(EOS)
    assert ours.output[:end] == [A] * 5
    assert set(ours.output[end:]) == {EOS}
    assert other.output == alone[: len(other.output)]


def test_trap_14_frequency_penalty_counts_tokens_not_steps():
    """Plain decoding flips from a to b when a has been seen three times."""
    params = SamplingParams(frequency_penalty=0.5)
    target = favoring(2.2, 1.0, -5.0, -5.0)
    expected = generate(ToyRow(params, [SPACE], LETTERS), target, 12, lambda r: [])
    assert expected[:4] == [A, A, A, B]
    for draft_len in (1, 4, 8):
        drafter = lambda r, k=draft_len: expected[len(r.output) : len(r.output) + k]  # noqa: E731
        row = ToyRow(params, [SPACE], LETTERS)
        assert generate(row, target, 12, drafter) == expected
    verdict = step([ToyRow(params, [SPACE], LETTERS)], draft_of([[A] * 6]), target)
    assert verdict.accepted.tolist() == [3]
    assert verdict.next_tokens.tolist() == [B]


def test_trap_14_min_tokens_allows_eos_at_exactly_the_seventh():
    params = SamplingParams(min_tokens=6)
    wants_eos = favoring(1.0, 0.0, 0.0, 9.0)
    verdict = step([ToyRow(params, [B], LETTERS)], draft_of([[A] * 8]), wants_eos)
    assert verdict.accepted.tolist() == [6]
    assert verdict.next_tokens.tolist() == [EOS]


def test_trap_14_a_bad_word_inside_a_draft():
    """ "ab" is banned: the draft that spells it falls at b, whether a is drafted or committed."""
    params = SamplingParams(bad_words=("ab",))
    likes_b = favoring(0.0, 5.0, -1.0, -9.0)
    verdict = step([ToyRow(params, [SPACE], LETTERS)], draft_of([[B, B, A, B]]), likes_b)
    assert verdict.accepted.tolist() == [2]  # greedy wants b, not a
    likes_a = favoring(5.0, 4.0, -1.0, -9.0)
    row = ToyRow(params, [SPACE], LETTERS)
    verdict = step([row], draft_of([[A, B]]), likes_a)
    assert (verdict.accepted.tolist(), verdict.next_tokens.tolist()) == ([1], [A])


def test_trap_15_seeds():
    """One seed, one text; sixty-four seeds, many."""
    params = SamplingParams(temperature=1.0)
    texts = [
        tuple(generate(ToyRow(params, [B], LETTERS, seed=s), NOISE, 10, lambda r: []))
        for s in (*range(64), 5)
    ]
    assert texts[64] == texts[5]
    assert len(set(texts)) > 50
