"""Specs: what is written is what is run, and what is wrong says what exists."""

import subprocess
import sys

import pytest

from slipstream.drafters.specs import METHODS, DrafterContext, build, parse
from slipstream.errors import InvalidConfig

CONTEXT = DrafterContext(vocab_size=64, max_context=128, max_users=4)


@pytest.mark.parametrize(
    ("text", "resolved"),
    [
        ("none", "none"),
        ("ngram", "ngram:4,min=2,max=4,factor=1.5"),
        ("ngram:3", "ngram:3,min=2,max=4,factor=1.5"),
        (" ngram:8,max=5,min=2 ", "ngram:8,min=2,max=5,factor=1.5"),
        ("ngram:8,min=6", "ngram:8,min=6,max=6,factor=1.5"),  # a lone min lifts the default max
        ("ngram,max=1", "ngram:4,min=1,max=1,factor=1.5"),
        (
            "suffix:8,global=true,min_prob=0.1",
            "suffix:8,global=true,min_prob=0.1,factor=1.5,depth=16,keep=100000",
        ),
        ("mtp", "mtp:2"),  # no path: the weights that ship
        ("eagle3:3", "eagle3:3,layer_ids=auto"),
        ("dflash2:5", "dflash2:5"),
        ("dspark:5,stop=0.5", "dspark:5,stop=0.5"),
        ("dspark,stop=0.5", "dspark:7,stop=0.5"),
        ("dflash:dir", "dflash:dir:7"),
        ("dflash:7/7:3", "dflash:7/7:3"),
        ("draft_model:some/dir", "draft_model:some/dir:4"),
        ("draft_model:some/dir:2", "draft_model:some/dir:2"),
        ("draft_model:/odd,a=b/c:d:32", "draft_model:/odd,a=b/c:d:32"),
    ],
)
def test_every_default_is_written_out_and_the_text_round_trips(text, resolved):
    spec = parse(text)
    assert str(spec) == resolved
    assert parse(resolved) == spec


@pytest.mark.parametrize("text", ["none", "ngram:3", "suffix:5,global=true"])
def test_the_drafter_carries_its_resolved_spec(text):
    drafter = build(text, context=CONTEXT)
    assert drafter.name == str(parse(text))
    assert drafter.max_draft_len == parse(text).draft_len
    assert drafter.needs == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["''", *METHODS]),
        ("ngrm:3", ["'ngrm'", *METHODS]),
        ("eagle9:x:8", ["'eagle9'", "draft_model", "eagle3", "dflash"]),
        ("ngram:0", ["'0'", "1 to 32"]),
        ("ngram:33", ["'33'", "1 to 32"]),
        ("ngram:-1", ["'-1'", "1 to 32"]),
        ("ngram:3.5", ["'3.5'", "1 to 32"]),
        ("ngram:", ["''", "1 to 32"]),
        ("ngram:3:4", ["'3:4'", "1 to 32"]),
        ("ngram:" + "9" * 40, ["1 to 32"]),
        ("none:3", ["takes no draft_len"]),
        ("none,min=2", ["'min'", "none"]),
        ("ngram:3,p_min=0.75", ["'p_min'", "min, max, factor"]),
        ("ngram:3,min", ["'min'", "key=value"]),
        ("ngram:3,", ["key=value"]),
        ("ngram:3,min=two", ["'two'", "whole number from 1 to 16"]),
        ("ngram:3,min=0", ["'0'", "1 to 16"]),
        ("ngram:3,min=2.0", ["'2.0'", "whole number"]),
        ("ngram:3,min=5,max=4", ["min is 5", "max is 4"]),
        ("ngram:3,min=2,min=3", ["twice"]),
        ("ngram:3,factor=nan", ["'nan'", "0.1 to 32"]),
        ("suffix,global=yes", ["'yes'", "true or false"]),
        ("suffix,min_prob=1.5", ["'1.5'", "0 to 1"]),
        ("draft_model", ["no model path", "draft_model:PATH[:draft_len]"]),
        ("draft_model:4", ["no model path"]),
        ("draft_model::4", ["no model path"]),
        ("draft_model:dir:99", ["'99'", "1 to 32"]),
        ("mtp:", ["no model path", "mtp[:PATH][:draft_len]"]),
        ("mtp::2", ["no model path"]),
        ("dflash:99", ["'99'", "1 to 32"]),
        ("dflash:0", ["'0'", "1 to 32"]),
        ("draft_model:dir:4,max=3", ["'max'"]),
        ("eagle3:dir:4,layer_ids=1", ["'1'", "auto, boundaries, outputs"]),
    ],
)
def test_bad_specs_are_one_sentence_that_lists_what_exists(text, words):
    with pytest.raises(InvalidConfig) as caught:
        parse(text)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message.endswith(".")
    assert "\n" not in message


def test_defaults_lie_in_their_own_ranges():
    for method in METHODS.values():
        assert parse(method.name + (":dir" if method.takes_path else ""))
        for option in method.options:
            if isinstance(option.default, str):
                assert option.default in option.choices
            else:
                assert option.low <= option.default <= option.high


def test_reading_specs_imports_no_torch():
    code = (
        "import sys; from slipstream.drafters import specs; "
        "specs.build('suffix:4', context=specs.DrafterContext("
        "vocab_size=9, max_context=9, max_users=1)); print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
