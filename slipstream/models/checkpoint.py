"""Hugging Face directories: config.json, safetensors (one file or shards), checked before use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model, build, expected_shapes, head_rows
from slipstream.models.int8_rows import Memory, plain_handles
from slipstream.models.reduced import check_mapping, target_ids

TARGET_HEAD = "target"
"""In a drafter's config, `slipstream.head`: its reduced head is the target's rows, not stored."""

_SAMPLES, _SAMPLE_BYTES = 256, 1 << 16


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model directory. Raises `ModelError` where it is missing or broken."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}; is it a model directory?") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({error}); download the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object; download the model again.")
    return content


def config_file(path: Path) -> Path:
    """The config of a folder, or the file itself where one is named."""
    return path if path.is_file() else path / "config.json"


def read_config(directory: Path) -> ModelConfig:
    """The model's config; `generation_config.json` overrides its end-of-sequence ids."""
    hf = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.is_file():
        eos = read_json(generation).get("eos_token_id")
        hf = hf | ({"eos_token_id": eos} if eos is not None else {})
    return from_hf(hf, source=str(directory))


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory, as its index says. Raises `ModelError` if one lacks."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    missing = [n for n in names if not (directory / n).is_file()]
    if missing or not names:
        raise ModelError(
            f"{directory} has no {missing[0] if missing else 'weights'}; only safetensors weights "
            "are read: download the model again or convert it."
        )
    return [directory / n for n in names]


@contextmanager
def opened(directory: Path, *, target: Model | None = None) -> Iterator[dict[str, Any]]:
    """The open safetensors handle of every tensor of a directory, by name.

    What our drafters store in fewer bytes reads as if published: int8 rows (`models.int8_rows`)
    as plain weights, a reduced head that is the `target`'s as its rows, and rows of tokens that are
    never drafted as zeros. Raises `ModelError` on a file that is missing, corrupt or truncated.
    """
    with ExitStack() as stack:
        handles: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                handle = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is corrupt or truncated ({error}); download it again."
                ) from error
            handles |= dict.fromkeys(handle.keys(), handle)
        own = own_config(directory)
        found = plain_handles(handles, own.get("storage"), directory)
        if target is not None and "d2t" in found:
            found |= _left_out(own, found, target, str(directory))
        yield found


def _left_out(
    own: Mapping[str, Any], handles: Mapping[str, Any], target: Model, source: str
) -> dict[str, Memory]:
    """What `models.stored` left out of a folder because a reduced head makes it superfluous."""
    found: dict[str, Memory] = {}
    if own.get("head") != TARGET_HEAD:
        return found
    d2t, vocab = handles["d2t"].get_tensor("d2t"), target.config.vocab_size
    check_mapping(d2t, None, vocab, source)
    ids = target_ids(d2t)
    found["lm_head.weight"] = Memory(head_rows(target, ids.to(target.device)))
    for name in own.get("drafted_rows", ()):
        if name not in handles:
            continue  # the loader says that it is missing
        rows = handles[name].get_tensor(name)
        if len(rows) != len(ids):
            raise ModelError(
                f"{source} has {name} with {len(rows)} rows for {len(ids)} draft tokens (d2t); "
                "export the drafter again."
            )
        found[name] = Memory(rows.new_zeros(vocab, *rows.shape[1:]).index_copy_(0, ids, rows))
    return found


def own_config(directory: Path) -> dict[str, Any]:
    """What Slipstream itself wrote into a folder's config; empty for published checkpoints."""
    own = read_json(directory / "config.json").get("slipstream", {})
    if not isinstance(own, dict):
        raise ModelError(f"{directory} has slipstream = {own!r} in its config; it must be a table.")
    return own


def load_directory(
    directory: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
) -> Model:
    """Build the model from its safetensors, casting tensor by tensor."""
    with opened(directory) as handles:
        shapes = {n: tuple(h.get_slice(n).get_shape()) for n, h in handles.items()}
        check_tensors(shapes, config, source=str(directory))
        return build(
            config, lambda name: handles[name].get_tensor(name).to(device=device, dtype=dtype)
        )


def build_from_memory(
    tensors: Mapping[str, Tensor],
    config: ModelConfig,
    *,
    source: str,
    dtype: torch.dtype,
    device: torch.device,
) -> Model:
    """Build the model from tensors already in memory."""
    check_tensors({n: tuple(t.shape) for n, t in tensors.items()}, config, source=source)
    get: Callable[[str], Tensor] = lambda n: tensors[n].to(device=device, dtype=dtype)  # noqa: E731
    return build(config, get)


def check_tensors(
    shapes: Mapping[str, tuple[int, ...]], config: ModelConfig, *, source: str
) -> None:
    """Raise `ModelError` naming the first tensor that does not fit the config.

    An MTP head in the target's own checkpoint is left for `models.mtp` to read.
    """
    heads = (f"model.layers.{config.num_layers}.", "mtp.")
    compare_tensors(
        {name: shape for name, shape in shapes.items() if not name.startswith(heads)},
        expected_shapes(config),
        source=source,
        what=f"a {config.family} model",
        spare={"lm_head.weight"} if config.tied else (),
    )


def compare_tensors(
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    source: str,
    what: str,
    spare: Collection[str] = (),
) -> None:
    """Raise `ModelError` naming the first missing, unexpected or wrongly shaped tensor.

    `what` the weights should be of; `spare`: names that may be there and are not read.
    """
    for name, shape in expected.items():
        if name not in shapes:
            raise ModelError(
                f"{source} lacks the tensor {name}; its weights do not fit its config."
            )
        if shapes[name] != shape:
            raise ModelError(
                f"{source} has {name} of shape {shapes[name]}, its config says {shape}; "
                "weights and config belong to different models."
            )
    for name in shapes:
        if name not in expected and name not in spare and not name.endswith("rotary_emb.inv_freq"):
            raise ModelError(
                f"{source} holds the unexpected tensor {name}; {what} has no such "
                "weight, so the config's model_type is probably wrong."
            )


def fingerprint(files: list[Path], *extra: str) -> str:
    """Hex digest of files by name, size and up to 256 evenly spaced samples of 64 KiB each.

    Files up to 16 MiB are hashed whole; hashing 16 GiB would cost more than loading it.
    """
    digest = hashlib.sha256()
    for text in extra:
        digest.update(text.encode())
    for path in files:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        step = max(_SAMPLE_BYTES, size // _SAMPLES)
        with path.open("rb") as stream:
            for offset in range(0, size, step):
                stream.seek(offset)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()
