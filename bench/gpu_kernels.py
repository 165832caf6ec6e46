"""Kernel sweeps on a GPU: which tile reads weights fastest, which split reads a cache fastest.

    python bench/gpu_kernels.py linear [--compile PART/PARTS]   products of the 8B and 135M shapes
    python bench/gpu_kernels.py attention                       decode and verify rows, 1K to 126K

Each time is a launch in a CUDA graph of many over different weights (more than the L2 holds), so
launch gaps count. Medians of replays; the last column is the share of the copy bandwidth.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from slipstream.engine.cost import copy_bandwidth
from slipstream.models.cuda import attention
from slipstream.models.cuda.attention import Reading, Tiles, attend, scratch_for
from slipstream.models.cuda.linear import Tile, linear

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
SHAPES = {  # columns, inner
    "8B qkv": (6144, 4096),
    "8B out": (4096, 4096),
    "8B gate_up": (24576, 4096),
    "8B down": (4096, 12288),
    "135M qkv": (960, 576),
    "135M out": (576, 576),
    "135M gate_up": (3072, 576),
    "135M down": (576, 1536),
}
FEW = [
    Tile(16, 256, 2, 4),
    Tile(16, 256, 2, 5),
    Tile(16, 256, 2, 6),
    Tile(16, 256, 1, 4),
    Tile(16, 512, 2, 3),
    Tile(16, 128, 2, 6),
    Tile(32, 256, 2, 3),
    Tile(32, 128, 2, 6),
    Tile(16, 512, 4, 4),
    Tile(64, 128, 4, 4),
]
SMALL = [Tile(16, 64, 2, 6), Tile(16, 64, 1, 6), Tile(16, 64, 1, 9), Tile(16, 32, 1, 8)]


def timed(enqueue: Callable[[], Any], launches: int) -> float:
    """Microseconds a launch, median of 12 replays of a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        enqueue()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        enqueue()
    times = []
    for _ in range(15):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        done.record()
        done.synchronize()
        times.append(begun.elapsed_time(done) * 1e3 / launches)
    return statistics.median(times[3:])


def products(name: str, rows: int, tiles: list[Tile], top: float, *, compiling: bool) -> None:
    columns, inner = SHAPES[name]
    size = columns * inner * 2
    copies = 1 if compiling else max(4, int(4e8 // size))
    weights = [torch.randn(columns, inner, dtype=BF16, device=DEVICE) for _ in range(copies)]
    x = torch.randn(rows, inner, dtype=BF16, device=DEVICE)
    found = []
    for tile in tiles:

        def enqueue(tile: Tile = tile) -> None:
            for w in weights:
                linear(x, w, tile=tile)

        try:
            if compiling:
                enqueue()
            else:
                found.append((timed(enqueue, copies), str(tile)))
        except Exception as error:  # noqa: BLE001 - a sweep goes on
            print(name, rows, tile, "failed:", repr(error)[:160])
    if compiling:
        return
    stock = timed(lambda: [F.linear(x, w) for w in weights], copies)
    print(f"{name} x {rows} rows: stock {stock:.1f} us ({size / stock * 1e6 / top:.2f})")
    for us, tile in sorted(found)[:4]:
        print(f"   {us:7.1f} us ({size / us * 1e6 / top:.2f}) {tile}")


def contexts(users: int, width: int, context: int, top: float) -> None:
    kv, group, dim, page = 8, 4, 128, 64
    pages = -(-(context + width) // page)
    layers = max(2, int(4e8 // (users * context * 2 * kv * dim * 2)) + 1)
    storage = [
        torch.randn(users * pages * page, 2 * kv, dim, dtype=BF16, device=DEVICE)
        for _ in range(layers)
    ]
    qkv = torch.randn(users * width, (kv * group + 2 * kv) * dim, dtype=BF16, device=DEVICE)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    table = torch.arange(users * pages, dtype=torch.int32, device=DEVICE).view(users, pages)
    found = []
    for splits in (1, 2, 4, 8, 16, 32, 64, 128):
        if not 60 <= users * kv * splits <= 1100:
            continue
        for block, stages in ((64, 2), (64, 3), (64, 4), (32, 4), (32, 5)):
            reading = Reading(block, stages)
            attention.reading_for = lambda *_, reading=reading: reading
            tiles = Tiles(
                row=ints(list(range(users))), first=ints([0] * users),
                start=ints([context] * users), length=ints([width] * users),
                token=ints([i * width for i in range(users)]), pages=table, tokens=width,
                splits=splits,
            )  # fmt: skip
            scratch = scratch_for(
                users, kv=kv, dim=dim, group=group, tokens=width, splits=splits, device=DEVICE
            )

            def enqueue(tiles: Tiles = tiles, scratch: Any = scratch) -> None:
                for cache in storage:
                    attend(qkv, cache, tiles, scratch=scratch, page_size=page)

            found.append((timed(enqueue, layers), splits, block, stages))
    size = users * context * 2 * kv * dim * 2
    print(f"attention {users} users x {width} rows at {context}")
    for us, *what in sorted(found)[:4]:
        print(f"   {us:7.1f} us ({size / us * 1e6 / top:.2f}) splits, positions, stages {what}")


def main() -> None:
    part, parts = 0, 1
    compiling = "--compile" in sys.argv
    if compiling:
        part, parts = map(int, sys.argv[sys.argv.index("--compile") + 1].split("/"))
    top = 1.0 if compiling else copy_bandwidth(DEVICE)
    print(f"copy bandwidth {top / 1e12:.2f} TB/s")
    if sys.argv[1] == "attention":
        for case in ((1, 1, 1024), (1, 8, 1024), (16, 1, 1024), (16, 8, 1024)):
            contexts(*case, top)
        for width in (1, 8):
            contexts(1, width, 126_000, top)
        return
    jobs = [(n, r, FEW) for n in SHAPES if n.startswith("8B") for r in (1, 16)]
    jobs += [(n, 1, SMALL) for n in SHAPES if n.startswith("135M")]
    if compiling:
        jobs = [(n, r, tiles[part::parts]) for n, r, tiles in jobs]
    for name, rows, tiles in jobs:
        products(name, rows, tiles, top, compiling=compiling)


if __name__ == "__main__":
    main()
