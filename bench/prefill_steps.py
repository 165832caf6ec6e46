"""What it costs those who decode when others come and have their prompts read.

    python bench/prefill_steps.py [--rounds 30] [--specs none,mtp:3,dflash:7] [--readers 1,2,4]
                                  [--prompt 300] [--users 16] [--device cuda] [--out FILE.json]

Three engines a drafter on the same weights take rounds in turn, so that noise hits all alike. In
`eager` and `shared` prompts share a forward with the rows that decode, launch by launch and padded
and captured; in `beside` they are read between the steps of the lane, as requests meet it where a
forward is bound by launches (on a CPU there is no lane, and all three do the same). In a round,
`readers` requests of `prompt` tokens come to an engine in which the other users decode. Medians in
milliseconds:

- `forward`: the target's forward of a mixed batch alone, until the host has seen that it held;
  `device` from the first launch to the last on the device's own clock, its waiting included;
- `plain`: a step of a row that decodes when nobody comes;
- `others`: by how much longer 16 steps of such a row take when prompts come;
- `first`: from their coming to the first token of all of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream import LLM, SamplingParams, provenance
from slipstream.cache.pages import PageTable
from slipstream.drafters.base import Pads
from slipstream.engine.engine import Engine
from slipstream.engine.sequence import Sequence
from slipstream.errors import InvalidConfig, SlipstreamError
from slipstream.target.target import ForwardRow, Target

ARMS = ("eager", "shared", "beside")
WARM_ROUNDS = 3
STEPS = 16
DECODED = 400  # tokens in the cache of a row that decodes, in `forward`
Times = dict[str, list[float]]


def set_up(engine: Engine, arm: str) -> Engine:
    """Make an engine read prompts as an arm does."""
    if arm != "beside":
        engine.target.pads = lambda tokens: False  # type: ignore[method-assign]
    if arm == "eager" and engine.target.kernels:
        engine.target.pad(rows=1, tokens=0)
        drafter = engine.drafter
        if isinstance(drafter, Pads):
            drafter.pad(rows=1, tokens=0, positions=engine.target.positions)
    return engine


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    """Tokens of which no prefix was seen before."""
    return [int(token) for token in rng.integers(100, 40_000, length)]


def batch(target: Target, users: int, readers: int, length: int) -> list[ForwardRow]:
    """Rows that decode, and rows that read a prompt; all their pages are their own."""
    rng, rows = np.random.default_rng(0), []
    for i in range(users):
        tokens = prompt(rng, length) if i < readers else prompt(rng, 1)
        start = 0 if i < readers else DECODED
        table = PageTable(target.pool, expected_tokens=start + len(tokens))
        if not table.reserve(start + len(tokens)):
            raise InvalidConfig(f"--users is {users}; the cache has no room for so many.")
        rows.append(ForwardRow(tokens, start, table.pages, 1))
    return rows


def timed_forward(target: Target, rows: list[ForwardRow]) -> dict[str, float]:
    """Milliseconds of one forward, on the host's clock and on the device's."""
    cuda = target.loaded.model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
    begin = time.perf_counter()
    if cuda:
        events[0].record()
    target.forward(rows)
    found = {"forward": 1e3 * (time.perf_counter() - begin)}
    if cuda:
        events[1].record()
        events[1].synchronize()
        found["device"] = events[0].elapsed_time(events[1])
    return found


def forwards(base: LLM, users: int, readers: int, length: int, rounds: int) -> dict[str, Times]:
    """Times of the forward alone, by arm."""
    arms = ARMS[:2]
    found: dict[str, Times] = {arm: defaultdict(list) for arm in arms}
    engines = {arm: set_up(base.fork("none").engine, arm) for arm in arms}
    rows = {arm: batch(engine.target, users, readers, length) for arm, engine in engines.items()}
    for i in range(-WARM_ROUNDS, rounds):
        for arm in arms if i % 2 else reversed(arms):
            for name, spent in timed_forward(engines[arm].target, rows[arm]).items():
                if i >= 0:
                    found[arm][name].append(spent)
    return found


class Rounds:
    """An engine with rows that decode, to which prompts come."""

    def __init__(self, base: LLM, spec: str, *, length: int, arm: str) -> None:
        self._rng, self._length = np.random.default_rng(1), length
        self.engine = set_up(base.fork(spec).engine, arm)
        self.times: Times = defaultdict(list)

    def fill(self, count: int) -> None:
        """Let `count` requests decode that do not end."""
        for row in list(self.engine.rows):
            self.engine.cancel(row.request_id)
        rows = [self._submit(100_000) for _ in range(count)]
        self._marker = rows[0]
        while any(not row.opened for row in self.engine.rows):
            self.engine.step()

    def take(self, readers: int, *, keep: bool) -> None:
        """One round: some steps alone, as many in which prompts come."""
        plain = self._steps(lambda: None)
        come: list[Sequence] = []
        spent = self._steps(lambda: come.extend(self._submit(4) for _ in range(readers)))
        while any(self.engine.knows(row.request_id) for row in come):
            self.engine.step()
        if keep:
            first = max(row.chunk_times[0] - row.arrived for row in come)
            found = {"plain": plain / STEPS, "others": spent - plain, "first": first}
            for name, seconds in found.items():
                self.times[name].append(1e3 * seconds)

    def _steps(self, meanwhile: Callable[[], None]) -> float:
        """Seconds of some steps of a row that decodes; `meanwhile` is called after the second."""
        records, begin = self._marker.records, 0.0
        start, called = len(records), False
        while len(records) < start + 2 + STEPS:
            if len(records) >= start + 2 and not called:
                begin, called = time.perf_counter(), True
                meanwhile()
            self.engine.step()
        return time.perf_counter() - begin

    def _submit(self, tokens: int) -> Sequence:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        found = self.engine.submit(prompt(self._rng, self._length), params)
        return next(row for row in self.engine.rows if row.request_id == found)


def rounds_of(
    base: LLM, spec: str, users: int, readers: int, length: int, rounds: int
) -> dict[str, Times]:
    """Times of whole steps, by arm."""
    arms = {arm: Rounds(base, spec, length=length, arm=arm) for arm in ARMS}
    for arm in arms.values():
        arm.fill(users - readers)
    for i in range(-WARM_ROUNDS, rounds):
        order = list(arms.values())
        for arm in order if i % 2 else reversed(order):
            arm.take(readers, keep=i >= 0)
    return {name: arm.times for name, arm in arms.items()}


def medians(found: dict[str, Times]) -> dict[str, dict[str, float]]:
    """Milliseconds by arm and part."""
    return {
        arm: {part: round(statistics.median(spent), 3) for part, spent in times.items()}
        for arm, times in found.items()
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All cells, printed as they come."""
    readers = [int(n) for n in args.readers.split(",")]
    if not all(1 <= n < args.users for n in readers):
        raise InvalidConfig(f"--readers is {args.readers}; allowed: 1 to {args.users - 1}.")
    room = args.prompt + (WARM_ROUNDS + args.rounds) * 200
    base = LLM(max_users=args.users, kv_tokens=args.users * room, device=args.device)
    found: dict[str, Any] = {}

    def note(name: str, times: dict[str, Times]) -> None:
        found[name] = medians(times)
        print(json.dumps({name: found[name]}), flush=True)

    for n in readers:
        note(f"forward, {n} readers", forwards(base, args.users, n, args.prompt, args.rounds))
    for spec in args.specs.split(","):
        for n in readers:
            times = rounds_of(base, spec, args.users, n, args.prompt, args.rounds)
            note(f"{spec}, {n} readers", times)
    return found


def main() -> None:
    """Measure every cell and print a line of JSON a cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--specs", default="none,mtp:3,dflash:7")
    parser.add_argument("--readers", default="1,2,4")
    parser.add_argument("--prompt", type=int, default=300)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--device")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    try:
        found = measure(args)
    except SlipstreamError as error:
        raise SystemExit(f"prefill_steps: {error}") from error
    body = {"bench": "prefill_steps", "machine": provenance.machine(), "milliseconds": found}
    body |= {"rounds": args.rounds, "users": args.users, "prompt": args.prompt}
    text = json.dumps(body | {"versions": provenance.versions()}, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
