"""What `slipstream cost` refuses before it needs a GPU, and how much room it takes."""

import tests.interpreter  # noqa: F401, I001 - first

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli import app
from slipstream.engine.cost import Case, _answer_tokens, _draft_len, measure
from slipstream.errors import InvalidConfig
from slipstream.models.tiny import tiny_model


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_command_says_what_it_needs():
    done = CliRunner().invoke(app, ["cost", "config.json", "--drafter", "none"])
    assert done.exit_code == InvalidConfig("").exit_code
    assert "needs a CUDA device" in done.output
