"""Penalties, bias and bans: per token, also inside a draft, and pure until committed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import InvalidRequest
from slipstream.sampling.probs import process_logits
from slipstream.sampling.state import RowSampler
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import SamplingParams

BYTES = [b"", b"a", b"b", b"c", b" ", b"ab", b" a", b"<eos>"]
TOY = Vocabulary(8, (7,), tokens=BYTES)
NEG = float("-inf")


def by_the_book(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]
) -> np.ndarray:
    """Penalties and bias of one position, token by token."""
    scores = logits.astype(np.float64).copy()
    for token in range(len(scores)):
        count = output.count(token)
        if token in prompt or count:
            repeat = params.repetition_penalty
            scores[token] = scores[token] / repeat if scores[token] > 0 else scores[token] * repeat
        if count:
            scores[token] -= params.presence_penalty + params.frequency_penalty * count
        scores[token] += params.logit_bias.get(token, 0.0)
    return scores


tokens = st.lists(st.integers(0, 7), max_size=8)


@given(
    prompt=tokens,
    output=tokens,
    prefix=tokens,
    repeat=st.sampled_from([1.0, 1.3, 0.7]),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.25]),
    bias=st.dictionaries(st.integers(0, 7), st.floats(-5, 5), max_size=3),
    cut=st.integers(0, 8),
)
@settings(max_examples=200, deadline=None)
def test_penalties_match_the_book_wherever_tokens_come_from(
    prompt, output, prefix, repeat, presence, frequency, bias, cut
):
    """Committed in pieces or seen as a draft prefix: the same scores."""
    params = SamplingParams(
        repetition_penalty=repeat,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=bias,
    )
    logits = np.random.default_rng(0).normal(size=8).astype(np.float32)
    sampler = RowSampler(params, TOY, prompt)
    sampler.commit(output[:cut])
    sampler.commit(output[cut:])
    expected = by_the_book(logits, params, prompt, output + prefix)
    for _ in range(2):  # asking changes nothing
        got = process_logits(torch.from_numpy(logits)[None], [sampler], [prefix])
        np.testing.assert_allclose(got[0], expected, atol=1e-5)
    sampler.commit(prefix)
    got = process_logits(torch.from_numpy(logits)[None], [sampler], [[]])
    np.testing.assert_allclose(got[0], expected, atol=1e-5)


def test_plain_is_what_needs_no_processing():
    assert RowSampler(SamplingParams(temperature=0.7, top_k=3, top_p=0.5), TOY, [1]).plain
    assert RowSampler(SamplingParams(min_tokens=3), Vocabulary(8, ()), [1]).plain
    for other in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 1.0}},
        {"bad_words": ("a",)},
        {"min_tokens": 1},
        {"grammar": {"regex": "a"}},
    ):
        assert not RowSampler(SamplingParams(**other), TOY, [1]).plain


def test_plain_logits_are_passed_through_untouched():
    logits = torch.randn(2, 8)
    sampler = RowSampler(SamplingParams(temperature=1.0), TOY, [1])
    assert process_logits(logits, [sampler] * 2, [[], [1]]) is logits


@pytest.mark.parametrize("committed", range(4))
def test_min_tokens_bans_enders_until_exactly_enough(committed):
    params = SamplingParams(min_tokens=3, stop_token_ids=(2,), ignore_eos=True)
    sampler = RowSampler(params, TOY, [1])
    sampler.commit([1] * committed)
    for ahead in range(5):
        got = process_logits(torch.zeros(1, 8), [sampler], [[1] * ahead])[0]
        banned = committed + ahead < 3
        assert [t for t in range(8) if got[t] == NEG] == ([2, 7] if banned else [])


def test_bad_words_ban_the_last_token_of_each_form():
    sampler = RowSampler(SamplingParams(bad_words=("abc",)), TOY, [5])
    # "abc" is [ab, c]; " abc" is [" a", b, c]. The prompt's own "ab" does not count.
    banned = {
        (): [],
        (5,): [3],
        (6,): [],
        (6, 2): [3],
        (1, 2): [],
        (5, 1): [],
    }
    for prefix, expected in banned.items():
        got = process_logits(torch.zeros(1, 8), [sampler], [prefix])[0]
        assert [t for t in range(8) if got[t] == NEG] == expected, prefix
    sampler.commit([1, 6])
    got = process_logits(torch.zeros(1, 8), [sampler], [[2]])[0]
    assert got[3] == NEG, "the word may start in committed tokens and end in the draft"


def test_a_one_token_bad_word_is_always_banned():
    sampler = RowSampler(SamplingParams(bad_words=("a",)), TOY, [])
    got = process_logits(torch.zeros(1, 8), [sampler], [[]])[0]
    assert [t for t in range(8) if got[t] == NEG] == [1, 6]


@pytest.mark.parametrize(
    ("params", "prompt", "said"),
    [
        ({"logit_bias": {8: 1.0}}, [], "token id 8"),
        ({"logit_bias": {-1: 1.0}}, [], "token id -1"),
        ({"stop_token_ids": (99,)}, [], "token id 99"),
        ({}, [8], "token id 8"),
        ({"bad_words": ("xyz",)}, [], "xyz"),
        ({"grammar": {"regex": "a("}}, [], "does not compile"),
        ({"grammar": {"lark": "start: nothing"}}, [], "does not compile"),
        ({"grammar": {"json_schema": {"type": "nope"}}}, [], "does not compile"),
        ({"grammar": {"json_schema": "{"}}, [], "does not compile"),
        ({"grammar": {"regex": "a", "lark": "start: A"}}, [], "exactly one"),
        ({"grammar": {"ebnf": "a"}}, [], "exactly one"),
        ({"grammar": {"regex": 3}}, [], "must be a string"),
    ],
)
def test_bad_requests_are_one_sentence(params, prompt, said):
    with pytest.raises(InvalidRequest, match=said) as caught:
        RowSampler(SamplingParams(**params), TOY, prompt)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


def test_text_options_need_a_tokenizer():
    bare = Vocabulary(8, (7,))
    for params in ({"bad_words": ("a",)}, {"grammar": {"regex": "a"}}):
        with pytest.raises(InvalidRequest, match="without a tokenizer"):
            RowSampler(SamplingParams(**params), bare, [])
    with pytest.raises(InvalidRequest, match="EOS"):
        RowSampler(SamplingParams(grammar={"regex": "a"}), Vocabulary(8, (), tokens=BYTES), [])
