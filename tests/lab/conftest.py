"""A small simulated grid that any lab test can run in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from slipstream.lab.backends.simulated import Simulated, SimulatedArm
from slipstream.lab.grid import Grid, from_table

PLAIN = 0.010


def arms() -> dict[str, SimulatedArm]:
    """Plain decoding at 10 ms a step, and a drafter that accepts 1.5 of 3 tokens for 2 ms."""
    return {
        "none": SimulatedArm(verify=lambda rows: PLAIN),
        "ngram:3": SimulatedArm(
            verify=lambda rows: PLAIN, draft=0.002, draft_len=3, accepted=(3, 0, 2, 1)
        ),
    }


@pytest.fixture
def table() -> dict[str, Any]:
    """A grid as parsed from TOML, every gate in it."""
    return {
        "title": "A simulated grid",
        "target": "simulated",
        "arms": ["none", "ngram:3"],
        "warmup_tokens": 4,
        "cells": [
            {"traffic": "chat", "users": 1, "prompts": 3, "max_tokens": 24},
            {"traffic": "code", "users": 4, "prompts": 8, "max_tokens": 16, "sampling": "greedy"},
        ],
        "gates": {
            "needle": {"lengths": [400], "depths": [0.5], "bar": 0.0},
            "json": {"prompts": 2, "bar": 0.0},
            "lossless": {"prompts": 6, "users": 4, "control_users": 2},
            "degenerate": {},
        },
    }


@pytest.fixture
def grid(table: dict[str, Any]) -> Grid:
    """The grid of `table`."""
    return from_table(table, name="sim")


@pytest.fixture
def simulated() -> Callable[..., Simulated]:
    """Makes a backend with the two arms, some of them replaced."""

    def make(other: dict[str, SimulatedArm] | None = None, **options: Any) -> Simulated:
        return Simulated(arms() | (other or {}), **options)

    return make
