"""Text as it streams: stop strings over token borders, split characters, nothing leaked."""

import pytest

from slipstream.engine import LLM
from slipstream.engine.text import TokenText
from slipstream.models.tiny import tiny_model, tiny_tokenizer
from slipstream.types import FinishReason, SamplingParams
from tests.helpers import PerfectDrafter

TOKENIZER = tiny_tokenizer(320).backend_tokenizer  # one token a byte


def feed(text, stops=(), *, may_stop=True):
    stream = TokenText(TOKENIZER, stops)
    pieces, stopped = [], False
    for token in TOKENIZER.encode(text).ids:
        stopped = stream.push(token, may_stop=may_stop)
        pieces.append(stream.delta(finished=stopped))
        if stopped:
            break
    if not stopped:
        pieces.append(stream.delta(finished=True))
    return stream, pieces, stopped


@pytest.mark.parametrize("stop", ["END", "x END", "D"])
def test_a_stop_string_over_several_tokens_is_cut_and_never_streamed(stop):
    stream, pieces, stopped = feed("some text END and more", (stop,))
    assert stopped == (stop in "some text END and more")
    expected = "some text END and more".partition(stop)[0] if stopped else "some text END and more"
    assert stream.final() == "".join(pieces) == expected


def test_the_earliest_of_several_stop_strings_wins():
    stream, pieces, _ = feed("alpha beta", ("pha b", "a b"))
    assert stream.final() == "".join(pieces) == "al"


def test_what_may_become_a_stop_string_is_held_back_until_it_does_not():
    _, pieces, stopped = feed("EN route", ("END",))
    assert not stopped
    assert "".join(pieces) == "EN route"
    assert all("END" not in p for p in pieces)


def test_a_stop_string_before_min_tokens_does_not_count():
    stream, pieces, stopped = feed("END later", ("END",), may_stop=False)
    assert not stopped
    assert stream.final() == "".join(pieces) == "END later"


def test_a_character_of_several_tokens_appears_whole():
    _, pieces, _ = feed("aé😀b")
    assert "".join(pieces) == "aé😀b"
    assert not any("\ufffd" in p for p in pieces)


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny_model())


def test_streamed_text_and_tokens_add_up_to_the_completion(llm):
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=2)
    texts, tokens, done = {}, {}, {}
    for output in llm.fork("ngram:4,min=1").stream([[70, 71, 70, 71], [80] * 9], params):
        texts[output.request_id] = texts.get(output.request_id, "") + output.text
        tokens[output.request_id] = tokens.get(output.request_id, ()) + output.tokens
        if output.completion:
            done[output.request_id] = output.completion
    assert len(done) == 2
    for request_id, completion in done.items():
        assert texts[request_id] == completion.text
        assert tokens[request_id] == completion.token_ids


def test_leaving_a_stream_early_cancels_what_still_runs(llm):
    stream = llm.stream([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert not llm.engine.has_work


@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_a_stop_string_inside_an_accepted_run(llm, draft_len):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (free,) = llm.generate([40, 41, 42], params)
    assert len(free.text) > 12
    stop = free.text[5:8]
    cut = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop,))
    (expected,) = llm.generate([40, 41, 42], cut)
    arm = llm.fork("none")
    arm.engine.drafter = PerfectDrafter({0: [40, 41, 42, *free.token_ids]}, draft_len)
    arm.engine.controller = _Always(draft_len)
    (found,) = arm.generate([40, 41, 42], cut)
    assert found.finish_reason is expected.finish_reason is FinishReason.STOP
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    assert stop not in found.text
    assert max(r.accepted for r in found.records) > 0


class _Always:
    def __init__(self, draft_len):
        self._draft_len = draft_len

    def plan(self, rows):
        import numpy as np

        return np.full(len(rows), self._draft_len, np.int64)

    def observe(self, records): ...


def test_a_call_made_while_a_stream_is_open_takes_nothing_from_it(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    (expected,) = llm.generate([5, 6, 7], params)
    stream = llm.stream([5, 6, 7], params)
    tokens = next(stream).tokens
    (other,) = llm.generate([8, 9], params)
    assert len(other.token_ids) == 12
    for output in stream:
        tokens += output.tokens
    assert tokens == expected.token_ids


def test_dropping_an_unread_stream_cancels_its_requests(llm):
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    del stream
    assert not llm.engine.has_work


def test_a_streamed_request_cancelled_from_outside_ends_its_stream(llm):
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=200, ignore_eos=True))
    llm.engine.cancel(next(stream).request_id)
    assert list(stream) == []


def test_a_stop_string_completed_before_min_tokens_does_not_fire_later():
    stream = TokenText(TOKENIZER, ("ab", "0123456789"))
    ids = TOKENIZER.encode("abc").ids
    assert [stream.push(t, may_stop=i == 2) for i, t in enumerate(ids)] == [False] * 3


def test_an_exhausted_pool_still_hands_out_the_held_back_text():
    small = LLM(tiny_model(), kv_tokens=32, prefix_cache=False)
    params = SamplingParams(max_tokens=200, ignore_eos=True, stop=("never to be seen at all",))
    outputs = list(small.stream([70, 71, 72], params))
    assert outputs[-1].completion.finish_reason is FinishReason.LENGTH
    assert "".join(o.text for o in outputs) == outputs[-1].completion.text


@pytest.mark.parametrize("chunk", [16, 512])
def test_a_nan_early_in_a_long_prompt_is_an_error_however_it_is_cut(chunk):
    loaded = tiny_model("mistral")  # its head is its own
    loaded.model.embedding[77] = float("nan")
    broken = LLM(loaded, prefill_chunk=chunk)
    good = [5, 6] * 30
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    bad, fine = broken.generate([[77, *good], good], params)
    assert bad.finish_reason is FinishReason.ERROR
    assert "NaN" in bad.error
    assert fine.finish_reason is FinishReason.LENGTH
    assert broken.generate([[77, *good]], params)[0].cached_tokens == 0
