"""Training texts on disk: shards of one target's answers, each with a manifest that names it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slipstream import provenance
from slipstream.errors import InvalidConfig
from slipstream.train.data import Text


def write_shard(
    folder: Path, name: str, texts: Sequence[Text], *, target: str, more: dict[str, Any]
) -> Path:
    """`name`.npz and its manifest `name`.json. `target`: the fingerprint of who answered; `more`:
    how the texts were made, for the manifest.
    """
    make_folder(folder)
    kinds = sorted({t.kind for t in texts})
    flat = np.concatenate([t.tokens for t in texts])
    small = int(flat.max()) < 2**16
    file = folder / f"{name}.npz"
    np.savez_compressed(
        file,
        tokens=flat.astype(np.uint16 if small else np.int32),
        ends=np.cumsum([len(t.tokens) for t in texts]),
        prompt_lens=np.array([t.prompt_len for t in texts], np.int32),
        kinds=np.array([kinds.index(t.kind) for t in texts], np.int8),
    )
    manifest = {
        "target": target,
        "texts": len(texts),
        "own_tokens": own_tokens(texts),
        "kinds": kinds,
        "counts": dict(Counter(t.kind for t in texts)),
        "made": provenance.now(),
        "slipstream": provenance.versions()["slipstream"],
        **more,
    }
    file.with_suffix(".json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return file


def read_shards(folder: Path, *, target: str) -> list[Text]:
    """All texts of a folder's shards, by shard name.

    Raises `InvalidConfig` without any, and where a shard is another target's.
    """
    texts: list[Text] = []
    for manifest in sorted(folder.glob("*.json")):
        said = json.loads(manifest.read_text(encoding="utf-8"))
        if said.get("target") != target:
            raise InvalidConfig(
                f"{manifest} holds answers of another target ({str(said.get('target'))[:12]}, not "
                f"{target[:12]}); a drafter has to learn from its own target's."
            )
        texts += _read(manifest.with_suffix(".npz"), said["kinds"])
    if not texts:
        raise InvalidConfig(f"{folder} holds no texts; make some with `slipstream texts`.")
    return texts


def make_folder(folder: Path) -> None:
    """Make it where it is missing. Raises `InvalidConfig` where that cannot be done."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(
            f"{folder} cannot be made ({error.strerror}); name another folder."
        ) from error


def own_tokens(texts: Sequence[Text]) -> int:
    """Tokens that the target wrote."""
    return sum(len(t.tokens) - t.prompt_len for t in texts)


def _read(file: Path, kinds: list[str]) -> list[Text]:
    try:
        with np.load(file) as held:
            parts = np.split(held["tokens"].astype(np.int32), held["ends"][:-1])
            lens, which = held["prompt_lens"].tolist(), held["kinds"].tolist()
    except (OSError, ValueError, KeyError) as error:
        raise InvalidConfig(f"{file} cannot be read ({error}); make it again.") from error
    return [Text(t, n, kinds[k]) for t, n, k in zip(parts, lens, which, strict=True)]
