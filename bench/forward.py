"""What a target forward costs, as ratios taken in finely interleaved rounds of one process.

    python bench/forward.py [--threads 2] [--rounds 15] [--without-transformers]

Absolute milliseconds on a shared machine vary by 2 to 4 times; only ratios are worth quoting. With
`--threads 1` the clock is CPU time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from slipstream.cache.pages import PageTable
from slipstream.models.linear import linear, linear_add
from slipstream.models.loading import EMBEDDED, LoadedModel, load
from slipstream.target.target import ForwardRow, Target

CONTEXT, LONG = 300, 7000
WIDTHS = (1, 2, 4, 8, 16)
Case = Callable[[], object]


def linears(loaded: LoadedModel, rows: int) -> Case:
    """All matrix products of a forward over `rows` tokens, and nothing else."""
    config, model = loaded.config, loaded.model
    x = torch.randn(rows, config.hidden_size, dtype=model.dtype)
    inner = torch.randn(rows, config.intermediate_size, dtype=model.dtype)
    heads = torch.randn(rows, config.num_heads * config.head_dim, dtype=model.dtype)

    @torch.inference_mode()
    def run() -> None:
        for layer in model.layers:
            linear(x, layer.qkv)
            linear_add(heads, layer.out, x)
            linear(x, layer.gate_up)
            linear_add(inner, layer.down, x)
        linear(x, model.head)

    return run


def prompt(tokens: int, vocab: int) -> list[int]:
    return [random.randrange(vocab) for _ in range(tokens)]


def prefilled(target: Target, context: int, rows: int) -> list[PageTable]:
    """Tables of `rows` requests with `context` random tokens in the cache."""
    tables = []
    for _ in range(rows):
        table = PageTable(target.pool, expected_tokens=context + 64)
        assert table.reserve(context + max(WIDTHS))
        text = prompt(context, target.config.vocab_size)
        for start in range(0, context, 512):
            chunk = text[start : start + 512]
            target.forward([ForwardRow(chunk, start, table.pages, 0)])
        tables.append(table)
    return tables


def forward(target: Target, tables: Sequence[PageTable], context: int, width: int) -> Case:
    rows = [ForwardRow([5] * width, context, t.pages, width) for t in tables]
    return lambda: target.forward(rows)


def stock(loaded: LoadedModel, batch: int) -> Case:
    """One decoding step of transformers with its own cache, same weights, dtype and threads."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from slipstream.models.loading import _cache_key, _cache_root

    entry = _cache_root(None) / f"{loaded.name}-{_cache_key(loaded.path)}"
    config = AutoConfig.from_pretrained(entry, dtype=loaded.model.dtype)
    model = AutoModelForCausalLM.from_config(config).to(loaded.model.dtype).eval()
    state = load_file(entry / "model.safetensors")
    model.load_state_dict(state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    ids = torch.tensor([prompt(CONTEXT, loaded.config.vocab_size) for _ in range(batch)])
    with torch.inference_mode():
        cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values

    @torch.inference_mode()
    def run() -> None:
        model(ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-1)

    return run


def measure(cases: dict[str, Case], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median milliseconds a case; every round runs every case once, in changing order."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for case in cases.values():
        case(), case(), case()
    for _ in range(rounds):
        for name in random.sample(list(cases), len(cases)):
            start = clock()
            cases[name]()
            samples[name].append((clock() - start) * 1e3)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of target forwards, as ratios.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without-transformers", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    random.seed(0)
    loaded = load(EMBEDDED)
    target = Target(loaded, num_pages=16 * 32 + LONG // 16 + 64)
    short, long = prefilled(target, CONTEXT, 16), prefilled(target, LONG, 1)
    cases = {"linears 1": linears(loaded, 1), "linears 16": linears(loaded, 16)}
    for width in WIDTHS:
        cases[f"b=1 n={width}"] = forward(target, short[:1], CONTEXT, width)
        cases[f"b=16 n={width}"] = forward(target, short, CONTEXT, width)
        cases[f"long n={width}"] = forward(target, long, LONG, width)
    if not options.without_transformers:
        cases["stock b=1"], cases["stock b=16"] = stock(loaded, 1), stock(loaded, 16)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    ms = measure(cases, options.rounds, clock)
    print(f"threads {options.threads}, {options.rounds} rounds, medians")
    print(f"1 row / its linears          {ms['b=1 n=1'] / ms['linears 1']:5.2f}")
    print(f"16 rows / their linears      {ms['b=16 n=1'] / ms['linears 16']:5.2f}")
    for label in ("b=1", "b=16", "long"):
        ratios = "  ".join(f"{ms[f'{label} n={n}'] / ms[f'{label} n=1']:5.2f}" for n in WIDTHS)
        print(f"{label:5s} n={WIDTHS} / n=1  {ratios}   (n=1: {ms[f'{label} n=1']:.1f} ms)")
    for label in ("b=1", "b=16"):
        if f"stock {label}" in ms:
            ratio = ms[f"stock {label}"] / ms[f"{label} n=1"]
            print(f"transformers / ours, {label:5s}   {ratio:5.2f}")


if __name__ == "__main__":
    main()
