"""Checkpoints of the speculators library, as its trainer writes them, and reduced vocabularies."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.engine import LLM
from slipstream.errors import InvalidConfig, ModelError
from slipstream.models.dflash import DFlashConfig, load_dflash, save_dflash
from slipstream.models.dspark import DSparkConfig, load_dspark, save_dspark
from slipstream.models.eagle3 import Eagle3Config, load_eagle3, save_eagle3
from slipstream.models.speculators import flattened
from slipstream.models.tiny import tiny_config, tiny_model
from slipstream.sampling.probs import shape_probs
from slipstream.sampling.state import RowSampler
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.types import SamplingParams, Span
from tests.helpers import StubRow

LOADED = tiny_model("llama", layers=4)
TARGET = LOADED.model
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
LOAD = {"eagle3": load_eagle3, "dflash": load_dflash, "dspark": load_dspark}
SAVE = {"eagle3": save_eagle3, "dflash": save_dflash, "dspark": save_dspark}


@dataclass
class Row(StubRow):
    pages: tuple[int, ...] = tuple(range(8))


def flash(layers=2, draft_vocab=None, block=5):
    model = tiny_config("qwen3", num_hidden_layers=layers, num_key_value_heads=3)
    return DFlashConfig(model, block, 319, (2, 4), draft_vocab=draft_vocab)


def random_tensors(config, seed=3):
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in config.shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[name] = 1 + 0.3 * noise if len(shape) == 1 else noise * 1.5 / shape[1] ** 0.5
    if "d2t" in tensors:  # draft token i stands for target token 2 * i
        tensors["d2t"] = torch.arange(len(tensors["d2t"]))
    return tensors


def foreign(folder, kind, layers, tensors, **own):
    """What the library's `save_pretrained` leaves behind."""
    folder.mkdir(parents=True, exist_ok=True)
    hf = {
        "architectures": [{"eagle3": "Eagle3", "dflash": "DFlash", "dspark": "DSpark"}[kind]
                          + "DraftModel"],
        "auto_map": {"": "config.SpeculatorConfig"},
        "dtype": "bfloat16",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "x"},
        },
        "speculators_model_type": kind,
        "speculators_version": "0.8.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": {**layers, "tie_word_embeddings": False},
        **own,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(hf))
    whole = {n: t.contiguous() for n, t in tensors.items()}
    if "d2t" in whole:
        whole["t2d"] = torch.arange(320) % 2 == 0
        whole["t2d"][2 * len(whole["d2t"]) :] = False
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})


def eagle3_case(vocab=64, family="llama", **switches):
    model = tiny_config(family, num_hidden_layers=2, num_key_value_heads=3)
    config = Eagle3Config(
        model, (2, 3, 4), vocab, mapped=vocab != 320, own_embedding=True, **switches
    )
    own = {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "draft_vocab_size": vocab, **switches}
    own |= {"embed_requires_grad": True}
    return "eagle3", config, dict(model.hf), own


def dflash_case(vocab=320, window=None, family="qwen3"):
    config = flash(draft_vocab=None if vocab == 320 else vocab)
    layers = dict(config.model.hf) | {"model_type": family}
    if window:
        layers |= {"layer_types": ["sliding_attention", "full_attention"]}
        layers |= {"sliding_window": window}
    own = {"aux_hidden_state_layer_ids": [2, 4], "draft_vocab_size": vocab, "block_size": 5}
    own |= {"mask_token_id": 319, "sliding_window_non_causal": False, "sample_from_anchor": False}
    own |= {"projector_type": "dflash", "shift_label": False}
    return "dflash", config, layers, own


