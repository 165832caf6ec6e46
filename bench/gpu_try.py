"""Ways under measurement (`slipstream.models.cuda.launch.TRIED`) against the step as it is.

    python bench/gpu_try.py [--out FILE.jsonl] [--limit SECONDS] [--only NAME+NAME,NAME]

First `SMOKES` run on four layers, each in its own process, all at once: that compiles the kernels
and finds those that fail or hang. Then one process captures the whole step of the 8B shape in every
way that is left and replays them in turn, so that the machine's moods hit all alike; where it says
nothing for a while it is killed, the way it was at is dropped, and the rest goes on. Each line is
written as it is found. `error`: relative distance of the logits from those of the step as it is;
`races`: of `REPEATS` replays of the captured forward, those whose logits are not bit for bit those
of the same kernels without overlap of launches.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SHAPE = HERE.parent / "shapes" / "dense-8b.json"
BASE = "as-is"
ALL = "pdl+cut+qkv+gate+att+less"
SMOKES = [
    "pdl", "cut", "qkv", "gate", "gate64", "gate32", "less", "wg", "pdl+att",
    "pdl+cut+qkv+gate+less", "pdl+cut+gate64", "pdl+gate32+wg+wg32",
]  # fmt: skip
"""Between them these compile nearly all that the ways below need."""
WAYS = [
    "pdl", "cut", "qkv", "gate", "gate64", "gate32", "less", "wg", "wg+wg32", "pdl+att",
    "pdl+cut", "pdl+gate", "pdl+cut+gate", "pdl+cut+gate+bare", "pdl+cut+gate+deep",
    "pdl+cut+gate64", "pdl+cut+gate32", "pdl+cut+qkv+gate", "pdl+cut+gate+att+less",
    "pdl+cut+gate+wg+less", "pdl+cut+gate+wg+att+less", ALL, f"{ALL}+wg", f"{ALL}+wg+wg32",
]  # fmt: skip
FINAL = ["pdl", "pdl+cut", "pdl+cut+gate", "pdl+cut+gate+att+less", ALL, f"{ALL}+wg"]
"""What is also measured where a draft is short."""
SCENES = {  # drafter, users, given tokens a row-step, the ways that can matter there
    "dflash x 16": ("dflash:7", 16, 4.0, WAYS),
    "ngram x 16": ("ngram:3", 16, 1.0, FINAL),
    "none x 16": ("none", 16, None, [ALL]),
    "dflash x 1": ("dflash:7", 1, 4.0, [ALL]),
}
CONTEXT, ROUNDS, REPLAYS, REPEATS = 1024, 7, 10, 30


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def choose(way: str) -> None:
    from slipstream.models.cuda import launch

    launch.TRIED.clear()
    launch.TRIED.update(name for name in way.split("+") if name != BASE)


@dataclass
class Bench:
    """A step in the middle of its work, which every measurement begins anew."""

    step: Any
    kept: tuple[Any, ...]
    engine: Any

    def rewind(self) -> None:
        slots = self.step.slots
        for table, kept in zip((slots.lengths, self.step.drafts, self.step.counts), self.kept,
                               strict=True):  # fmt: skip
            table.copy_(kept)

    def logits(self) -> Any:
        self.rewind()
        scores = self.step.enqueue_verify()
        return scores.clone()

    def drafts(self) -> Any:
        self.rewind()
        self.step.enqueue_draft()
        return self.step.drafts.clone()


def bench_for(loaded: Any, scene: str, layers: int) -> Bench:
    import numpy as np
    import torch

    from slipstream.engine.cost import Case, _engine
    from slipstream.types import SamplingParams

    drafter, users, given, _ = SCENES[scene]
    if drafter.startswith("dflash") and layers < 36:
        drafter += ",layers=2"
    choose(BASE)
    engine, _ = _engine(loaded, Case(drafter, users, CONTEXT, given))
    rng = np.random.default_rng(0)
    vocab = loaded.model.config.vocab_size
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    for _ in range(users):
        engine.submit(rng.integers(0, vocab, CONTEXT - 8).tolist(), params)
    while engine.fast.lane._step is None:
        engine.step()
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    step = engine.fast.lane.current
    return Bench(
        step, (step.slots.lengths.clone(), step.drafts.clone(), step.counts.clone()), engine
    )


def load(layers: int) -> Any:
    import torch

    from slipstream.engine.cost import shape_model
    from slipstream.models.shapes import read_shape

    config = read_shape(SHAPE)
    if layers < config.num_layers:
        config = replace(
            config,
            num_layers=layers,
            rope=config.rope[:layers],
            windows=config.windows[:layers],
        )
    return shape_model(config, device=torch.device("cuda"), dtype=torch.bfloat16)


def check(bench: Bench, way: str, want: Any, drafts: Any) -> dict[str, Any]:
    """How far a way's logits are from `want`, and whether overlapping launches changes any bit."""
    import torch

    from slipstream.target.graphs import capture

    choose("+".join(name for name in way.split("+") if name not in ("pdl", "att")) or BASE)
    alone = bench.logits()
    choose(way)
    found = bench.logits()
    held: list[Any] = []

    def enqueue() -> None:
        held[:] = [bench.step.enqueue_verify()]

    bench.rewind()
    graph = capture(enqueue)
    races = 0
    for _ in range(REPEATS):
        graph.replay()
        races += not torch.equal(held[0], alone)
    torch.cuda.synchronize()
    used = torch.isfinite(want).all(1)
    error = float((found[used].float() - want[used].float()).norm() / want[used].float().norm())
    same = float((found.argmax(1) == want.argmax(1)).float().mean())
    line = {"error": round(error, 5), "same_argmax": round(same, 3), "races": races}
    if bench.step.drafts_here:
        own = bench.drafts()
        line["same_drafts"] = round(float((own == drafts).float().mean()), 3)
    return line


