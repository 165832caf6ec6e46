"""Grammar masks along a draft path: looked ahead and rolled back, never stuck."""

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from slipstream.sampling.grammar import Grammar
from slipstream.sampling.probs import process_logits
from slipstream.sampling.state import RowSampler
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import SamplingParams

A, B, AA, AB, PAD, EOS, AAA, EOT = range(8)
TOY = Vocabulary(10, (EOS, EOT), tokens=[b"a", b"b", b"aa", b"ab", b"", b"<e>", b"aaa", b"<t>"])


def legal(grammar: Grammar, prefix: list[int]) -> list[int] | None:
    mask = grammar.mask(prefix)
    return None if mask is None else np.flatnonzero(mask).tolist()


def test_masks_along_every_path_of_a_counted_regex():
    grammar = Grammar({"regex": "[ab]{4}"}, TOY)
    width = {A: 1, B: 1, AA: 2, AB: 2, AAA: 3}

    def walk(prefix: list[int], letters: int) -> None:
        expected = [t for t in width if letters + width[t] <= 4]
        assert legal(grammar, prefix) == (sorted(expected) or [EOS, EOT])
        assert legal(grammar, [*prefix, PAD]) is None
        for token in expected:
            walk([*prefix, token], letters + width[token])
        if not expected:
            assert legal(grammar, [*prefix, EOS]) == [EOS, EOT]
            assert legal(grammar, [*prefix, EOS, EOT]) == [EOS, EOT]
            assert legal(grammar, [*prefix, A]) is None
            assert legal(grammar, [*prefix, EOS, A]) is None

    walk([], 0)


def test_a_mask_depends_on_the_prefix_not_on_the_way_there():
    """Forced text has one tokenization in llguidance; looking around must not change which."""
    used = Grammar({"regex": "a{5}(b|aab)?"}, TOY)
    prefixes = [[], [AAA], [AAA, AA], [A], [AA, AA, A, B], [AAA, AA, AAA], [A] * 5, [AAA, B], [EOS]]
    for prefix in [*prefixes, *prefixes[::-1]]:
        assert legal(used, prefix) == legal(Grammar({"regex": "a{5}(b|aab)?"}, TOY), prefix)


def test_an_optional_end_allows_eos_and_text():
    grammar = Grammar({"regex": "a+"}, TOY)
    assert legal(grammar, []) == [A, AA, AAA]
    assert legal(grammar, [A]) == [A, AA, EOS, AAA, EOT]
    assert legal(grammar, [A, EOS]) == [EOS, EOT]
    assert legal(grammar, [A, A]) == [A, AA, EOS, AAA, EOT]


def test_commit_continues_a_path_that_was_looked_at():
    grammar = Grammar({"regex": "[ab]{5}"}, TOY)
    grammar.mask([AA, A, A])
    grammar.commit([AA, A])
    assert legal(grammar, []) == [A, B, AA, AB]
    grammar.mask([A, A, EOS])
    grammar.commit([A])
    grammar.commit([A])
    assert legal(grammar, []) == [EOS, EOT]
    grammar.commit([EOS, EOS])  # ignore_eos goes on after the end
    assert legal(grammar, []) == [EOS, EOT]
    with pytest.raises(ValueError, match="against the grammar"):
        grammar.commit([A])


def test_a_ban_that_leaves_nothing_ends_the_answer():
    """min_tokens bans EOS where the grammar allows nothing else: EOS it is."""
    params = SamplingParams(grammar={"regex": "aa"}, min_tokens=9)
    sampler = RowSampler(params, TOY, [])
    got = process_logits(torch.arange(10.0)[None], [sampler], [[AA]])[0]
    assert torch.isfinite(got).nonzero().flatten().tolist() == [EOS, EOT]
    got = process_logits(torch.arange(10.0)[None], [sampler], [[A]])[0]
    assert torch.isfinite(got).nonzero().flatten().tolist() == [A]


@pytest.fixture(scope="module")
def hugging_face() -> Vocabulary:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    text = ['{"name": "Ada", "age": 36}', '{"name": "Émile", "age": 7}', "true false null"] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(text, trainer)
    backend.enable_truncation(4)  # must neither matter to the grammar nor be lost
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    eos = tokenizer.convert_tokens_to_ids("<|end|>")
    return Vocabulary.from_tokenizer(tokenizer, size=len(tokenizer) + 13, eos_ids=(eos,))


def test_json_schema_over_a_hugging_face_tokenizer(hugging_face):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    grammar = Grammar({"json_schema": schema}, hugging_face)
    ids = [
        i
        for part in ('{"name"', ': "Ém', 'ile"', ', "age', '": 3', "6}")
        for i in hugging_face.encode(part)
    ]
    for end in range(len(ids)):
        mask = grammar.mask(ids[:end])
        assert mask is not None
        assert mask.shape == (hugging_face.size,)
        assert mask[ids[end]], hugging_face.decode(ids[:end])
        assert not mask[hugging_face.eos_ids[0]]
        assert not mask[-13:].any(), "ids without text are never legal"
    assert np.flatnonzero(grammar.mask(ids)).tolist() == list(hugging_face.eos_ids)
    assert grammar.mask(hugging_face.encode('{"age": 1, "x"')) is None


def test_text_round_trip(hugging_face):
    for text in ("Ada", " Émile ", '{"a" :1}'):
        ids = hugging_face.encode(text)
        assert all(i < hugging_face.size for i in ids)
    eos = hugging_face.eos_ids[0]
    ids = [*hugging_face.encode("Ada"), eos]
    assert hugging_face.decode(ids) == "Ada"
    assert hugging_face.decode(ids, skip_special=False) == "Ada<|end|>"
