"""Training texts on disk: shards of one target's answers, each with a manifest that names it."""

from __future__ import annotations

import json
import zipfile
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

    May be called again with the same texts and further ones behind them. Whenever it is killed, the
    folder holds what one of the calls wrote: each file is replaced in one step, the manifest last,
    and it says how many of the texts count.
    """
    make_folder(folder)
    kinds = list(dict.fromkeys(t.kind for t in texts))  # further texts do not renumber them
    flat = np.concatenate([t.tokens for t in texts])
    small = int(flat.max()) < 2**16
    file = folder / f"{name}.npz"
    partial = folder / f".{file.name}.partial"
    with partial.open("wb") as out:
        np.savez_compressed(
            out,
            tokens=flat.astype(np.uint16 if small else np.int32),
            ends=np.cumsum([len(t.tokens) for t in texts]),
            prompt_lens=np.array([t.prompt_len for t in texts], np.int32),
            kinds=np.array([kinds.index(t.kind) for t in texts], np.int8),
        )
    partial.replace(file)
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
    partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    partial.replace(file.with_suffix(".json"))
    return file


def resumed(
    folder: Path, name: str, *, target: str, how: dict[str, Any]
) -> tuple[list[Text], dict[str, Any]]:
    """A shard's texts and manifest, to go on with; nothing where there is none.

    `how`: what its manifest has to say. Raises `InvalidConfig` naming what it says otherwise.
    """
    manifest = folder / f"{name}.json"
    if not manifest.is_file():
        return [], {}
    said = _manifest(manifest)
    for key, wanted in ({"target": target} | how).items():
        if said.get(key) != wanted:
            raise InvalidConfig(
                f"{manifest} holds texts made with {key} {_short(said.get(key))}, not "
                f"{_short(wanted)}; take another seed, or delete it."
            )
    return _read(manifest.with_suffix(".npz"), said), said


def read_shards(folder: Path, *, target: str) -> list[Text]:
    """All texts of a folder's shards, by shard name.

    Raises `InvalidConfig` without any, and where a shard is another target's.
    """
    texts: list[Text] = []
    for manifest in sorted(folder.glob("*.json")):
        said = _manifest(manifest)
        if said.get("target") != target:
            raise InvalidConfig(
                f"{manifest} holds answers of another target ({str(said.get('target'))[:12]}, not "
                f"{target[:12]}); a drafter has to learn from its own target's."
            )
        texts += _read(manifest.with_suffix(".npz"), said)
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


def _manifest(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{file} cannot be read ({error}); make it again.") from error
    if not isinstance(said, dict):
        raise InvalidConfig(f"{file} is no manifest of texts; take it out of the folder.")
    return said


def _read(file: Path, said: dict[str, Any]) -> list[Text]:
    """The texts that the manifest counts; behind them may be some of a write that was cut off."""
    try:
        count, kinds = said["texts"], said["kinds"]
        with np.load(file) as held:
            ends = held["ends"][:count]
            parts = np.split(held["tokens"][: ends[-1]].astype(np.int32), ends[:-1])
            lens, which = held["prompt_lens"][:count].tolist(), held["kinds"][:count].tolist()
        texts = [Text(t, n, kinds[k]) for t, n, k in zip(parts, lens, which, strict=True)]
    except (OSError, ValueError, LookupError, zipfile.BadZipFile) as error:
        raise InvalidConfig(f"{file} cannot be read ({error}); make it again.") from error
    if len(texts) != count:
        raise InvalidConfig(f"{file} has {len(texts)} texts of {count}; make it again.")
    return texts


def _short(value: Any) -> str:
    return str(value)[:12]