def smoke(way: str) -> None:
    """A way on four layers: compiles what it needs and says whether it is sound."""
    import torch

    with torch.inference_mode():
        loaded = load(4)
        for scene in ("dflash x 16", "ngram x 16"):
            bench = bench_for(loaded, scene, 4)
            want, drafts = bench.logits(), bench.drafts()
            say(smoke=way, scene=scene, **check(bench, way, want, drafts))


def timed(graph: Any, bench: Bench) -> float:
    """Milliseconds of a replay, median of some after two that do not count."""
    import torch

    bench.rewind()
    events = []
    for _ in range(REPLAYS + 2):
        begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        done.record()
        events.append((begun, done))
    torch.cuda.synchronize()
    return statistics.median(begun.elapsed_time(done) for begun, done in events[2:])


def work(ways: list[str], scenes: list[str]) -> None:
    """Measure these ways on the whole shape."""
    import torch

    from slipstream.target.graphs import capture

    with torch.inference_mode():
        say(at="loading")
        loaded = load(36)
        for scene in scenes:
            say(at="prefill", scene=scene)
            bench = bench_for(loaded, scene, 36)
            want, drafts = bench.logits(), bench.drafts()
            here = [BASE, *(w for w in ways if w in SCENES[scene][3])]
            graphs = {}
            for way in here:
                say(at=way, scene=scene, doing="capture")
                say(check=way, scene=scene, **check(bench, way, want, drafts))
                bench.rewind()
                graphs[way] = capture(bench.step._enqueue)
            race(graphs, bench, scene)
            del graphs, bench, want, drafts
            torch.cuda.empty_cache()


def race(graphs: dict[str, Any], bench: Bench, scene: str) -> None:
    times: dict[str, list[float]] = {way: [] for way in graphs}
    for turn in range(ROUNDS):
        order = list(graphs) if turn % 2 else list(graphs)[::-1]
        for way in order:
            if turn == 0:
                say(at=way, scene=scene, doing="replay")
            times[way].append(timed(graphs[way], bench))
    for way, found in times.items():
        gains = [found[i] - times[BASE][i] for i in range(ROUNDS)]
        say(
            result=way,
            scene=scene,
            ms=round(statistics.median(found), 4),
            gain_ms=round(statistics.median(gains), 4),
            low=round(min(found), 4),
            high=round(max(found), 4),
        )


