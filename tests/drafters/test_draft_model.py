"""The draft model: its cache follows the committed text, and its law is the one it drew from."""

import numpy as np
import pytest
import torch

from slipstream.drafters.draft_model import CATCH_UP_TOKENS, DraftModelDrafter, check_tokenizer
from slipstream.drafters.specs import DrafterContext, build
from slipstream.engine.llm import LLM
from slipstream.errors import ModelError
from slipstream.models.tiny import save_tiny, tiny_model, tiny_tokenizer
from slipstream.sampling.accept import invert_cdf
from slipstream.sampling.probs import to_probs
from slipstream.sampling.state import RowSampler
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import Dense, OneHot, SamplingParams
from tests.engine.toy import ToyTarget, argmax_of, hashed_logits
from tests.helpers import StubRow, lens, verdict

VOCAB = 32
LOGITS = hashed_logits(VOCAB, seed=5)
NEXT = argmax_of(LOGITS)


def drafter(draft_len=4, *, logits=LOGITS, vocab=VOCAB, **pool) -> DraftModelDrafter:
    toy = ToyTarget(logits, vocab=vocab, **pool)
    return DraftModelDrafter(toy, draft_len, vocab_size=VOCAB, name="draft_model")


def row(tokens, request_id=0, **params) -> StubRow:
    sampling = SamplingParams(**params)
    sampler = RowSampler(sampling, Vocabulary(VOCAB, ()), tokens)
    return StubRow(
        list(tokens), request_id, len(tokens), sampling, seed=request_id + 7, sampler=sampler
    )


def greedy(tokens, count):
    text = list(tokens)
    for _ in range(count):
        text.append(NEXT(tuple(text)))
    return text[len(tokens) :]


@pytest.mark.parametrize("seed", range(8))
def test_drafts_are_the_models_own_text_after_any_course_of_steps(seed):
    rng = np.random.default_rng(seed)
    one = drafter(int(rng.integers(1, 9)), num_pages=256)
    rows = [row(rng.integers(0, VOCAB, rng.integers(1, 20)), i) for i in range(5)]
    one.open(rows)
    for _ in range(12):
        batch = [r for r in rows if rng.random() < 0.8]
        plan = lens(*rng.integers(0, one.max_draft_len + 1, len(batch)))
        before = one.model.forwards
        draft = one.draft(batch, plan)
        assert one.model.forwards - before == plan.max(initial=0)
        for i, r in enumerate(batch):
            assert draft.row(i) == greedy(r.tokens, int(plan[i]))
            kept = int(rng.integers(0, plan[i] + 1))
            r.tokens += [*draft.row(i)[:kept], int(rng.integers(0, VOCAB))]
        one.advance(batch, verdict(len(batch)))
        assert draft.law == OneHot()


def test_a_step_computes_only_what_is_new():
    one = drafter(4)
    r = row(range(20))
    one.open([r])
    one.draft([r], lens(4))
    assert one.model.fed == [20, 1, 1, 1]
    draft = one.draft([r], lens(4))  # asked again without a step: the anchor's logits are missing
    assert one.model.fed[4:] == [1, 1, 1, 1]
    r.tokens += [*draft.row(0), 9]  # all accepted: the last draft token was never computed
    one.draft([r], lens(1))
    assert one.model.fed[8:] == [2]
    r.tokens += [(NEXT(tuple(r.tokens)) + 1) % VOCAB]  # rejected
    one.draft([r], lens(2))
    assert one.model.fed[9:] == [1, 1]
    one.draft([r], lens(0))
    assert len(one.model.fed) == 11


def test_rows_of_one_batch_do_not_see_each_other():
    rows = [row([i, 3, i], i) for i in range(16)]
    one = drafter(3)
    one.open(rows)
    draft = one.draft(rows, lens(*[i % 4 for i in range(16)]))
    for i, r in enumerate(rows):
        assert draft.row(i) == greedy(r.tokens, i % 4)
    assert one.model.forwards == 3


