"""The static controller asks for draft_len wherever the tokens could be used."""

import pytest

from slipstream.control.static import StaticController
from slipstream.types import SamplingParams
from tests.helpers import StubRow


def row(prompt: int, output: int, max_tokens: int) -> StubRow:
    return StubRow(
        list(range(prompt + output)),
        prompt_len=prompt,
        params=SamplingParams(max_tokens=max_tokens),
    )


@pytest.mark.parametrize(
    ("prompt", "output", "max_tokens", "expected"),
    [
        (10, 0, 100, 4),  # room for all
        (10, 94, 100, 4),  # 6 left: 4 drafted + 1
        (10, 97, 100, 2),  # 3 left: 2 drafted + 1
        (10, 99, 100, 0),  # the last token needs no draft
        (95, 1, 100, 3),  # the context of 100 has 4 places left
        (98, 1, 100, 0),
        (90, 10, 100, 0),  # full: the engine ends this row, the plan must not be negative
    ],
)
def test_plan_is_clipped_to_what_a_row_can_still_commit(prompt, output, max_tokens, expected):
    controller = StaticController(4, max_context=100 if prompt > 50 else 1000)
    plan = controller.plan([row(prompt, output, max_tokens)])
    assert plan.tolist() == [expected]
    assert plan.dtype == "int64"


def test_rows_are_planned_apart_and_zero_is_plain_decoding():
    rows = [row(5, 0, 100), row(5, 98, 100)]
    assert StaticController(8, max_context=1000).plan(rows).tolist() == [8, 1]
    assert StaticController(0, max_context=1000).plan(rows).tolist() == [0, 0]
    assert StaticController(8, max_context=1000).plan([]).tolist() == []
