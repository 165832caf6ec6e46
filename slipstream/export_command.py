"""`slipstream export`: a drafter's folder as vLLM and SGLang read it, or small, as ours ship."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from slipstream.drafters import weights
from slipstream.drafters.specs import METHODS, DrafterSpec, parse
from slipstream.engine import LLM
from slipstream.errors import InvalidConfig
from slipstream.lab.cards import CARD, TRAINING
from slipstream.models.stored import write_compact, write_published

Say = Callable[[str], None]


def run_export(drafter: str, *, out: Path, model: str, compact: bool, say: Say) -> None:
    """Write the drafter's weights to `out`, read them again, and say what they take on disk.

    Raises `InvalidConfig` for drafters without a folder of weights, `ModelError` where weights or
    target cannot be read, do not fit, or `out` cannot be written.
    """
    spec = parse(drafter)
    if not METHODS[spec.method].ships:
        exist = ", ".join(method.name for method in METHODS.values() if method.ships)
        raise InvalidConfig(
            f"Drafter {drafter!r} has no weights of its own to export; those with: {exist}."
        )
    llm = LLM(model, drafter=drafter, device="cpu", max_users=1, kv_tokens=64)
    source = _source(spec, llm)
    if compact:
        write_compact(source, out, method=spec.method, target=llm.loaded)
    else:
        write_published(source, out, method=spec.method, target=llm.loaded.model)
    for name in (CARD, TRAINING):
        if (source / name).is_file():  # also over those of weights that lay there before
            shutil.copyfile(source / name, out / name)
    llm.fork(str(replace(spec, path=str(out))))  # what was written is what loads
    form = "int8 rows" if compact else "bfloat16, as published"
    before, after = _mebibytes(source), _mebibytes(out)
    say(f"{spec.method} in {out}: {after:.1f} MiB ({form}), {before:.1f} before.")


def _source(spec: DrafterSpec, llm: LLM) -> Path:
    if spec.path is not None:
        return Path(spec.path).expanduser()
    return weights.shipped(spec.method, llm.loaded)


def _mebibytes(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) / 2**20
