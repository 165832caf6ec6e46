"""A drafter's folder written again: small, as it ships, or in full, as vLLM and SGLang read it.

The two forms differ in how weights are stored (see `models.int8_rows`) and in what the target
already has: a small folder leaves out its embedding, and the head of a reduced vocabulary where
that is rows of the target's, with rows that are never read then.
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
from slipstream.models.checkpoint import TARGET_HEAD, opened, read_json
from slipstream.models.dense import Model, head_rows
from slipstream.models.int8_rows import STORAGE, compacted
from slipstream.models.loading import LoadedModel
from slipstream.models.reduced import check_mapping, named, target_ids

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_HEAD, _D2T, _T2D = "lm_head.weight", "d2t", "t2d"
_WHOLE = ("mtp", "dflash2")
"""Methods that other engines serve with the target's whole head only."""
_BY_DRAFTED = ("candidate_selector.successor_codebook",)
"""With a row for every token of which only those of drafted tokens are read."""
_EMBEDDING = ("embed_tokens.weight", "shared_head.head.weight")
"""Of the target, where a publisher stored it again; with a tied head that is the embedding too."""


def write_published(folder: Path, out: Path, *, method: str, target: Model) -> None:
    """Write the drafter of `folder` to `out` as a published checkpoint: every weight in bf16,
    whatever it was stored as, and the head of a reduced vocabulary with `t2d` and `d2t`. Methods
    whose published layout has no such head get along without where it is rows of the target's.

    Raises `ModelError` where the folder cannot be read or `out` is no place for it.
    """
    tensors = _tensors(folder, method, target)
    config = read_json(folder / CONFIG) | {"torch_dtype": "bfloat16"}
    if _D2T in tensors and method in _WHOLE:
        if not _has_target_head(tensors, target, str(folder)):
            raise ModelError(
                f"{folder} has a reduced head of its own; published {method} checkpoints have none."
            )
        for name in (_HEAD, _D2T, _T2D):
            tensors.pop(name, None)
        config.pop("draft_vocab_size", None)
    if _D2T in tensors:
        tensors[_D2T] = tensors[_D2T].long()
        check_mapping(tensors[_D2T], None, target.config.vocab_size, str(folder))
        tensors[_T2D] = named(tensors[_D2T], target.config.vocab_size)
    kept = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    config.pop("slipstream", None)
    _write(folder, out, config, kept)


def write_compact(folder: Path, out: Path, *, method: str, target: LoadedModel) -> None:
    """Write the drafter of `folder` to `out` in the form that ships: int8 rows, without what the
    target has, and with the target's fingerprint in the config, by which it is found.

    Raises `ModelError` as `write_published` does, and for weights that are not finite.
    """
    tensors = _tensors(folder, method, target.model)
    embedding = target.model.embedding.bfloat16().cpu()
    for name in [n for n in tensors if n.endswith(_EMBEDDING)]:
        if torch.equal(tensors[name].bfloat16(), embedding):
            del tensors[name]
    own: dict[str, Any] = {
        "storage": STORAGE,
        "method": method,
        "target": target.fingerprint,
        "target_name": target.name,
    }
    if _D2T in tensors:
        tensors.pop(_T2D, None)  # says the same
        if _has_target_head(tensors, target.model, str(folder)):
            tensors.pop(_HEAD)
            own["head"] = TARGET_HEAD
            drafted = [n for n in _BY_DRAFTED if n in tensors]
            for name in drafted:
                tensors[name] = tensors[name][target_ids(tensors[_D2T])]
            own |= {"drafted_rows": drafted} if drafted else {}
    config = read_json(folder / CONFIG) | {"slipstream": own}
    _write(folder, out, config, compacted(tensors, source=str(folder)))


def _tensors(folder: Path, method: str, target: Model) -> dict[str, Tensor]:
    """What belongs to the drafter, by the folder's names, as plain weights."""
    with opened(folder, target=target) as handles:
        tensors: dict[str, Tensor] = {n: h.get_tensor(n).cpu() for n, h in handles.items()}
    if method == "mtp":  # a head may lie in its target's own checkpoint
        heads = (f"model.layers.{target.config.num_layers}.", "mtp.")
        reduced = (_HEAD, _D2T) if _D2T in tensors else ()
        return {n: t for n, t in tensors.items() if n.startswith(heads) or n in reduced}
    return tensors


def _has_target_head(tensors: Mapping[str, Tensor], target: Model, source: str) -> bool:
    """Whether a reduced head is nothing but rows of the target's, which is how ours are trained."""
    check_mapping(tensors[_D2T], None, target.config.vocab_size, source)
    ids = target_ids(tensors[_D2T]).to(target.device)
    head = tensors.get(_HEAD)
    if head is None or head.shape != (len(ids), target.config.hidden_size):
        return False
    return torch.equal(head.bfloat16(), head_rows(target, ids).bfloat16().cpu())


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