def dspark_case(vocab=320, anchor=False, kind="vanilla", with_markov=True):
    base = flash(draft_vocab=None if vocab == 320 else vocab)
    config = DSparkConfig(base, kind, 16, reads_markov=with_markov, from_anchor=anchor)
    _, _, layers, own = dflash_case(vocab)
    own = {k: v for k, v in own.items() if k not in ("projector_type", "shift_label")}
    own |= {"sample_from_anchor": anchor, "markov_rank": 16, "markov_head_type": kind}
    own |= {"enable_confidence_head": True, "confidence_head_with_markov": with_markov}
    return "dspark", config, layers, own


CASES = {
    "eagle3": lambda: eagle3_case(norm_before_residual=True),
    "eagle3.1": lambda: eagle3_case(
        norm_before_fc=True, fc_norm=True, norm_output=True, norm_before_residual=False
    ),
    "eagle3 of qwen3": lambda: eagle3_case(family="qwen3", norm_before_residual=True),
    "eagle3 whole": lambda: eagle3_case(320, norm_before_residual=True),
    "dflash": dflash_case,
    "dflash of llama": lambda: dflash_case(family="llama"),
    "dflash reduced": lambda: dflash_case(64),
    "dflash sliding": lambda: dflash_case(window=16),
    "dspark": dspark_case,
    "dspark from the anchor": lambda: dspark_case(anchor=True),
    "dspark gated, reduced": lambda: dspark_case(64, kind="gated"),
    "dspark rnn": lambda: dspark_case(kind="rnn", with_markov=False),
}


def bare(config):
    """Sizes and switches without where they came from."""
    if isinstance(config, DSparkConfig):
        return replace(config, flash=bare(config.flash))
    if isinstance(config, DFlashConfig):
        return replace(config, model=None)
    return replace(config, model=None, layers="")


@pytest.mark.parametrize("name", CASES)
def test_read_written_read_again_and_served_exactly(tmp_path, name):
    kind, config, layers, own = CASES[name]()
    tensors = random_tensors(config)
    foreign(tmp_path / "theirs", kind, layers, tensors, **own)
    loaded = LOAD[kind](tmp_path / "theirs", TARGET)
    assert bare(loaded.config) == bare(config)
    SAVE[kind](tmp_path / "ours", loaded.config, tensors)
    again = LOAD[kind](tmp_path / "ours", TARGET)
    assert bare(again.config) == bare(loaded.config)
    assert again.config.shapes == loaded.config.shapes == config.shapes
    llm = LLM(LOADED)
    prompts = [[5, 6, 7, 8] * 3, [9, 9, 9]]
    for params in (GREEDY, replace(GREEDY, temperature=0.8, seed=1)):
        expected = [c.token_ids for c in llm.generate(prompts, params)]
        drafts = []
        for folder in ("theirs", "ours"):
            done = llm.fork(f"{kind}:{tmp_path / folder}:4").generate(prompts, params)
            if params is GREEDY:
                assert [c.token_ids for c in done] == expected
            drafts.append([[(r.drafted, r.accepted) for r in c.records] for c in done])
            assert sum(r.drafted for c in done for r in c.records) > 0
        assert drafts[0] == drafts[1]


def test_sliding_layers_keep_their_window(tmp_path):
    kind, config, layers, own = dflash_case(window=16)
    sees = "sliding_window_non_causal"
    foreign(tmp_path, kind, layers, random_tensors(config), **own)
    loaded = load_dflash(tmp_path, TARGET)
    assert loaded.model.config.windows == (16, None)
    assert loaded.config.ahead == (False, True)
    foreign(tmp_path, kind, layers, random_tensors(config), **own | {sees: True})
    assert load_dflash(tmp_path, TARGET).config.ahead == (True, True)


