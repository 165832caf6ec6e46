"""The lane's tables: what `enter` brings to the device."""

import tests.interpreter  # noqa: F401, I001 - first

import torch

from slipstream.target.slots import Entry, Slots
from slipstream.types import SamplingParams

PARAMS = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.05, top_k=11)


def test_entries_change_their_own_slots_only():
    slots = Slots(3, capacity=8, page_size=2, device=torch.device("cpu"), spare=2)
    tables = (slots.tokens, slots.pages, slots.lengths, slots.stop_at)
    knobs = slots.knobs
    tables += (knobs.heat, knobs.top_p, knobs.min_p, knobs.top_k, knobs.seed)
    for table in tables:
        table.fill_(77)
    seed = 2**62 + 1
    long = [9, 8, 7, 6, 5, 4]  # more pages than a table holds
    slots.enter(
        [
            Entry(2, 3, [40, 41], 5, 8, long, PARAMS, seed),
            Entry(0, 0, [1, 2, 3], 3, 7, [4, 2], SamplingParams(temperature=0.0), 5),
        ]
    )
    assert slots.tokens.tolist() == [
        [1, 2, 3, 77, 77, 77, 77, 77],
        [77] * 8,
        [77, 77, 77, 40, 41, 77, 77, 77],
        [77] * 8,
    ]
    assert slots.pages.tolist() == [[4, 2, 77, 77, 77], [77] * 5, long[:5], [77] * 5]
    assert slots.lengths.tolist() == [3, 77, 5, 77]
    assert slots.stop_at.tolist() == [7, 77, 8, 77]
    assert knobs.seed.tolist() == [5, 77, seed, 77]
    assert knobs.top_k.tolist() == [0, 77, 11, 77]
    for table, values in ((knobs.heat, (0.0, 0.7)), (knobs.top_p, (1.0, 0.9))):
        expected = torch.tensor([values[0], 77.0, values[1], 77.0], dtype=table.dtype)
        assert torch.equal(table, expected)
    assert torch.equal(knobs.min_p, torch.tensor([0.0, 77.0, 0.05, 77.0]))
