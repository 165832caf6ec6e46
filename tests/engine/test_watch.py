"""A drafter that is never right is said to be broken, once and aloud."""

import warnings

import pytest

from slipstream.engine import LLM
from slipstream.engine.watch import DraftWatch
from slipstream.lab.samples import Sample
from slipstream.lab.scrutiny import drafter_reasons
from slipstream.models.tiny import tiny_model
from slipstream.train.recipes import Shape, make
from slipstream.types import SamplingParams, StageTimes, StepRecord, Timings


def records(drafted, accepted, count, first=0):
    times = StageTimes(0.0, 0.0, 0.0, 0.0)
    return [
        StepRecord(first + i, 0, False, 10, drafted, accepted, accepted + 1, 1, 0, times)
        for i in range(count)
    ]


def test_it_speaks_after_two_hundred_drafts_and_only_then():
    watch = DraftWatch("eagle3:x:4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.observe(records(0, 0, 500))  # steps without a draft say nothing
        watch.observe(records(4, 1, 3))
        watch.observe(records(4, 0, 196))
    with pytest.warns(UserWarning, match="drafter eagle3:x:4 is broken .* 3 had a token accepted"):
        watch.observe(records(4, 0, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watch.observe(records(4, 0, 300))
        good = DraftWatch("eagle3:x:4")
        good.observe(records(4, 1, 4) + records(4, 0, 500))


def test_the_lab_marks_the_cell():
    def sample(rows):
        timings = Timings(0.0, (1.0,), (1,))
        return Sample(id="a", text="", finish="length", timings=timings, records=tuple(rows))

    bad = [sample(records(4, 0, 150)), sample(records(4, 0, 50, first=150))]
    assert drafter_reasons(bad) == [
        "drafter broken: 0 of its first 200 drafts had a token accepted"
    ]
    assert drafter_reasons(bad[:1]) == []
    late = sample(records(4, 3, 300, first=200))
    assert len(drafter_reasons([late, *bad])) == 1  # it is the first drafts that count
    assert drafter_reasons([sample(records(4, 1, 10) + records(4, 0, 400, first=10))]) == []


def test_the_engine_watches_its_drafter(tmp_path):
    loaded = tiny_model()
    net = make("eagle3", loaded.model, Shape(draft_len=3, mask_token_id=319), seed=0)
    net.save(tmp_path, net.tensors)
    arm = LLM(loaded, drafter=f"eagle3:{tmp_path}:3")
    prompts = [[20 + i, 40 + 3 * i, 90] for i in range(12)]
    with pytest.warns(UserWarning, match="is broken or was made for another target"):
        arm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
