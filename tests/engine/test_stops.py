"""Stops, limits and penalties are per token, also inside an accepted run (traps 13 and 14)."""

import numpy as np
import pytest

from slipstream.drafters.none import NoneDrafter
from slipstream.types import FinishReason, SamplingParams
from tests.engine.toy import Oracle, argmax_of, counting_logits, hashed_logits, run, toy_engine

COUNT = counting_logits(32)


def counted(params, *, eos=(), draft_len=6, prompt=(9,), logits=COUNT):
    oracle = Oracle(argmax_of(logits), draft_len)
    engine = toy_engine(logits, oracle, eos=eos)
    (done,) = run(engine, [(prompt, params)])
    (reference,) = run(toy_engine(logits, NoneDrafter(), eos=eos), [(prompt, params)])
    assert done.token_ids == reference.token_ids
    assert done.finish_reason is reference.finish_reason
    return done


def test_stop_inside_an_accepted_run_leaks_nothing():
    done = counted(SamplingParams(max_tokens=5, stop_token_ids=(12,)))
    assert done.token_ids == (10, 11, 12)
    assert done.finish_reason is FinishReason.STOP


def test_eos_inside_an_accepted_run():
    done = counted(SamplingParams(max_tokens=50), eos=(14,))
    assert done.token_ids == (10, 11, 12, 13, 14)
    assert done.finish_reason is FinishReason.STOP


def test_max_tokens_crossed_before_the_stop_is_length():
    done = counted(SamplingParams(max_tokens=2, stop_token_ids=(12,)))
    assert done.token_ids == (10, 11)
    assert done.finish_reason is FinishReason.LENGTH


def test_stop_on_the_last_allowed_token_is_stop():
    done = counted(SamplingParams(max_tokens=3, stop_token_ids=(12,)))
    assert done.finish_reason is FinishReason.STOP


def test_ignore_eos_goes_on():
    done = counted(SamplingParams(max_tokens=8, ignore_eos=True), eos=(12,))
    assert done.token_ids == tuple(range(10, 18))


def eager_eos(prefix):
    """EOS (0) is always likeliest, the next number second."""
    out = COUNT(prefix)
    out[0] = 20.0
    return out


@pytest.mark.parametrize("draft_len", [1, 4, 8])
def test_min_tokens_allows_eos_at_exactly_the_seventh(draft_len):
    done = counted(
        SamplingParams(max_tokens=30, min_tokens=6), eos=(0,), draft_len=draft_len, logits=eager_eos
    )
    assert done.token_ids == (10, 11, 12, 13, 14, 15, 0)


def test_frequency_penalty_counts_every_token_of_an_accepted_run():
    def logits(prefix):
        out = np.zeros(32)
        out[1], out[2] = 1.2, 0.0
        return out

    params = SamplingParams(max_tokens=12, frequency_penalty=0.5)
    done = counted(params, logits=logits, draft_len=4)
    assert done.token_ids[:4] == (1, 1, 1, 0)  # 1.2 - 3 * 0.5 < 0: the fourth cannot be 1


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.1},
        {"logit_bias": {4: 3.0, 7: -100.0}},
        {"top_k": 3, "temperature": 1.0, "seed": 1},
        {"top_p": 0.6, "temperature": 0.8, "seed": 2},
        {"min_p": 0.2, "temperature": 1.2, "seed": 3},
        {"min_tokens": 7},
        {"stop_token_ids": (3, 8)},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "temperature": 0.9, "seed": 4},
        {"logprobs": 2},
    ],
)
@pytest.mark.parametrize("draft_len", range(1, 9))
def test_every_parameter_gives_the_tokens_of_plain_decoding(params, draft_len):
    logits = hashed_logits(16, seed=8, scale=1.0)
    work = [
        (
            np.random.default_rng(i).integers(0, 16, 5).tolist(),
            SamplingParams(max_tokens=24, **params),
        )
        for i in range(16)
    ]
    oracle = Oracle(argmax_of(logits), draft_len, wrong_every=5, vocab=16)
    done = run(toy_engine(logits, oracle, vocab=16, eos=(2,)), work)
    reference = run(toy_engine(logits, NoneDrafter(), vocab=16, eos=(2,)), work)
    assert [c.token_ids for c in done] == [c.token_ids for c in reference]
    assert [c.finish_reason for c in done] == [c.finish_reason for c in reference]
    for mine, theirs in zip(done, reference):
        if params.get("logprobs"):
            assert [p.token for p in mine.logprobs] == list(mine.token_ids)
            assert [p.rank for p in mine.logprobs] == [p.rank for p in theirs.logprobs]
            np.testing.assert_allclose(
                [p.logprob for p in mine.logprobs], [p.logprob for p in theirs.logprobs], atol=1e-6
            )
