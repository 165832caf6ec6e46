"""Requests that come and go on a GPU, and whether they get the tokens they would get alone.

    python bench/gpu_soak.py [--seconds 120] [--compare 700] [--compare-seconds 80] [--out FILE]

Up to 16 users of the embedded model in float32, n-gram on; lengths, gaps and limits at random.
Afterwards up to `--compare` requests, drawn at random, are answered again alone by plain decoding,
for at most `--compare-seconds` and what the last one takes; `compared` says how many were: the
tokens must be the same, or part where rounding can part them. For a greedy request that is a margin
between the top two logits under `TOLERANCE`; for a sampled one, a uniform number that misses the
other token's share of the law (recomputed alone) by less than `SHARE`. A host stall is host time
between two steps of the lane, in median steps.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import provenance
from slipstream.cache.pages import PageTable
from slipstream.engine import LLM
from slipstream.lab.prompts import pool
from slipstream.sampling.probs import shape_probs
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.target.target import ForwardRow
from slipstream.types import Completion, FinishReason, SamplingParams

TOLERANCE = 1e-3  # nats, float32
SHARE = 1e-3  # of probability, float32
USERS = 16


@dataclass(slots=True)
class Answers:
    """What is kept of answers. Their records are forgotten: hundreds of thousands of
    objects that stay alive would make Python's collector walk for longer and longer.

    `ends`: tokens and why they ended, by request. `steps`: host and verify seconds of steps of the
    lane (they have no separate draft time), by step.
    """

    ends: dict[int, tuple[array[int], FinishReason] | None]
    steps: dict[int, tuple[float, float]]

    def take(self, completion: Completion) -> None:
        self.ends[completion.request_id] = (
            array("i", completion.token_ids),
            completion.finish_reason,
        )
        for record in completion.records:
            if record.times.draft == 0 and record.times.sample == 0:
                self.steps[record.step] = (record.times.host, record.times.verify)


def soak(llm: LLM, seconds: float) -> tuple[list[tuple[list[int], SamplingParams]], Answers]:
    """Random traffic for some seconds, then until all are answered."""
    rng = np.random.default_rng(5)
    texts = [list(p.messages or ()) for kind in ("chat", "code") for p in pool(kind)]
    prompts = [llm.encode(t) for t in texts]
    jobs: list[tuple[list[int], SamplingParams]] = []
    engine, found = llm.engine, Answers({}, {})
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
            found.ends[engine.submit(prompt, params)] = None
            jobs.append((prompt, params))
            due = now + float(rng.exponential(0.05))
        for output in engine.step() if engine.has_work else ():
            if output.completion is not None:
                found.take(output.completion)
    return jobs, found


def stalls(found: Answers) -> dict[str, float]:
    """Host time of lane steps, in median steps."""
    step = statistics.median(verify for _, verify in found.steps.values())
    host = sorted(host for host, _ in found.steps.values())
    return {
        "lane_steps": len(host),
        "median_step_ms": step * 1e3,
        "median_host_steps": host[len(host) // 2] / step,
        "worst_host_steps": host[-1] / step,
        "host_steps_above_1": sum(h > step for h in host),
    }


def compare(llm: LLM, jobs: list[Any], found: list[Any], seconds: float) -> dict[str, Any]:
    """Each request alone, plainly, until the time is over; forks with the margin at the first
    token that differs.
    """
    forks: list[dict[str, Any]] = []
    compared, end = 0, time.perf_counter() + seconds
    for (prompt, params), (own, why) in zip(jobs, found, strict=True):
        tokens = tuple(own)
        if time.perf_counter() > end:
            break
        compared += 1
        if compared % 50 == 0:
            note(f"{compared} of {len(jobs)} compared, {len(forks)} differ")
        (alone,) = llm.generate([prompt], params)
        if alone.token_ids == tokens:
            continue
        at = next(
            (
                i
                for i, pair in enumerate(zip(alone.token_ids, tokens, strict=False))
                if pair[0] != pair[1]
            ),
            min(len(alone.token_ids), len(tokens)),
        )
        fork: dict[str, Any] = {"at": at, "temperature": params.temperature}
        if at == min(len(alone.token_ids), len(tokens)):
            fork["ends"] = [alone.finish_reason.value, why.value]
        elif params.greedy:
            fork["margin"] = llm.score(prompt, list(alone.token_ids))[0][at]
        else:
            before = [*prompt, *alone.token_ids[:at]]
            fork["miss"] = miss(llm, before, params, tokens[at])
        forks.append(fork)
    explained = sum(
        fork.get("margin", 1.0) < TOLERANCE or fork.get("miss", 1.0) < SHARE for fork in forks
    )
    return {"compared": compared, "forks": forks, "forks_at_rounding": explained}


def miss(llm: LLM, before: list[int], params: SamplingParams, token: int) -> float:
    """How far the request's uniform number lies from `token`'s share of the law after `before`."""
    target = llm.engine.target
    table = PageTable(target.pool, expected_tokens=len(before))
    if not table.reserve(len(before)):
        raise RuntimeError(f"no room for {len(before)} tokens")
    logits = target.forward([ForwardRow(before, 0, table.pages, 1)]).logits.float()
    table.release()
    ends = shape_probs(logits, [params])[0].double().cumsum(0).cpu().numpy()
    seed, position = np.array([params.seed]), np.array([len(before)])
    number = float(Uniforms()(seed, position, Purpose.NEXT)[0]) * ends[-1]
    low = ends[token - 1] if token else 0.0
    return float(max(low - number, number - ends[token], 0.0))


def note(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def option(name: str, default: float) -> float:
    return float(sys.argv[sys.argv.index(name) + 1]) if name in sys.argv else default


def main() -> None:
    seconds, most = option("--seconds", 120.0), int(option("--compare", 700))
    out = Path(sys.argv[sys.argv.index("--out") + 1]) if "--out" in sys.argv else None
    begun = time.perf_counter()
    llm = LLM(drafter="ngram:3", dtype="float32", max_users=USERS, kv_tokens=USERS * 1024)
    note(f"loaded after {time.perf_counter() - begun:.0f} s")
    gc.collect()
    gc.freeze()  # what stays for good is not walked through again and again
    jobs, answers = soak(llm, seconds)
    note(f"{len(jobs)} requests answered after {time.perf_counter() - begun:.0f} s")
    kept = np.random.default_rng(6).permutation(len(jobs))[:most].tolist()
    body = {
        "bench": "gpu_soak",
        "time": provenance.now(),
        "versions": provenance.versions(),
        "seconds": seconds,
        "preemptions": llm.engine.scheduler.preemptions,
        "tolerance": TOLERANCE,
        "share": SHARE,
        **stalls(answers),
        "requests": len(jobs),
    }
    write(body, out)  # what was measured stays, whatever the comparison does
    alone = llm.fork("none", max_users=1)
    limit = option("--compare-seconds", 80.0)
    body |= compare(alone, [jobs[i] for i in kept], [answers.ends[i] for i in kept], limit)
    write(body, out)
    print(json.dumps(body, indent=1))


def write(body: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