def test_early_eagle3_configs_are_silent(tmp_path):
    kind, config, layers, own = eagle3_case(norm_before_residual=True)
    tensors = random_tensors(replace(config, own_embedding=False))
    own = {"draft_vocab_size": 64, "eagle_aux_hidden_state_layer_ids": None}
    foreign(tmp_path, kind, layers, tensors, **own)
    config = replace(config, taps=(1, 2))
    with pytest.raises(ModelError, match=r"fc\.weight of shape \(48, 144\)"):
        load_eagle3(tmp_path, TARGET)  # of a target of four layers, the usual ones are two
    tensors["fc.weight"] = tensors["fc.weight"][:, :96]
    foreign(tmp_path, kind, layers, tensors, **own)
    loaded = load_eagle3(tmp_path, TARGET)
    assert loaded.config.norm_before_residual
    assert loaded.taps == (1, 2)
    assert "it names none, so the usual ones" in loaded.config.layers


def opened(folder, spec, tokens, params=None):
    """A drafter that has seen random features of all tokens but the last, and its row."""
    params = params or SamplingParams()
    drafter = LLM(LOADED, drafter=f"{spec.format(folder)}", kv_tokens=128).drafter
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(len(tokens) - 1, len(drafter.needs), 48, generator=generator)
    sampler = RowSampler(params, Vocabulary(320, ()), tokens)
    row = Row(tokens, params=params, sampler=sampler, seed=7)
    drafter.absorb([Span(row, 0, features)])
    return drafter, row


def test_a_reduced_head_is_rows_of_the_whole_one(tmp_path):
    """DFlash whose head holds the target's even rows drafts the best of these."""
    whole, reduced = flash(), flash(draft_vocab=160)
    tensors = random_tensors(whole)
    save_dflash(tmp_path / "whole", whole, tensors)
    own = {"lm_head.weight": TARGET.head.weight[::2], "d2t": torch.arange(160)}
    save_dflash(tmp_path / "reduced", reduced, tensors | own)
    tokens = [5, 6, 7, 8, 9, 40, 41]
    drafter, row = opened(tmp_path / "whole", "dflash:{}:4", tokens)
    expected = drafter._pass(drafter._lanes([row], np.array([4]))).logits[1:5].clone()
    expected[:, 1::2] = float("-inf")
    drafter, row = opened(tmp_path / "reduced", "dflash:{}:4", tokens)
    draft = drafter.draft([row], np.array([4]))
    assert draft.tokens[0].tolist() == expected.argmax(-1).tolist()
    sampled = SamplingParams(temperature=1.0)
    drafter, row = opened(tmp_path / "reduced", "dflash:{}:4", tokens, sampled)
    draft = drafter.draft([row], np.array([4]))
    assert (draft.tokens[0] % 2 == 0).all()
    torch.testing.assert_close(draft.law.probs[0], shape_probs(expected, [sampled] * 4))
    assert (draft.law.probs[0, :, 1::2] == 0).all()


def test_rows_of_a_bonus_anchor_are_those_of_dflash(tmp_path):
    """With a Markov head that says nothing DSpark drafts what DFlash does from the same layers."""
    tensors = random_tensors(flash())
    save_dflash(tmp_path / "dflash", flash(), tensors)
    config = DSparkConfig(flash(), "vanilla", 16, from_anchor=False)
    heads = {n: t for n, t in random_tensors(config).items() if "head" in n}
    heads["markov_head.markov_w2.weight"].zero_()
    save_dspark(tmp_path / "dspark", config, tensors | heads)
    tokens = [5, 6, 7, 8, 9, 40, 41]
    drafts = []
    for kind in ("dflash", "dspark"):
        drafter, row = opened(tmp_path / kind, kind + ":{}:4", tokens)
        drafts.append(drafter.draft([row], np.array([4])).tokens[0].tolist())
    assert drafts[0] == drafts[1]
    with pytest.raises(InvalidConfig, match=r"draft_len is 5 .*its block holds 4"):
        LLM(LOADED, drafter=f"dspark:{tmp_path / 'dspark'}:5")


