"""What drafting costs, and what it would bring on given text.

    python bench/draft.py            microseconds a row-step, histories of 8K and 126K tokens
    python bench/draft.py --out F    the same, kept as JSON
    python bench/draft.py FILE...    replays files as if a model had written them

Timing covers `draft` plus `advance` of one row, histories interleaved step by step. The replay
takes the first `PROMPT` tokens of a file as the prompt and the next ones as the answer, and rates
the counts with a cost model: a step with w draft tokens a row costs 1 + slope * w plain steps, the
slope being what verifying costs SmolLM2-135M on 2 cores: 8 rows cost 1.10x of one at 1 user and
2.1x at 16.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import provenance
from slipstream.drafters.specs import DrafterContext, build
from slipstream.metrics import acceptance
from slipstream.types import SamplingParams, StageTimes, StepRecord, Verdict

CONTEXT = DrafterContext(vocab_size=49152, max_context=1 << 20, max_users=16)
VERDICT = Verdict(np.zeros(1, np.int64), np.zeros(1, np.int64), (None,))
SPECS = ("none", "ngram:3", "ngram:8", "suffix:8", "suffix:8,global=true")
REPLAYED = (
    "ngram:3",
    "ngram:8",
    "ngram:8,factor=32",
    "ngram:8,min=1",
    "ngram:8,min=3",
    "suffix:8",
    "suffix:8,min_prob=0.5",
)
PROMPT, TOTAL = 300, 900
SLOPES = {"1 user": 0.10 / 7, "16 users": 1.1 / 7}
FREE = StageTimes(0.0, 0.0, 0.0, 0.0)


@dataclass
class Row:
    """A request without an engine."""

    tokens: list[int]
    request_id: int = 0
    prompt_len: int = 0
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    sampler: Any = None


def history(kind: str, length: int) -> list[int]:
    """`words`: Zipf-distributed, mostly new endings. `copy`: a text of 400 tokens over and over.
    `loop`: one token over and over."""
    rng = np.random.default_rng(0)
    if kind == "words":
        return (rng.zipf(1.2, length) % 49152).tolist()
    period = rng.integers(0, 49152, 400 if kind == "copy" else 1).tolist()
    return (period * (length // len(period) + 1))[:length]


def time_drafters(lengths: Sequence[int], steps: int = 300, per_step: int = 4) -> dict[str, float]:
    """Print median and 95th percentile of a row-step, and the ratio of the longest to the first.
    Returns the medians, in microseconds.
    """
    found = {}
    plan = np.array([8])
    print("drafter                text    history  open ms  us/step    p95  ratio")
    for spec in SPECS:
        for kind in ("words", "copy", "loop"):
            text = history(kind, max(lengths) + steps * per_step)
            arms = []
            for length in lengths:
                drafter, row = build(spec, context=CONTEXT), Row(text[:length], prompt_len=length)
                start = time.perf_counter()
                drafter.open([row])
                arms.append((drafter, row, time.perf_counter() - start, []))
            for _ in range(steps):
                for drafter, row, _, seconds in arms:
                    start = time.perf_counter()
                    drafter.draft([row], plan)
                    drafted = time.perf_counter()
                    row.tokens += text[len(row.tokens) : len(row.tokens) + per_step]
                    resumed = time.perf_counter()
                    drafter.advance([row], VERDICT)
                    seconds.append(drafted - start + time.perf_counter() - resumed)
            first = np.median(arms[0][3])
            for length, (_, _, opened, seconds) in zip(lengths, arms, strict=True):
                median, high = np.quantile(seconds, [0.5, 0.95]) * 1e6
                found[f"{spec}, {kind}, {length // 1000}K tokens"] = float(median)
                print(
                    f"{spec:22} {kind:6} {length:8} {opened * 1e3:8.1f} {median:8.1f} {high:6.0f}"
                    f"  {median / first / 1e6:.2f}"
                )
    return found


def replay(spec: str, texts: Sequence[Sequence[int]]) -> list[StepRecord]:
    """Records of decoding each text with a target that writes exactly it."""
    drafter, records = build(spec, context=CONTEXT), []
    for i, text in enumerate(texts):
        row = Row(list(text[:PROMPT]), request_id=i, prompt_len=PROMPT)
        drafter.open([row])
        while len(row.tokens) < len(text):
            depth = len(row.tokens)
            plan = np.array([min(drafter.max_draft_len, len(text) - depth - 1)])
            drafted = drafter.draft([row], plan).row(0)
            truth = text[depth : depth + len(drafted)]
            held = [a == b for a, b in zip(drafted, truth, strict=True)]
            kept = held.index(False) if False in held else len(held)
            row.tokens += text[depth : depth + kept + 1]
            drafter.advance([row], VERDICT)
            records.append(StepRecord(0, i, False, depth, len(drafted), kept, kept + 1, 1, 0, FREE))
        drafter.close([i])
    return records


def rate(files: Sequence[str]) -> None:
    """Print what each drafter would bring on the files' text."""
    from slipstream.models.loading import load

    tokenizer = load("smollm2-135m").tokenizer
    texts = [tokenizer.encode(Path(f).read_text(errors="replace")[:20_000])[:TOTAL] for f in files]
    texts = [t for t in texts if len(t) > PROMPT + 50]
    print(f"{len(texts)} files of more than {PROMPT + 50} tokens; modeled speedups")
    print(f"{'drafter':24} {'tok/step':>8} {'drafted':>8} {'rate':>5}  " + "  ".join(SLOPES))
    for spec in REPLAYED:
        counts = acceptance(replay(spec, texts))
        tokens, drafted = counts.tokens_per_step or 0.0, counts.drafted / max(counts.row_steps, 1)
        gains = [f"{tokens / (1 + slope * drafted):6.3f}" for slope in SLOPES.values()]
        rate_text = f"{counts.acceptance_rate or 0:.2f}"
        print(f"{spec:24} {tokens:8.3f} {drafted:8.2f} {rate_text:>5}  " + "    ".join(gains))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--out"]:
        body = {"bench": "draft", "machine": provenance.machine()}
        body |= {"microseconds": time_drafters((8_000, 126_000))}
        Path(sys.argv[2]).write_text(json.dumps(body, indent=1) + "\n")
    elif sys.argv[1:]:
        rate(sys.argv[1:])
    else:
        time_drafters((8_000, 126_000))
