"""The offline API: prompts in every form, parameters one or many, and mistakes in one sentence."""

import pytest

from slipstream import LLM, InvalidConfig, InvalidRequest, SamplingParams, SlipstreamError
from slipstream.engine.llm import as_prompts
from slipstream.errors import ModelError
from slipstream.models.tiny import save_tiny, tiny_model


@pytest.fixture(scope="module")
def llm():
    return LLM(tiny_model(), max_users=4)


CHAT = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("given", "count"),
    [("text", 1), ([1, 2], 1), (CHAT, 1), (["a", "b"], 2), ([[1, 2], [3]], 2), ([CHAT, "x"], 2)],
)
def test_prompt_forms(given, count):
    assert len(as_prompts(given)) == count


def test_text_ids_and_messages_of_the_same_content_agree(llm):
    params = SamplingParams(max_tokens=6)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    by_text, by_chat, by_ids = llm.generate([text, CHAT, llm.encode(CHAT)], params)
    assert by_text.token_ids == by_chat.token_ids == by_ids.token_ids


def test_answers_come_in_prompt_order_then_by_index(llm):
    params = [
        SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=1),
        SamplingParams(max_tokens=5),
    ]
    done = llm.generate([[5, 6], [7, 8]], params)
    assert [(len(c.token_ids), c.index) for c in done] == [(3, 0), (3, 1), (5, 0)]


def test_timings_are_the_clients(llm):
    (done,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=5, ignore_eos=True))
    assert sum(done.timings.chunk_tokens) == 5
    assert done.timings.arrived <= done.timings.chunk_times[0] <= done.timings.chunk_times[-1]


@pytest.mark.parametrize(
    ("prompts", "params", "says"),
    [
        ("", None, "empty"),
        ([[1], []], None, "empty"),
        ([1, "a"], None, "not 1"),
        ([[1, "a"]], None, "'a'"),
        ([[1] * 600], None, "600 tokens"),
        ([[1], [2]], [SamplingParams()], "1 params for 2"),
        ([1], SamplingParams(logit_bias={9999: 1.0}), "9999"),
        ([1], SamplingParams(grammar={"regex": "("}), "grammar"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing_running(llm, prompts, params, says):
    with pytest.raises(SlipstreamError, match=says) as caught:
        llm.generate(prompts, params)
    assert "\n" not in str(caught.value).strip()
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"max_tokens": 0},
        {"min_tokens": 200},
        {"n": 0},
        {"logprobs": 21},
        {"seed": -1},
        {"stop": ("",)},
        {"bad_words": "END"},
        {"logit_bias": {1: float("inf")}},
    ],
    ids=str,
)
def test_absurd_sampling_values_are_refused_with_the_value_and_the_range(values):
    name, value = next(iter(values.items()))
    shown = {"stop": "''", "logit_bias": "inf"}.get(name, repr(value))
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**values)
    assert name.split("[")[0] in str(caught.value)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_users": 257}, "257; allowed: 1 to 256"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"threads": 0}, "threads"),
        ({"kv_tokens": 0}, "kv_tokens"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "bfloat16"}, "loaded as"),
        ({"drafter": "ngrm:3"}, "ngram"),
    ],
)
def test_bad_settings(changes, says):
    with pytest.raises(InvalidConfig, match=says):
        LLM(tiny_model(), **changes)


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path):
    save_tiny(tmp_path / "other", vocab_size=300)
    with pytest.raises(SlipstreamError, match="tokenizer"):
        LLM(tiny_model(), drafter=f"draft_model:{tmp_path / 'other'}:3")


def test_scores_are_the_margins_of_the_models_own_greedy_answer(llm):
    (done,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True))
    margins, best, gaps = llm.score([5, 6, 7], done.token_ids)
    assert set(gaps) == {0.0}
    other = [*done.token_ids[:3], (done.token_ids[3] + 1) % 300]
    assert llm.score([5, 6, 7], other)[2][3] >= margins[3] > 0
    assert tuple(best) == done.token_ids
    assert len(margins) == 8
    assert min(margins) >= 0


@pytest.mark.parametrize("tokens", [10**13, 10**15])
def test_a_cache_larger_than_the_memory_is_a_sentence_at_the_start(tokens):
    with pytest.raises(ModelError, match=rf"A cache of {tokens} tokens needs .* GiB.*use fewer"):
        LLM(tiny_model("llama"), kv_tokens=tokens)
