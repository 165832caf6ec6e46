"""Times products of 17 to 192 rows in every sensible cut beside the stock ones (one GPU).

    python bench/wide_products.py [--rows 128 64] [--rounds 7]

Weights rotate, so that none stays in the L2 cache; all variants take turns, and times are medians
over rounds, in microseconds a product.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.cuda.norm import silu_gate
from slipstream.models.cuda.wide import Cut, wide

SHAPES = {  # a dense 8B's: columns, inner, gated
    "qkv": (6144, 4096, False),
    "out": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
}
BANDWIDTH = 4.2e6
"""Bytes a microsecond of a large copy on one NVIDIA H200."""
ROTATE = 12
Run = Callable[[Tensor], Tensor]


def cuts(columns: int, inner: int, gated: bool) -> list[Cut]:
    """Cuts that give most multiprocessors a program."""
    return [
        Cut(tile, split)
        for tile in (32, 48, 64, 96, 128, 192, 256)
        for split in ((1,) if gated else (1, 2, 4, 8))
        if columns % tile == 0 and inner % (64 * split) == 0
        if 96 <= columns // tile * split <= 132
    ]


def graph_of(run: Run, weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    for w in weights:
        run(w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            run(w)
    return graph


def timed(graph: torch.cuda.CUDAGraph, count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / (3 * count)


def measure(name: str, rows: int, rounds: int) -> None:
    columns, inner, gated = SHAPES[name]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weights = [
        torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
        for _ in range(ROTATE)
    ]
    stock: Run = (lambda w: silu_gate(F.linear(x, w))) if gated else (lambda w: F.linear(x, w))
    runs: dict[str, Run] = {"stock": stock}
    for cut in cuts(columns, inner, gated):
        runs[f"{cut.tile}/{cut.split}"] = lambda w, c=cut: wide(x, w, c, gated=gated)
    graphs = {label: graph_of(run, weights) for label, run in runs.items()}
    times: dict[str, list[float]] = {label: [] for label in graphs}
    for _ in range(rounds):
        for label, graph in graphs.items():
            times[label].append(timed(graph, ROTATE))
    median = {label: statistics.median(t) for label, t in times.items()}
    found = ", ".join(f"{label} {median[label]:.1f}" for label in sorted(median, key=median.get))
    print(f"{name}, {rows} rows: floor {columns * inner * 2 / BANDWIDTH:.1f}, {found}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    for rows in given.rows:
        for name in SHAPES:
            measure(name, rows, given.rounds)


if __name__ == "__main__":
    main()
