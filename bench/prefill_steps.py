"""What a step costs in which some rows decode and others read a prompt, unpadded and captured.

    python bench/prefill_steps.py [--rounds 30] [--specs none,mtp:3,dflash:7] [--readers 1,2,4]
                                  [--prompt 300] [--users 16] [--device cuda] [--out FILE.json]

Two engines a drafter on the same weights take rounds in turn, so that noise hits both alike: in one
of them forwards run launch by launch (`eager`), in the other padded and captured, as requests meet
them (`captured`; on a CPU nothing is captured and both do the same). In a round, `readers` requests
of `prompt` tokens come to an engine in which the other users decode. Medians in milliseconds:

- `forward`: the target's forward of such a batch alone, until the host has seen that it held;
  `device` from the first launch to the last on the device's own clock, its waiting included;
- `mixed`: the engine's whole step that reads the prompts, and of it `verify` (the forward), `draft`
  (with what the drafter takes in), `sample` and `host`;
- `next`: the step after it, in which the lane takes the new rows in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
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

ARMS = ("eager", "captured")
WARM_ROUNDS = 3
DECODED = 400  # tokens in the cache of a row that decodes, in `forward`
Times = dict[str, list[float]]


def unpadded(engine: Engine) -> None:
    """Run the engine's forwards launch by launch from now on."""
    if engine.target.kernels:
        engine.target.pad(rows=1, tokens=0)
        drafter = engine.drafter
        if isinstance(drafter, Pads):
            drafter.pad(rows=1, tokens=0, positions=engine.target.positions)


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
    found: dict[str, Times] = {arm: defaultdict(list) for arm in ARMS}
    engines = {arm: base.fork("none").engine for arm in ARMS}
    unpadded(engines["eager"])
    rows = {arm: batch(engine.target, users, readers, length) for arm, engine in engines.items()}
    for i in range(-WARM_ROUNDS, rounds):
        for arm in ARMS if i % 2 else reversed(ARMS):
            for name, spent in timed_forward(engines[arm].target, rows[arm]).items():
                if i >= 0:
                    found[arm][name].append(spent)
    return found


class Rounds:
    """An engine with rows that decode, to which prompts come."""

    def __init__(self, base: LLM, spec: str, *, users: int, length: int, eager: bool) -> None:
        self._rng, self._length, self._users = np.random.default_rng(1), length, users
        self.engine = base.fork(spec).engine
        if eager:
            unpadded(self.engine)
        self.times: Times = defaultdict(list)

    def fill(self, count: int) -> None:
        """Let `count` requests decode that do not end."""
        for row in list(self.engine.rows):
            self.engine.cancel(row.request_id)
        for _ in range(count):
            self._submit(100_000)
        while any(not row.opened for row in self.engine.rows):
            self.engine.step()

    def take(self, readers: int, *, keep: bool) -> None:
        """One round."""
        engine = self.engine
        for _ in range(4):
            engine.step()
        engine.settle()
        come = [self._submit(4) for _ in range(readers)]
        step = 0.0
        while not all(row.opened for row in come):
            step = self._timed()
        after = self._timed()
        if keep:
            times = come[0].records[0].times
            parts = {"verify": times.verify, "draft": times.draft, "sample": times.sample}
            for name, spent in (parts | {"host": times.host, "mixed": step, "next": after}).items():
                self.times[name].append(1e3 * spent)
        while any(engine.knows(row.request_id) for row in come):
            engine.step()

    def _timed(self) -> float:
        begin = time.perf_counter()
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
    arms = {
        arm: Rounds(base, spec, users=users, length=length, eager=arm == "eager") for arm in ARMS
    }
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
    room = args.prompt + (WARM_ROUNDS + args.rounds) * 128
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
