"""Decode speed of vLLM, the peer: offline, greedy, dummy weights, so that a config.json is enough.

Each batch is generated at two lengths; their difference leaves the prefill and the start out.
Dummy weights say nothing about acceptance (their greedy text soon runs in a circle of two tokens,
which n-grams draft perfectly), so read a speculating arm with its tokens per step, or fix the
acceptance: `--acceptance 4` makes vLLM accept so many tokens per step, whatever was drafted.

    python bench/vllm_peer.py CONFIGDIR --users 1 --users 16 [--method none|ngram|ngram_gpu|dflash]
        [--draft DIR] [--acceptance 4.0] [--context 1024] [--tokens 160] --out FILE.json
"""

import argparse
import json
import os
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from vllm import LLM

COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:iteration_tokens_total": "iterations",  # a histogram with one entry per engine step
}
Run = dict[str, float]
Prompts = list[dict[str, list[int]]]


def speculation(args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's speculative_config for the chosen method."""
    if args.method == "none":
        return None
    spec: dict[str, Any] = {"method": args.method}
    if args.method == "dflash":
        spec |= {"model": str(args.draft), "num_speculative_tokens": 7}
    else:
        spec |= {"num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if args.acceptance is not None:
        spec["rejection_sample_method"] = "synthetic"
        spec["synthetic_acceptance_length"] = args.acceptance
    return spec


def counters(llm: "LLM", stats: bool) -> Run:
    """vLLM's own counts since the start, added up over their labels."""
    found = dict.fromkeys(COUNTERS.values(), 0.0)
    for metric in llm.get_metrics() if stats else ():
        if metric.name in COUNTERS:
            value = metric.count if hasattr(metric, "count") else metric.value
            found[COUNTERS[metric.name]] += value
    return found


def generate(llm: "LLM", prompts: Prompts, tokens: int, stats: bool) -> Run:
    """Generate exactly so many tokens per prompt; the seconds it took, and what vLLM counted."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)
    before = counters(llm, stats)
    begin = time.perf_counter()
    done = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    if {len(request.outputs[0].token_ids) for request in done} != {tokens}:
        raise RuntimeError("a request ended early")
    after = counters(llm, stats)
    return {"seconds": seconds} | {name: after[name] - before[name] for name in after}


def difference(short: Run, long: Run, users: int, tokens: int, stats: bool) -> dict[str, Any]:
    """What the tokens between the two lengths cost, each of `users` having got `tokens` of them."""
    gap = {name: long[name] - short[name] for name in long}
    row: dict[str, Any] = {"ms_per_token": 1e3 * gap["seconds"] / tokens}
    if stats:
        # A user's step gives one token and the accepted ones, also where nothing was drafted.
        steps = users * tokens - gap["accepted"]
        row["tokens_per_step"] = users * tokens / max(steps, 1)
        row["drafts_per_step"] = gap["drafts"] / max(steps, 1)
        row["accepted_per_draft"] = gap["accepted"] / max(gap["drafts"], 1)
        row["engine_steps"] = gap["iterations"]
        row["ms_per_engine_step"] = 1e3 * gap["seconds"] / max(gap["iterations"], 1)
    return row | {"short": short, "long": long}


def measure(llm: "LLM", users: int, vocabulary: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians and all repeats for one number of users; the two lengths share their prompts."""
    rng = np.random.default_rng(users)
    rows = []
    for _ in range(args.warmups + args.repeats):
        # Half way between the two lengths a request has `context` tokens.
        ids = rng.integers(0, vocabulary, (users, args.context - (args.short + args.tokens) // 2))
        prompts: Prompts = [{"prompt_token_ids": row.tolist()} for row in ids]
        short = generate(llm, prompts, args.short, args.stats)
        long = generate(llm, prompts, args.tokens, args.stats)
        rows.append(difference(short, long, users, args.tokens - args.short, args.stats))
    kept = rows[args.warmups :]
    names = [name for name, value in kept[0].items() if isinstance(value, float)]
    medians = {name: statistics.median(row[name] for row in kept) for name in names}
    return {"users": users, "median": medians, "warmups": rows[: args.warmups], "repeats": kept}


def resolved(llm: "LLM") -> dict[str, Any]:
    """What vLLM made of the arguments where that differs between speculating and not."""
    config = llm.llm_engine.vllm_config
    return {
        "v2_model_runner": config.use_v2_model_runner,
        "async_scheduling": config.scheduler_config.async_scheduling,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
        "cudagraph_sizes": config.compilation_config.cudagraph_capture_sizes,
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("VLLM_")},
    }


def arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, help="a folder with the target's config.json")
    parser.add_argument("--users", type=int, action="append", required=True)
    parser.add_argument(
        "--method", choices=("none", "ngram", "ngram_gpu", "dflash"), default="none"
    )
    parser.add_argument("--draft", type=Path, help="a folder with the drafter's config.json")
    parser.add_argument("--acceptance", type=float, help="tokens per step; dflash: 4 if left out")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=160, help="the longer length")
    parser.add_argument("--short", type=int, default=32, help="the shorter length")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument(
        "--no-stats", dest="stats", action="store_false", help="time without vLLM's counters"
    )
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.method == "dflash":
        if args.draft is None:
            parser.error("--method dflash needs --draft")
        args.acceptance = 4.0 if args.acceptance is None else args.acceptance
    if args.tokens <= args.short or args.repeats < 1:
        parser.error("--tokens must exceed --short, and --repeats be at least 1")
    if args.context <= args.tokens:
        parser.error("--context must exceed --tokens")
    return args


def main() -> None:
    args = arguments()
    from vllm import LLM
    from vllm.platforms import current_platform

    engine: dict[str, Any] = {
        "model": str(args.config),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": max(4096, args.context + args.tokens + 16),
        "max_num_seqs": max(args.users),
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
        "disable_log_stats": not args.stats,
        "seed": 0,
        "speculative_config": speculation(args),
    }
    body: dict[str, Any] = {
        "bench": "vllm_peer",
        "gpu": current_platform.get_device_name(),
        "versions": {name: metadata.version(name) for name in ("vllm", "torch", "triton")},
        "method": args.method,
        "acceptance": args.acceptance,
        "context": args.context,
        "lengths": [args.short, args.tokens],
        "engine": dict(engine),
        "target": json.loads((args.config / "config.json").read_text()),
        "results": [],
    }
    begin = time.perf_counter()
    llm = LLM(**engine)
    body |= {"start_seconds": time.perf_counter() - begin, "resolved": resolved(llm)}
    for users in args.users:
        row = measure(llm, users, body["target"]["vocab_size"], args)
        body["results"].append(row)
        args.out.write_text(json.dumps(body, indent=1, default=str) + "\n")
        shown = ", ".join(f"{name} {value:.3f}" for name, value in row["median"].items())
        print(f"{args.config.name}, {args.method}, {users} users: {shown}", flush=True)


if __name__ == "__main__":
    main()
