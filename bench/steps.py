"""What a step costs besides the forward, and what a step without a draft costs.

Two engines on the same weights take steps in turn, so that noise hits both alike:
- `none` against `ngram:3` and `suffix` on text in which nothing repeats: no draft, so the ratio of
  step times is the price of having looked;
- the share of a step spent outside the forward, at 1 and 16 users, greedy and sampled.

    python bench/steps.py [--steps 150] [--out FILE.json]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from slipstream import LLM, SamplingParams, provenance
from slipstream.types import StepRecord


def start(llm: LLM, users: int, params: SamplingParams) -> None:
    """Fill the engine with prompts of distinct tokens, and prefill them."""
    rng = np.random.default_rng(0)
    for _ in range(users):
        llm.engine.submit(rng.permutation(np.arange(100, 40_000))[:200].tolist(), params)
    for _ in range(40):
        llm.engine.step()


def race(arms: list[LLM], steps: int, users: int) -> list[list[float]]:
    """Seconds of each arm's steps, the arms taking turns; steps that drafted are left out."""
    times: list[list[float]] = [[] for _ in arms]
    for i in range(steps):
        order = range(len(arms)) if i % 2 else reversed(range(len(arms)))
        pair = {}
        for k in order:
            begin = time.perf_counter()
            arms[k].engine.step()
            pair[k] = time.perf_counter() - begin
        for k, spent in pair.items():
            times[k].append(spent)
    return times


def shares(records: list[StepRecord]) -> float:
    """Median over steps of the time outside the forward / the whole step."""
    steps = {r.step: r.times for r in records if not r.prefill}
    return statistics.median(1 - t.verify / t.total for t in steps.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    base = LLM(max_users=16, kv_tokens=16 * 1024)
    found: dict[str, float] = {}
    # Forced distinct tokens: a bias cannot make text repeat-free, a high temperature does.
    wild = SamplingParams(temperature=50.0, seed=1, max_tokens=600, ignore_eos=True)
    for users in (1, 16):
        for drafter in ("ngram:3", "suffix"):
            arms = [base.fork("none"), base.fork(drafter)]
            for llm in arms:
                start(llm, users, wild)
            plain, looked = race(arms, args.steps, users)
            ratio = statistics.median(b / a for a, b in zip(plain, looked, strict=True))
            found[f"draftless {drafter} x {users}"] = ratio
            print(f"step without a draft, {drafter}, {users} users: {ratio:.3f} of a plain step")
        for name, params in (
            ("greedy", SamplingParams(max_tokens=48, ignore_eos=True)),
            ("sampled", SamplingParams(temperature=0.2, top_p=0.9, max_tokens=48, ignore_eos=True)),
        ):
            for drafter in ("none", "ngram:3"):
                prompts = [
                    [{"role": "user", "content": f"Write a Python class for train line {i}."}]
                    for i in range(users)
                ]
                llm = base.fork(drafter)
                done = llm.generate(prompts, params)
                share = shares([r for c in done for r in c.records])
                found[f"outside forward {drafter} x {users} {name}"] = share
                print(f"outside the forward, {drafter}, {users} users, {name}: {share:.1%}")
    if args.out:
        body = {"bench": "steps", "machine": provenance.machine(), "ratios": found}
        args.out.write_text(json.dumps(body | {"versions": provenance.versions()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
