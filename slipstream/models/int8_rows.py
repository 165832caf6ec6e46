"""Drafters stored small: a 2-D weight as int8 rows, each with a scale of its own.

A tensor `X` [rows, columns] lies in the file as int8, and `X_scale` [rows] as bf16 beside it; the
weight is their product. The config says so: `"slipstream": {"storage": "int8_rows"}`. One scale a
row is the vector-wise form of LLM.int8() (arXiv 2208.07339); an entry is off by at most half of it.
This is a way to store, not to compute: loaders see plain weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import ModelError

STORAGE = "int8_rows"
SCALE = "_scale"
_MOST = 127


@dataclass(frozen=True, slots=True)
class _Rows:
    """Stands for the safetensors handle of a tensor stored as int8 rows."""

    rows: Any
    scales: Any

    def get_slice(self, name: str) -> Any:
        """Shape and type without reading; the shape is the weight's."""
        return self.rows.get_slice(name)

    def get_tensor(self, name: str) -> Tensor:
        """The weight in float32, in which int8 times bf16 is exact."""
        values: Tensor = self.rows.get_tensor(name).float()
        return values * self.scales.get_tensor(name + SCALE).float()[:, None]


@dataclass(frozen=True, slots=True)
class Memory:
    """Stands for the safetensors handle of a tensor that no file holds."""

    tensor: Tensor

    def get_slice(self, name: str) -> Memory:
        """Itself: everything is known."""
        return self

    def get_shape(self) -> list[int]:
        """Sizes, as safetensors lists them."""
        return list(self.tensor.shape)

    def get_tensor(self, name: str) -> Tensor:
        """The tensor."""
        return self.tensor


def plain_handles(handles: Mapping[str, Any], storage: object, folder: Path) -> dict[str, Any]:
    """The handles of a folder by name, as if every weight were stored plainly.

    `storage` is what the folder's config says, None for a published checkpoint. Raises `ModelError`
    for one that is not known and for rows without scales that fit.
    """
    if storage is None:
        return dict(handles)
    if storage != STORAGE:
        raise ModelError(
            f"{folder} is stored as {storage!r}, which this version does not read; known: "
            f"{STORAGE!r}."
        )
    found = {}
    for name, handle in handles.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in handles:
            continue
        if handle.get_slice(name).get_dtype() != "I8":
            found[name] = handle
            continue
        rows = handle.get_slice(name).get_shape()
        scales = handles.get(name + SCALE)
        if scales is None or scales.get_slice(name + SCALE).get_shape() != rows[:1]:
            raise ModelError(
                f"{folder} has {name} as int8 without a {name + SCALE} of {rows[0]} scales; export "
                "the drafter again."
            )
        found[name] = _Rows(handle, scales)
    return found


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [rows, columns] and bf16 scales [rows] of a weight [rows, columns].

    The scale is a row's largest magnitude over 127; a row of zeros gets 1.
    """
    values = weight.detach().float().cpu()
    largest = values.abs().amax(1)
    scale = torch.where(largest > 0, largest / _MOST, 1.0).bfloat16()
    rows = (values / scale.float()[:, None]).round().clamp(-_MOST, _MOST)
    return rows.to(torch.int8), scale


def compacted(tensors: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    """Tensors as they are stored small: 2-D weights as int8 rows, other floats bf16, ids int32.

    Raises `ModelError` for a weight that is not finite, whose row would be lost.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            found[name] = tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor
            continue
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                f"{source} has {name} with values that are not finite; train it again."
            )
        if tensor.dim() == 2:
            found[name], found[name + SCALE] = quantized(tensor)
        else:
            found[name] = tensor.bfloat16()
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}
