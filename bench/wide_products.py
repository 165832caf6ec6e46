"""Times products of 17 to 128 rows in every sensible cut against the stock ones (one GPU).

    python bench/wide_products.py [--rows 128] [--rounds 7] [--out FILE]

Every product is checked against float32 first. Weights rotate, so that none stays in the L2 cache;
times are medians over rounds in which all variants take turns, in microseconds a product.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.cuda.norm import silu_gate
from slipstream.models.cuda.wide import Cut, cut_for, wide

SHAPES = {  # a dense 8B's, columns by inner length
    "qkv": (6144, 4096, False),
    "out": (4096, 4096, False),
    "gate_up": (24576, 4096, True),
    "down": (4096, 12288, False),
}
ROTATE = 12
Run = Callable[[Tensor], Tensor]


def cuts(columns: int, inner: int, gated: bool) -> list[Cut]:
    """Cuts that give most multiprocessors one program."""
    found = []
    for tile in (16, 32, 48, 64, 96, 128, 192, 256):
        for split in (1, 2, 4, 8):
            for cluster in (1, 2, 4):
                fits = columns % (tile * cluster) == 0 and inner % (64 * split) == 0
                programs = columns // tile * split
                if fits and not (gated and split > 1) and 96 <= programs <= 132 * 2:
                    found.append(Cut(tile, split, cluster))
    return found


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


def wrong(got: Tensor, want: Tensor) -> float:
    got = got.float().sum(0) if got.dim() == 3 else got.float()
    return float((got - want).norm() / want.norm())


def measure(name: str, rows: int, rounds: int) -> dict[str, object]:
    columns, inner, gated = SHAPES[name]
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    weights = [
        torch.randn(columns, inner, device="cuda", dtype=torch.bfloat16) / inner**0.5
        for _ in range(ROTATE)
    ]
    want = x.float() @ weights[0].float().T
    if gated:
        half = columns // 2
        want = F.silu(want[:, :half]) * want[:, half:]
    stock: Run = (lambda w: silu_gate(F.linear(x, w))) if gated else (lambda w: F.linear(x, w))
    runs: dict[str, Run] = {"stock": stock}
    for cut in cuts(columns, inner, gated):
        for ahead in (False, True):
            label = f"{cut.tile}/{cut.split}/{cut.cluster}{'+' if ahead else ''}"
            runs[label] = lambda w, c=cut, a=ahead: wide(x, w, c, gated=gated, ahead=a)
    graphs, errors = {}, {}
    for label, run in runs.items():
        errors[label] = wrong(run(weights[0]), want)
        if errors[label] < 1e-2:
            graphs[label] = graph_of(run, weights)
    times: dict[str, list[float]] = {label: [] for label in graphs}
    for _ in range(rounds):
        for label, graph in graphs.items():
            times[label].append(timed(graph, ROTATE))
    floor = columns * inner * 2 / 4.28e6
    median = {label: statistics.median(t) for label, t in times.items()}
    best = sorted(median, key=lambda label: median[label])
    print(f"{name} x {rows}: floor {floor:.1f}, stock {median['stock']:.1f} us")
    print("  " + ", ".join(f"{label} {median[label]:.1f}" for label in best[:14]))
    bad = {label: e for label, e in errors.items() if not e < 1e-2}
    if bad:
        print(f"  WRONG: {bad}")
    return {"product": name, "rows": rows, "floor": floor, "us": median, "error": errors}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    lines = []
    for rows in given.rows:
        for name in SHAPES:
            lines.append(measure(name, rows, given.rounds))
            if given.out:
                given.out.write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
