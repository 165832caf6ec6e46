"""The loop on a toy target with a readable cache: the tokens of plain decoding, come what may."""

import numpy as np
import pytest

from slipstream.drafters.none import NoneDrafter
from slipstream.errors import InvalidRequest
from slipstream.types import FinishReason, SamplingParams
from tests.engine.toy import Oracle, argmax_of, counting_logits, hashed_logits, run, toy_engine

LOGITS = hashed_logits(32, seed=3)


def plain(jobs, **kwargs):
    return run(toy_engine(LOGITS, NoneDrafter(), **kwargs), jobs)


def ids(completions):
    return [c.token_ids for c in completions]


def jobs(count, *, tokens=20, temperature=0.0):
    rng = np.random.default_rng(count)
    return [
        (
            rng.integers(0, 32, rng.integers(1, 30)).tolist(),
            SamplingParams(max_tokens=tokens + i, temperature=temperature, seed=i),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("draft_len", range(1, 9))
@pytest.mark.parametrize("wrong_every", [0, 1, 2, 3])
def test_speculation_changes_no_token(draft_len, wrong_every):
    work = jobs(16)
    oracle = Oracle(argmax_of(LOGITS), draft_len, wrong_every=wrong_every)
    assert ids(run(toy_engine(LOGITS, oracle), work)) == ids(plain(work))


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_deterministic_drafter_changes_no_sampled_token_either(temperature):
    work = jobs(16, temperature=temperature)
    oracle = Oracle(argmax_of(LOGITS), 4)
    assert ids(run(toy_engine(LOGITS, oracle), work)) == ids(plain(work))


def test_one_target_forward_a_step_and_records_add_up():
    engine = toy_engine(LOGITS, Oracle(argmax_of(LOGITS), 3, wrong_every=4), max_users=5)
    done = run(engine, jobs(12))
    assert engine.target.forwards == engine.steps
    for c in done:
        assert sum(r.committed for r in c.records) == len(c.token_ids)
        assert [r.prefill for r in c.records] == [True] + [False] * (len(c.records) - 1)
        assert all(0 <= r.accepted <= r.drafted for r in c.records)
        assert all(r.times.total > 0 for r in c.records)
        assert sum(c.timings.chunk_tokens) == len(c.token_ids)


def test_a_perfect_drafter_takes_draft_len_plus_one_tokens_a_step():
    engine = toy_engine(LOGITS, Oracle(argmax_of(LOGITS), 4))
    (done,) = run(engine, [([1, 2, 3], SamplingParams(max_tokens=21))])
    assert [r.committed for r in done.records] == [1, 5, 5, 5, 5]


def test_alone_and_in_a_crowd_are_the_same():
    work = jobs(16, temperature=1.0)
    together = ids(plain(work))
    alone = [plain([job])[0].token_ids for job in work]
    reordered = ids(plain(work[::-1]))[::-1]
    assert together == alone == reordered


def test_sixty_four_users_of_a_hundred_requests():
    work = jobs(100, tokens=6)
    oracle = Oracle(argmax_of(LOGITS), 3, wrong_every=3)
    engine = toy_engine(LOGITS, oracle, max_users=64, num_pages=512)
    assert ids(run(engine, work)) == ids(plain(work, max_users=1))
    assert engine.target.pool.available == 512


def test_unseeded_requests_differ():
    work = [([5, 6], SamplingParams(max_tokens=8, temperature=1.0))] * 64
    assert len(set(ids(plain(work)))) > 1


def test_prompts_are_prefilled_in_chunks_beside_decoding_rows():
    work = jobs(10)
    engine = toy_engine(LOGITS, Oracle(argmax_of(LOGITS), 2), prefill_chunk=7, max_users=6)
    assert ids(run(engine, work)) == ids(plain(work))
    assert max(engine.target.fed) <= 7 + 6 * 3


@pytest.mark.parametrize("draft_len", [1, 4])
def test_preemption_when_pages_run_out_changes_nothing(draft_len):
    work = jobs(8, tokens=30, temperature=1.0)
    oracle = Oracle(argmax_of(LOGITS), draft_len)
    engine = toy_engine(LOGITS, oracle, num_pages=30, max_users=8, prefix_cache=False)
    assert ids(run(engine, work)) == ids(plain(work))
    assert engine.scheduler.preemptions > 0
    assert sorted(oracle.opened) == sorted(oracle.closed)
    assert engine.target.pool.available == 30


def test_a_pool_too_small_for_one_request_ends_it_with_length():
    engine = toy_engine(LOGITS, NoneDrafter(), num_pages=4, page_size=4)
    (done,) = run(engine, [([1] * 10, SamplingParams(max_tokens=50))])
    assert done.finish_reason is FinishReason.LENGTH
    assert len(done.token_ids) == 7  # 16 cells hold the prompt and 6 outputs; the 7th is not fed
    assert done.token_ids == plain([([1] * 10, SamplingParams(max_tokens=7))])[0].token_ids


def test_prefix_reuse_only_ever_hits_verified_tokens():
    first = list(range(1, 12))
    oracle = Oracle(argmax_of(LOGITS), 3, wrong_every=2)
    engine = toy_engine(LOGITS, oracle, page_size=4)
    (a,) = run(engine, [(first, SamplingParams(max_tokens=23))])
    second = first + list(a.token_ids) + [9, 9]
    (b,) = run(engine, [(second, SamplingParams(max_tokens=15))])
    assert b.cached_tokens == 4 * ((len(first) + 22) // 4)  # all of a's full, verified pages
    assert b.token_ids == plain([(second, SamplingParams(max_tokens=15))])[0].token_ids
    engine.reset()
    (cold,) = run(engine, [(second, SamplingParams(max_tokens=2))])
    assert cold.cached_tokens == 0


def test_draft_positions_never_pass_the_context_limit():
    engine = toy_engine(LOGITS, Oracle(argmax_of(LOGITS), 8), max_context=32)
    (done,) = run(engine, [(list(range(20)), SamplingParams(max_tokens=100))])
    assert done.finish_reason is FinishReason.LENGTH
    assert len(done.token_ids) == 12
    assert done.token_ids == plain([(list(range(20)), SamplingParams(max_tokens=12))])[0].token_ids


def test_cancelling_frees_pages_and_leaves_others_alone():
    work = jobs(4)
    engine = toy_engine(LOGITS, Oracle(argmax_of(LOGITS), 2), prefix_cache=False)
    request_ids = [engine.submit(p, s) for p, s in work]
    engine.step()
    cancelled = engine.cancel(request_ids[1])
    assert cancelled.finish_reason is FinishReason.CANCELLED
    assert engine.cancel(request_ids[1]) is None
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    expected = ids(plain(work))
    assert all(done[i].token_ids == expected[i] for i in (0, 2, 3))
    assert engine.target.pool.available == engine.target.pool.num_pages


def test_non_finite_logits_end_one_request_with_a_sentence():
    def broken(prefix):
        logits = LOGITS(prefix)
        return logits * np.nan if prefix[0] == 13 else logits

    work = [([1, 2], SamplingParams(max_tokens=9)), ([13, 2], SamplingParams(max_tokens=9))]
    engine = toy_engine(broken, Oracle(argmax_of(LOGITS), 2))
    good, bad = run(engine, work)
    assert bad.finish_reason is FinishReason.ERROR
    assert "logits" in bad.error
    assert good.token_ids == plain(work[:1])[0].token_ids
    (again,) = run(engine, [([13, 2] * 6, SamplingParams(max_tokens=9))])
    (again,) = run(engine, [([13, 2] * 6, SamplingParams(max_tokens=9))])
    assert again.cached_tokens == 0, "broken keys and values must not be reused"


@pytest.mark.parametrize("logprobs", [None, 0])
@pytest.mark.parametrize("stop_first", [False, True])
@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_broken_logits_behind_accepted_tokens_cost_none_of_them(draft_len, stop_first, logprobs):
    """The answer is the one of plain decoding, error or stop included."""

    def broken(prefix):
        return LOGITS(prefix) * (np.nan if len(prefix) >= 9 else 1)

    free = plain([([1, 2], SamplingParams(max_tokens=9))])[0].token_ids
    stops = (free[5],) if stop_first else ()
    work = [([1, 2], SamplingParams(max_tokens=20, stop_token_ids=stops, logprobs=logprobs))]
    (expected,) = run(toy_engine(broken, NoneDrafter()), work)
    (found,) = run(toy_engine(broken, Oracle(argmax_of(LOGITS), draft_len)), work)
    assert found.token_ids == expected.token_ids
    assert free[5] not in free[:5]
    assert len(found.token_ids) == (6 if stop_first else 7)
    assert (found.finish_reason, found.error) == (expected.finish_reason, expected.error)
    assert found.logprobs == expected.logprobs
    assert sum(found.timings.chunk_tokens) == len(found.token_ids)


@pytest.mark.parametrize(
    ("prompt", "says"), [([], "empty"), ([1] * 300, "300 tokens"), ([99], "id 99"), ([-1], "-1")]
)
def test_bad_prompts_are_refused_in_one_sentence(prompt, says):
    engine = toy_engine(LOGITS, NoneDrafter())
    with pytest.raises(InvalidRequest, match=says):
        engine.submit(prompt, SamplingParams())
    assert not engine.has_work


def test_answers_of_one_seed_differ_and_the_first_is_the_single_answer():
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=5)
    engine = toy_engine(LOGITS, NoneDrafter())
    request_ids = [engine.submit([1, 2, 3], params, index=i) for i in range(3)]
    done = {}
    while engine.has_work:
        done |= {o.request_id: o.completion for o in engine.step() if o.completion}
    answers = [done[i].token_ids for i in request_ids]
    assert len(set(answers)) == 3
    assert answers[0] == plain([([1, 2, 3], params)])[0].token_ids


def test_a_new_request_starts_with_an_empty_drafter():
    oracle = Oracle(argmax_of(LOGITS), 2)
    engine = toy_engine(LOGITS, oracle, max_users=1)
    run(engine, jobs(3))
    assert oracle.opened == oracle.closed == [0, 1, 2]


def test_counting_target_counts():
    (done,) = run(
        toy_engine(counting_logits(32), NoneDrafter()), [([30], SamplingParams(max_tokens=4))]
    )
    assert done.token_ids == (31, 0, 1, 2)
