"""What `slipstream cost` refuses before it needs a GPU, and how much room it takes."""

import tests.interpreter  # noqa: F401, I001 - first

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.engine.cost import Case, _answer_tokens, _draft_len, _engine, measure
from slipstream.errors import InvalidConfig
from slipstream.models.tiny import tiny_model
from slipstream.types import SamplingParams


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (Case("none", 65, 16), "users is 65"),
        (Case("none", 0, 16), "users is 0"),
        (Case("none", 1, 10**6), "context is 1000000"),
        (Case("ngram:3", 1, 8, acceptance=5.0), "acceptance is 5.0"),
        (Case("nonsense", 1, 8), "nonsense"),
    ],
)
def test_values_that_make_no_sense_are_one_sentence(case, says):
    with pytest.raises(InvalidConfig, match=says):
        measure(tiny_model(max_position_embeddings=4096), case, bandwidth=1e12)


@pytest.mark.parametrize(
    ("drafter", "draft_len"), [("none", 0), ("ngram:3", 3), ("suffix", 8), ("dflash:7", 7)]
)
def test_room_follows_the_drafter_also_where_its_spec_has_no_number(drafter, draft_len):
    found = _draft_len(tiny_model().model, Case(drafter, 1, 8))
    assert found == draft_len
    assert _answer_tokens(found) == _answer_tokens(0) * (draft_len + 1)


def test_the_dflash_shape_drafts_in_the_lane():
    shape = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    loaded = tiny_model(layers=6, max_position_embeddings=1024, **shape)
    engine, drafter = _engine(loaded, Case("dflash:3,layers=1", 1, 8, acceptance=3.0))
    assert drafter.reach == drafter.weights.config.block_size == 4
    engine.target.kernels = True
    engine.submit([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    while engine.has_work:
        (output,) = engine.step()
    steps = [r for r in output.completion.records if not r.prefill][:-2]
    assert {r.drafted for r in steps} == {3}
    assert 1 < sum(r.accepted for r in steps) / len(steps) < 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_what_it_needs():
    done = CliRunner().invoke(app, ["cost", "config.json", "--drafter", "none"])
    assert done.exit_code == InvalidConfig("").exit_code
    assert "needs a CUDA device" in done.output
