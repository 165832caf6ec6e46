"""Choosing draft tokens: reduced vocabularies, laws of few tokens, and passes laid out at once."""

import numpy as np
import pytest
import torch

from slipstream.drafters.lanes import Kept, Lane, Reduced, choose, law_for, pack_lanes
from slipstream.drafters.passes import Passes
from slipstream.models.reduced import widened
from slipstream.models.tiny import tiny_model
from slipstream.sampling.probs import shape_probs
from slipstream.sampling.state import RowSampler
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.target.batch import lay_out, place
from slipstream.types import Dense, OneHot, SamplingParams, TopK
from tests.helpers import StubRow

VOCAB = 60
IDS = torch.tensor([1, 4, 9, 16, 25, 36, 49, 50, 51, 59])
COLD = {"temperature": 0.5, "top_p": 0.9}
CPU = torch.device("cpu")


def lanes_of(*options, width=2):
    rows = []
    for i, one in enumerate(options):
        params = SamplingParams(**one)
        sampler = RowSampler(params, Vocabulary(VOCAB, ()), [1, 2])
        rows.append(StubRow([1, 2], i, 2, params, seed=40 + i, sampler=sampler))
    return [Lane(index=i, row=row, width=width) for i, row in enumerate(rows)]


@pytest.mark.parametrize(
    "options",
    [
        [{}] * 3,
        [COLD] * 3,
        [COLD, {}],
        [COLD, {"temperature": 1.0}],
        [{}, {"logit_bias": {9: 3.0}}],
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reduced_vocabulary_drafts_as_if_it_were_spread_over_the_targets(options, dtype):
    torch.manual_seed(0)
    steps = [torch.randn(len(options), len(IDS), dtype=dtype) * 3 for _ in range(2)]
    drafts = []
    for reduced in (Reduced.of(IDS, VOCAB), None):
        lanes = lanes_of(*options)
        law = law_for(lanes, rows=len(options), vocab=VOCAB, device=CPU)
        for logits in steps:
            lanes = choose(lanes, logits if reduced else widened(logits, IDS, VOCAB), law, reduced)
        drafts.append(pack_lanes(lanes, law, rows=len(options)))
    own, spread = drafts
    assert own.tokens.tolist() == spread.tokens.tolist()
    assert type(own.law) is type(spread.law)
    if not isinstance(own.law, OneHot):
        assert torch.equal(own.law.probs, spread.law.probs)


def test_the_law_reported_is_the_one_drawn_from():
    lanes = lanes_of(COLD, {}, {**COLD, "top_k": 3})
    law = law_for(lanes, rows=4, vocab=VOCAB, device=CPU)
    assert isinstance(law, Kept)
    torch.manual_seed(1)
    steps = [torch.randn(3, VOCAB) * 2 for _ in range(2)]
    for logits in steps:
        choose(lanes, logits, law)
    draft = pack_lanes(lanes, law, rows=4)
    assert isinstance(draft.law, TopK)
    for depth, logits in enumerate(steps):
        expected = shape_probs(logits, [lane.row.params for lane in lanes])
        ids, probs = draft.law.ids[:3, depth], draft.law.probs[:3, depth]
        assert torch.equal(torch.zeros(3, VOCAB).scatter_add_(-1, ids, probs), expected)
        assert (
            expected.gather(-1, torch.from_numpy(draft.tokens[:3, depth : depth + 1])) > 0
        ).all()


def test_an_open_law_is_written_out():
    lanes = lanes_of(COLD, {"temperature": 1.0})
    assert isinstance(law_for(lanes, rows=2, vocab=VOCAB, device=CPU), Dense)


def test_a_lane_without_a_finite_score_ends():
    lanes = lanes_of(COLD, COLD, {})
    law = law_for(lanes, rows=3, vocab=VOCAB, device=CPU)
    logits = torch.randn(3, len(IDS))
    logits[1, 3] = float("nan")
    alive = choose(lanes, logits, law, Reduced.of(IDS, VOCAB))
    assert [lane.index for lane in alive] == [0, 2]
    assert pack_lanes(lanes, law, rows=3).lens.tolist() == [1, 0, 1]


RUNS = {
    "one": [(range(3, 9), 20)],
    "equal strides": [(range(16, 20), 17), (range(8, 12), 30), (range(4), 22)],
    "scattered": [([9, 2, 7], 31), (range(4), 22), ([4, 30, 5], 18)],
}


@pytest.mark.parametrize("rows", RUNS.values(), ids=RUNS)
def test_passes_lie_where_each_alone_would(rows):
    model, count = tiny_model("llama").model, 4
    config, dtype = model.config, model.dtype
    passes = Passes(
        rows, count, page_size=16, config=config, rope=model.rope, dtype=dtype, device=CPU
    )
    for step in range(count):
        found = passes.next()
        placed = [
            place(i, 1, rows[o][1] + step, rows[o][0], 16) for i, o in enumerate(passes.order)
        ]
        flat = lay_out(placed, config, dtype, CPU)
        assert [p.order for p in flat.rows] == list(range(len(rows)))
        assert torch.equal(found.slots, flat.slots)
        rope = model.rope.rows(torch.from_numpy(flat.positions), int(flat.positions.max()))
        assert all(map(torch.equal, found.rope, rope))
        for own, plan in zip(found.segments, flat.plan_of, strict=True):
            assert_alike(own, flat.plans[plan])


def assert_alike(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert a._replace(mask=None, slots=None, pad=None, unpad=None) == b._replace(
            mask=None, slots=None, pad=None, unpad=None
        )
        for name in ("mask", "slots", "pad", "unpad"):
            one, other = getattr(a, name), getattr(b, name)
            assert (one is None) == (other is None)
            assert one is None or np.array_equal(one.numpy(), other.numpy())