class Child:
    """A process of this script and its lines; `lines` ends at its end or where it falls silent."""

    def __init__(self, *options: str) -> None:
        paths = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.silent = False

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def lines(self, patience: Callable[[], float]) -> Iterator[dict[str, Any]]:
        while True:
            try:
                line = self._queue.get(timeout=max(0.1, patience()))
            except queue.Empty:
                self.silent = True
                self.process.kill()
                self.process.wait(20)
                return
            if line is None:
                self.process.wait()
                return
            if line.startswith("{"):
                yield json.loads(line)
            else:
                print(line, end="", flush=True)


def sound(ways: list[str], write: Callable[[dict[str, Any]], None], end: float) -> list[str]:
    """The ways with nothing in them that fails on four layers; all are tried at once."""
    children = {way: Child("--smoke", way) for way in (BASE, *SMOKES)}
    bad: list[set[str]] = []
    quiet = True  # whether the step as it is gives the same bits every time
    for way, child in children.items():
        found = []
        for line in child.lines(lambda: end - time.monotonic()):
            write(line)
            found.append(line["error"] < 0.05 and (line["races"] == 0 or not quiet))
        if way == BASE:
            quiet = found == [True, True]
        elif found != [True, True]:
            bad.append(set(way.split("+")))
            write({"dropped": way, "silent": child.silent, "rc": child.process.returncode})
    return [way for way in ways if not any(names <= set(way.split("+")) for names in bad)]


def measured(ways: list[str], write: Callable[[dict[str, Any]], None], end: float) -> None:
    """Whole steps of these ways; a way at which the process falls silent or dies is left out."""
    scenes = list(SCENES)
    while scenes and time.monotonic() < end:
        child = Child("--work", ",".join(ways), "--scenes", ",".join(scenes))
        at, scene, done = BASE, scenes[0], set()
        for line in child.lines(lambda: min(60.0, end - time.monotonic())):
            write(line)
            at, scene = line.get("at", at), line.get("scene", scene)
            if "result" in line:
                done.add(scene)
        if child.process.returncode == 0 and not child.silent:
            return
        write({"dropped": at, "scene": scene, "silent": child.silent})
        scenes = [s for s in scenes if s not in done]
        if at in ways:
            ways = [w for w in ways if w != at]
        elif scenes:
            scenes = scenes[1:]


def table(lines: list[dict[str, Any]]) -> None:
    checks = {(c["check"], c["scene"]): c for c in lines if "check" in c}
    print(f"\n{'scene':12s} {'way':34s} {'ms':>8s} {'gain':>8s} {'low':>7s} {'high':>7s}  error "
          " races same drafts")  # fmt: skip
    for r in lines:
        if "result" in r:
            c = checks.get((r["result"], r["scene"]), {})
            print(
                f"{r['scene']:12s} {r['result']:34s} {r['ms']:8.3f} {r['gain_ms']:+8.3f} "
                f"{r['low']:7.3f} {r['high']:7.3f} {c.get('error')} {c.get('races')} "
                f"{c.get('same_argmax')} {c.get('same_drafts')}"
            )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--smoke")
    options.add_argument("--work")
    options.add_argument("--scenes")
    options.add_argument("--only")
    options.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "try.jsonl"))
    options.add_argument("--limit", type=float, default=230.0)
    given = options.parse_args()
    if given.smoke:
        smoke(given.smoke)
        return
    if given.work:
        work(given.work.split(","), given.scenes.split(","))
        return
    begun, lines = time.monotonic(), []
    with Path(given.out).open("a") as file:

        def write(line: dict[str, Any]) -> None:
            line["seconds"] = round(time.monotonic() - begun, 1)
            lines.append(line)
            for out in (file, sys.stdout):
                print(json.dumps(line), file=out, flush=True)

        ways = given.only.split(",") if given.only else WAYS
        end = begun + given.limit
        good = sound(ways, write, min(begun + 100, end))
        measured(good, write, end)
    table(lines)


if __name__ == "__main__":
    main()