@pytest.mark.parametrize("anchor", [True, False])
def test_the_markov_head_sees_the_token_before(tmp_path, anchor):
    """A head that knows one rule, t is followed by t + 1, counts on from the anchor."""
    config = DSparkConfig(flash(), "vanilla", 320, from_anchor=anchor)
    tensors = random_tensors(config)
    tensors["markov_head.markov_w1.weight"] = 1e3 * torch.eye(320)
    tensors["markov_head.markov_w2.weight"] = torch.roll(torch.eye(320), 1, 0)
    save_dspark(tmp_path, config, tensors)
    drafter, row = opened(tmp_path, "dspark:{}:4", [5, 6, 7, 40])
    assert drafter.draft([row], np.array([4])).tokens[0].tolist() == [41, 42, 43, 44]


def changed(folder, own, layers=None):
    hf = json.loads((folder / "config.json").read_text())
    hf["transformer_layer_config"] |= layers or {}
    (folder / "config.json").write_text(json.dumps(hf | own))


@pytest.mark.parametrize(
    ("name", "read_as", "own", "complaint"),
    [
        ("dflash", "dspark", {}, "checkpoint of 'dflash', not dspark; write dflash:PATH"),
        ("eagle3", "eagle3", {"speculators_model_type": "peagle"}, "'peagle', not eagle3; only ea"),
        ("eagle3", "eagle3", {"transformer_layer_config": None}, "no transformer_layer_config"),
        ("dflash", "dflash", {"aux_hidden_state_layer_ids": None}, "layer_ids = None .*a list"),
        ("dflash", "dflash", {"aux_hidden_state_layer_ids": [2, 5]}, r"layers \[1, 4\]; .*0 to 3"),
        ("dflash", "dflash", {"sample_from_anchor": True}, "rows are shifted"),
        ("dflash", "dflash", {"projector_type": "domino"}, "rows are shifted"),
        ("dflash", "dflash", {"mask_token_id": None}, "no dflash_config.mask_token_id"),
        ("dflash", "dflash", {"draft_vocab_size": 64}, r"lacks the tensor lm_head\.weight"),
        ("dspark", "dspark", {"markov_rank": 0}, "markov_rank = 0; only drafters with a Markov"),
        ("dspark", "dspark", {"enable_confidence_head": False}, "unexpected tensor confidence_he"),
        ("dspark", "dspark", {"block_size": 1}, "block_size = 1; allowed: 2 to 33"),
    ],
)
def test_what_is_not_read_is_named(tmp_path, name, read_as, own, complaint):
    kind, config, layers, given = CASES[name]()
    foreign(tmp_path, kind, layers, random_tensors(config), **given)
    changed(tmp_path, own)
    with pytest.raises(ModelError, match=complaint):
        LOAD[read_as](tmp_path, TARGET)


def test_a_window_is_needed_and_other_configs_stay_as_they_are(tmp_path):
    kind, config, layers, own = dflash_case()
    foreign(tmp_path, kind, layers, random_tensors(config), **own)
    changed(tmp_path, {}, {"layer_types": ["sliding_attention"] * 2})
    with pytest.raises(ModelError, match="sliding layers and no sliding_window"):
        load_dflash(tmp_path, TARGET)
    plain = {"architectures": ["DFlashDraftModel"], "block_size": 8}
    assert flattened(plain, "dflash", source="x") == plain
    both = {"layer_types": ["sliding_attention"], "sliding_window": 8}
    theirs = json.loads((tmp_path / "config.json").read_text()) | {"transformer_layer_config": both}
    theirs["sliding_window_non_causal"] = True
    assert flattened(theirs, "dflash", source="x")["is_causal"] is False


def test_broken_mappings_are_named(tmp_path):
    config = flash(draft_vocab=64)
    save_dflash(tmp_path, config, random_tensors(config))
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor, complaint in (
        ("d2t", torch.full((64,), 300), "maps draft token 20 to 320"),
        ("t2d", torch.ones(320, dtype=torch.bool), "t2d that does not name"),
    ):
        save_file(tensors | {name: tensor}, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=complaint):
            load_dflash(tmp_path, TARGET)
