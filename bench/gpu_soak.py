"""Requests that come and go on a GPU, and whether they get the tokens they would get alone.

    python bench/gpu_soak.py [--seconds 120] [--out FILE]

Up to 16 users of the embedded model in float32, n-gram on; lengths, gaps and limits at random.
Afterwards every request is answered again alone by plain decoding: its tokens must be the same, or
part where the top two logits are less than `TOLERANCE` apart. A host stall is host time between two
steps of the lane, in median steps.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import provenance
from slipstream.engine import LLM
from slipstream.lab.prompts import pool
from slipstream.types import Completion, SamplingParams

TOLERANCE = 1e-3  # nats, float32
USERS = 16


def soak(llm: LLM, seconds: float) -> tuple[list[tuple[list[int], SamplingParams]], dict[int, Any]]:
    """Random traffic for some seconds, then until all are answered."""
    rng = np.random.default_rng(5)
    texts = [list(p.messages or ()) for kind in ("chat", "code") for p in pool(kind)]
    prompts = [llm.encode(t) for t in texts]
    engine, jobs, done = llm.engine, [], {}
    end, due = time.perf_counter() + seconds, 0.0
    while time.perf_counter() < end or engine.has_work:
        now = time.perf_counter()
        if now < end and now >= due and len(engine.rows) < USERS:
            prompt = prompts[rng.integers(len(prompts))][-int(rng.integers(8, 400)) :]
            params = SamplingParams(
                max_tokens=int(rng.integers(4, 200)),
                temperature=float(rng.choice([0.0, 0.7])),
                seed=len(jobs),
            )
            done[engine.submit(prompt, params)] = None
            jobs.append((prompt, params))
            due = now + float(rng.exponential(0.05))
        for output in engine.step() if engine.has_work else ():
            if output.completion is not None:
                done[output.request_id] = output.completion
    return jobs, done


def stalls(completions: list[Completion]) -> dict[str, float]:
    """Host time of lane steps (they have no separate draft time), in median steps."""
    steps = {
        r.step: r.times
        for c in completions
        for r in c.records
        if r.times.draft == 0 and r.times.sample == 0
    }
    step = statistics.median(t.verify for t in steps.values())
    host = sorted(t.host for t in steps.values())
    return {
        "lane_steps": len(steps),
        "median_step_ms": step * 1e3,
        "median_host_steps": host[len(host) // 2] / step,
        "worst_host_steps": host[-1] / step,
    }


def compare(llm: LLM, jobs: list[Any], found: list[Completion]) -> dict[str, Any]:
    """Each request alone, plainly; forks with the margin at the first token that differs."""
    forks = []
    for (prompt, params), completion in zip(jobs, found, strict=True):
        (alone,) = llm.generate([prompt], params)
        if alone.token_ids == completion.token_ids:
            continue
        at = next(
            (
                i
                for i, pair in enumerate(zip(alone.token_ids, completion.token_ids, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(alone.token_ids), len(completion.token_ids)),
        )
        margins, _ = llm.score(prompt, list(alone.token_ids))
        forks.append({"at": at, "margin": margins[at], "temperature": params.temperature})
    return {"requests": len(jobs), "forks": forks}


def main() -> None:
    seconds = float(sys.argv[sys.argv.index("--seconds") + 1]) if "--seconds" in sys.argv else 120.0
    llm = LLM(drafter="ngram:3", dtype="float32", max_users=USERS, kv_tokens=USERS * 1024)
    jobs, done = soak(llm, seconds)
    found = list(done.values())
    body = {
        "bench": "gpu_soak",
        "time": provenance.now(),
        "versions": provenance.versions(),
        "seconds": seconds,
        "preemptions": llm.engine.scheduler.preemptions,
        "tolerance": TOLERANCE,
        **stalls(found),
        **compare(llm.fork("none"), jobs, found),
    }
    print(json.dumps(body, indent=1))
    if "--out" in sys.argv:
        Path(sys.argv[sys.argv.index("--out") + 1]).write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