def test_its_context_limit_shortens_drafts_and_never_fails():
    one = drafter(4, max_context=12)
    for length, expected in ((8, 4), (9, 4), (10, 3), (12, 1), (13, 0), (20, 0)):
        r = row([1] * length, length)
        one.open([r])
        assert one.draft([r], lens(4)).lens.tolist() == [expected]
        one.close([length])
    assert one.model.pool.available == one.model.pool.num_pages


def test_without_pages_a_row_drafts_nothing_until_there_are_some():
    one = drafter(4, num_pages=8, page_size=4)
    first, second = row(range(20), 0), row(range(8, 28), 1)
    one.open([first, second])
    draft = one.draft([first, second], lens(4, 4))
    assert draft.row(0) == greedy(first.tokens, 4)
    assert draft.row(1) == []
    one.close([0, 99])
    assert one.draft([second], lens(4)).row(0) == greedy(second.tokens, 4)


def test_a_long_prompt_is_taken_in_over_steps_without_holding_up_the_others():
    one = drafter(2, num_pages=1024, page_size=4, max_context=4096)
    long, short = row([1, 2, 3] * 400, 0), row([4, 5], 1)
    one.open([long, short])
    drafted = [one.draft([long, short], lens(2, 2)) for _ in range(3)]
    assert [d.lens.tolist() for d in drafted] == [[0, 2], [0, 2], [2, 2]]
    assert max(one.model.fed) <= CATCH_UP_TOKENS
    assert drafted[2].row(0) == greedy(long.tokens, 2)
    assert all(d.row(1) == greedy(short.tokens, 2) for d in drafted)


def test_a_repeated_prompt_is_computed_once_until_reset():
    one = drafter(2, num_pages=64, page_size=4)
    for request_id, fed in ((0, 21), (1, 1), (2, 21)):
        if request_id == 2:
            one.reset()
        r = row(range(21), request_id)
        one.open([r])
        del one.model.fed[:]
        assert one.draft([r], lens(1)).row(0) == greedy(r.tokens, 1)
        assert one.model.fed == [fed]
        one.close([request_id])


def test_only_committed_tokens_are_reusable():
    one = drafter(8, num_pages=64, page_size=4)
    first = row(range(10), 0)
    one.open([first])
    guessed = one.draft([first], lens(8)).row(0)
    first.tokens.append((guessed[0] + 1) % VOCAB)
    one.draft([first], lens(8))
    again = row([*range(10), *guessed], 1)  # begins with tokens that were drafted, then rejected
    one.open([again])
    assert one.draft([again], lens(3)).row(0) == greedy(again.tokens, 3)


def broken(prefix):
    logits = LOGITS(prefix)
    return np.full(VOCAB, np.nan) if prefix[0] == 13 else logits


def test_a_row_whose_draft_logits_are_not_finite_drafts_nothing():
    one = drafter(3, logits=broken)
    rows = [row([13, 1], 0), row([2, 1], 1), row([13, 2], 2, temperature=1.0)]
    one.open(rows)
    assert one.draft(rows, lens(3, 3, 3)).lens.tolist() == [0, 3, 0]


def test_sampled_rows_carry_the_law_they_were_drawn_from():
    one = drafter(3)
    settings = [
        {"temperature": 0.7, "top_p": 0.8},
        {},
        {"temperature": 1.3, "frequency_penalty": 1.5, "logit_bias": {4: 3.0}},
    ]
    rows = [row([i, 3, 5], i, **s) for i, s in enumerate(settings)]
    one.open(rows)
    draft = one.draft(rows, lens(3, 2, 3))
    assert draft.lens.tolist() == [3, 2, 3]
    assert isinstance(draft.law, Dense)
    assert draft.law.probs.shape == (3, 3, VOCAB)
    for i, r in enumerate(rows):
        tokens = draft.row(i)
        for j, token in enumerate(tokens):
            logits = torch.tensor(LOGITS((*r.tokens, *tokens[:j])), dtype=torch.float32)
            expected = to_probs(logits[None], [r.sampler], [tokens[:j]])
            assert torch.equal(draft.law.probs[i, j], expected[0])
            at = np.array([len(r.tokens) + j])
            drawn = Uniforms()(np.array([r.seed]), at, Purpose.DRAFT)
            assert token == int(invert_cdf(expected, torch.from_numpy(drawn)))
    assert draft.row(1) == greedy(rows[1].tokens, 2)


