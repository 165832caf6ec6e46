"""A drafter's folder written again: small, as it ships, or in full, as vLLM and SGLang read it.

The two forms differ in how weights are stored (see `models.int8_rows`) and in what the target
already has: a small EAGLE-3 folder leaves out the reduced head where it is rows of the target's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models import eagle3
from slipstream.models.checkpoint import opened, own_config, read_json
from slipstream.models.dense import Model, head_rows
from slipstream.models.int8_rows import STORAGE, compacted
from slipstream.models.loading import LoadedModel

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_HEAD, _D2T, _T2D = "lm_head.weight", "d2t", "t2d"
_TARGETS_OWN = ("embed_tokens.weight", "shared_head.head.weight")


def write_published(folder: Path, out: Path, *, method: str, target: Model) -> None:
    """Write the drafter of `folder` to `out` as a published checkpoint: every weight in bf16,
    whatever it was stored as, and the reduced head of EAGLE-3 with `t2d` and `d2t`.

    Raises `ModelError` where the folder cannot be read or `out` is no place for it.
    """
    tensors = _tensors(folder, method, target)
    if method == "eagle3" and _D2T in tensors:
        tensors[_D2T] = tensors[_D2T].long()
        ids = eagle3.target_ids(tensors[_D2T], target.config.vocab_size)
        tensors[_T2D] = eagle3.drafted_tokens(tensors[_D2T], target.config.vocab_size)
        if own_config(folder).get("head") == eagle3.TARGET_HEAD:
            tensors[_HEAD] = head_rows(target, ids.to(target.device))
    kept = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    config = read_json(folder / CONFIG) | {"torch_dtype": "bfloat16"}
    config.pop("slipstream", None)
    _write(folder, out, config, kept)


def write_compact(folder: Path, out: Path, *, method: str, target: LoadedModel) -> None:
    """Write the drafter of `folder` to `out` in the form that ships: int8 rows, without what the
    target has, and with the target's fingerprint in the config, by which it is found.

    Raises `ModelError` as `write_published` does, and for weights that are not finite.
    """
    tensors = _tensors(folder, method, target.model)
    unread = (*_TARGETS_OWN, _HEAD) if method == "dspark" else _TARGETS_OWN
    tensors = {n: t for n, t in tensors.items() if not n.endswith(unread)}
    own: dict[str, Any] = {
        "storage": STORAGE,
        "method": method,
        "target": target.fingerprint,
        "target_name": target.name,
    }
    if method == "eagle3":
        tensors.pop(_T2D, None)  # says the same as d2t
        if _has_target_head(folder, tensors, target.model):
            tensors.pop(_HEAD, None)
            own["head"] = eagle3.TARGET_HEAD
    config = read_json(folder / CONFIG) | {"slipstream": own}
    _write(folder, out, config, compacted(tensors, source=str(folder)))


def _tensors(folder: Path, method: str, target: Model) -> dict[str, Tensor]:
    """What belongs to the drafter, by published name, as plain weights."""
    with opened(folder) as handles:
        tensors: dict[str, Tensor] = {n: h.get_tensor(n) for n, h in handles.items()}
    if method == "mtp":  # a head may lie in its target's own checkpoint
        heads = (f"model.layers.{target.config.num_layers}.", "mtp.")
        return {n: t for n, t in tensors.items() if n.startswith(heads)}
    if method == "eagle3":
        return {eagle3.plain_name(n): t for n, t in tensors.items()}
    return tensors


def _has_target_head(folder: Path, tensors: Mapping[str, Tensor], target: Model) -> bool:
    """Whether a reduced head is nothing but rows of the target's, which is how ours are trained."""
    if _D2T not in tensors:
        return False
    if _HEAD not in tensors:
        return own_config(folder).get("head") == eagle3.TARGET_HEAD
    ids = eagle3.target_ids(tensors[_D2T], target.config.vocab_size).to(target.device)
    if tensors[_HEAD].shape != (len(ids), target.config.hidden_size):
        return False
    return torch.equal(tensors[_HEAD].bfloat16(), head_rows(target, ids).bfloat16().cpu())


def _write(
    folder: Path, out: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    if out.resolve() == folder.resolve():
        raise ModelError(f"{out} is the folder that is exported; name another one.")
    if (out / INDEX).exists() or (out.exists() and not out.is_dir()):
        raise ModelError(f"{out} holds something else already; name another folder.")
    try:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(config), indent=1) + "\n"
        (out / CONFIG).write_text(text, encoding="utf-8")
        kept = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(kept, out / WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{out} cannot be written ({error}); name another folder.") from error
