"""What a step of each shipped drafter costs on the embedded model, part by part.

    python bench/draft_pass.py [--steps 60] [--users 1,16] [--out FILE.json]

One engine a drafter on the same weights; they take steps in turn, so that noise hits all alike.
Milliseconds, medians over steps: `draft` and `absorb` of the drafter, the target's forward, what
deciding costs (`decide`), the rest (`host`), and the step beside a plain one's. Rows neither end
nor fill up in between.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams, provenance
from slipstream.engine.engine import Engine

SPECS = ("none", "mtp:3", "eagle3:4", "dflash:7", "dflash2:7", "dspark:7")
PARTS = ("draft", "absorb", "forward", "decide", "host", "step")
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {},
    "sampled": {"temperature": 0.2, "top_p": 0.9},
}
WARM_STEPS = 6
PROMPT = "Write a Python class that keeps the timetable of train line {}, with tests."


class Meter:
    """Seconds that some methods of an engine took, step by step."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[dict[str, float]] = []
        self._now: dict[str, float] = {}
        self._engine = engine
        engine.target.forward = self._timed("forward", engine.target.forward)  # type: ignore[method-assign]
        engine.verifier.verify = self._timed("decide", engine.verifier.verify)  # type: ignore[method-assign]
        drafter: Any = engine.drafter
        for part in ("draft", "absorb"):
            if hasattr(drafter, part):
                setattr(drafter, part, self._timed(part, getattr(drafter, part)))

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = method(*args, **named)
            self._now[part] = self._now.get(part, 0.0) + time.perf_counter() - begin
            return result

        return run

    def step(self) -> None:
        """One step of the engine."""
        self._now = {}
        begin = time.perf_counter()
        self._engine.step()
        whole = time.perf_counter() - begin
        self._now["host"] = whole - sum(self._now.values())
        self._now["step"] = whole
        self.steps.append(self._now)

    def medians(self) -> dict[str, float]:
        """Milliseconds of each part."""
        return {
            part: 1e3 * statistics.median(s.get(part, 0.0) for s in self.steps) for part in PARTS
        }


def started(base: LLM, spec: str, users: int, sampling: str, steps: int) -> Meter:
    """An engine with `users` rows whose prompts are in its cache."""
    engine = base.fork(spec).engine
    # An accepted draft adds several tokens a step, and no row may end while it is timed.
    room = (steps + WARM_STEPS) * (engine.drafter.max_draft_len + 1)
    params = SamplingParams(max_tokens=room, ignore_eos=True, seed=1, **SAMPLING[sampling])
    for i in range(users):
        engine.submit(base.tokenizer.encode(PROMPT.format(i)), params)
    meter = Meter(engine)
    while any(not row.opened for row in engine.rows):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    return meter


def measure(base: LLM, users: int, sampling: str, steps: int) -> dict[str, dict[str, float]]:
    """Milliseconds by drafter and part."""
    meters = {spec: started(base, spec, users, sampling, steps) for spec in SPECS}
    for i in range(steps):
        order = list(meters.values())
        for meter in order if i % 2 else reversed(order):
            meter.step()
    return {spec: meter.medians() for spec, meter in meters.items()}


def main() -> None:
    """Measure every cell and print a table a cell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--users", default="1,16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    counts = [int(n) for n in args.users.split(",")]
    base = LLM(max_users=max(counts), kv_tokens=max(counts) * 1536)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for users in counts:
        for sampling in SAMPLING:
            cell = measure(base, users, sampling, args.steps)
            found[f"{users} users, {sampling}"] = cell
            print(f"\n{users} users, {sampling}\n{'':10}" + "".join(f"{p:>9}" for p in PARTS))
            for spec, parts in cell.items():
                line = "".join(f"{parts[p]:9.2f}" for p in PARTS)
                ratio = parts["step"] / cell["none"]["step"]
                print(f"{spec:10}{line}  {ratio:5.2f} plain steps")
    if args.out:
        body = {"bench": "draft_pass", "machine": provenance.machine(), "milliseconds": found}
        args.out.write_text(json.dumps(body | {"versions": provenance.versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