def test_the_same_seed_drafts_the_same_alone_and_in_a_batch():
    rows = [row([i, 3, 5], i, temperature=1.0) for i in range(16)]
    together = drafter(4)
    together.open(rows)
    batch = together.draft(rows, lens(*[4] * 16))
    for i in (0, 7, 15):
        alone = drafter(4)
        alone.open([rows[i]])
        assert alone.draft([rows[i]], lens(4)).row(0) == batch.row(i)
    assert len({tuple(batch.row(i)) for i in range(16)}) > 1


@pytest.mark.parametrize("width", [VOCAB - 4, VOCAB + 4])
def test_vocabularies_padded_to_other_widths_are_fitted(width):
    logits = hashed_logits(width, seed=1)
    one = drafter(2, logits=logits, vocab=width)
    r = row([1, 2], temperature=2.0)
    one.open([r])
    draft = one.draft([r], lens(2))
    assert draft.lens.tolist() == [2]
    assert draft.law.probs.shape[-1] == VOCAB
    assert torch.allclose(draft.law.probs.sum(-1), torch.ones(1, 2))
    assert max(draft.row(0)) < min(width, VOCAB)


def test_a_token_the_draft_model_does_not_know_means_no_draft():
    one = drafter(2, logits=hashed_logits(20), vocab=20)
    rows = [row([1, 25], 0), row([1, 2], 1)]
    one.open(rows)
    assert one.draft(rows, lens(2, 2)).lens.tolist() == [0, 2]


def context(tokenizer, vocab=320) -> DrafterContext:
    return DrafterContext(
        vocab_size=vocab,
        max_context=512,
        max_users=2,
        tokenizer=tokenizer,
        dtype=torch.float32,
    )


def test_another_tokenizer_is_refused_at_build(tmp_path):
    save_tiny(tmp_path / "draft")
    spec = f"draft_model:{tmp_path / 'draft'}:3"
    drafter = build(spec, context=context(tiny_tokenizer(320)))
    assert drafter.name == spec
    with pytest.raises(ModelError, match=r"has 320 tokens, the target's 300.*\.$"):
        build(spec, context=context(tiny_tokenizer(300)))
    renamed = tiny_tokenizer(320)
    renamed.get_vocab = lambda: {
        ("other" if i == 77 else t): i for t, i in tiny_tokenizer(320).get_vocab().items()
    }
    with pytest.raises(ModelError, match=r"token 'other' is 77 in the target and None there"):
        build(spec, context=context(renamed))
    with pytest.raises(ModelError, match="320 tokens and the target 64"):
        check_tokenizer(tiny_model(), context(None, vocab=64))


def test_a_missing_model_is_one_sentence():
    with pytest.raises(ModelError, match="nowhere"):
        build("draft_model:/nowhere/at/all:3", context=context(tiny_tokenizer()))


PROMPTS = [[5, 6, 7, 8, 9], list(range(40, 75)), [3]]


@pytest.mark.parametrize("draft_len", [1, 3, 8])
def test_the_target_as_its_own_draft_model_is_always_accepted(tmp_path, draft_len):
    save_tiny(tmp_path / "same")
    llm = LLM(tmp_path / "same", dtype="float32", max_users=4)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = llm.generate(PROMPTS, params)
    drafted = llm.fork(f"draft_model:{tmp_path / 'same'}:{draft_len}").generate(PROMPTS, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    steps = [r for c in drafted for r in c.records if not r.prefill]
    assert sum(r.drafted for r in steps) > 0
    assert all(r.accepted == r.drafted for r in steps)


def test_a_different_draft_model_changes_no_greedy_token(tmp_path):
    save_tiny(tmp_path / "target")
    save_tiny(tmp_path / "draft", "qwen3", seed=9)
    llm = LLM(tmp_path / "target", dtype="float32", max_users=4)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = llm.generate(PROMPTS, params)
    drafted = llm.fork(f"draft_model:{tmp_path / 'draft'}:4").generate(PROMPTS, params)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert any(r.accepted < r.drafted for c in drafted for r in c.records)
