"""A small simulated grid that any lab test can run in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.lab.backends.simulated import Simulated, SimulatedArm, pseudo_answer
from slipstream.lab.grid import Grid, from_table
from slipstream.lab.samples import Request

PLAIN = 0.010
ARMS = {
    "none": SimulatedArm(verify=lambda rows: PLAIN),
    "ngram:3": SimulatedArm(
        verify=lambda rows: PLAIN, draft=0.002, draft_len=3, accepted=(3, 0, 2, 1)
    ),
}


def answer(request: Request) -> tuple[str, ...]:
    """Pseudo-words, or the right answer to a needle or JSON task."""
    return pseudo_answer(request)


@pytest.fixture
def table() -> dict[str, Any]:
    """A grid as parsed from TOML."""
    return {
        "title": "A simulated grid",
        "target": "simulated",
        "arms": ["none", "ngram:3"],
        "repeats": 3,
        "warmup_tokens": 4,
        "cells": [
            {"traffic": "chat", "users": 1, "prompts": 3, "max_tokens": 24},
            {
                "traffic": "code",
                "users": 4,
                "prompts": 8,
                "max_tokens": 16,
                "sampling": "greedy",
            },
        ],
    }


@pytest.fixture
def grid(table: dict[str, Any]) -> Grid:
    """The grid of `table`."""
    return from_table(table, name="sim")


@pytest.fixture
def simulated() -> Callable[..., Simulated]:
    """Makes a backend with the two arms, or others."""

    def make(arms: dict[str, SimulatedArm] | None = None, **options: Any) -> Simulated:
        return Simulated(ARMS if arms is None else arms, **options)

    return make
