"""Models of a true shape with random weights: what a step costs, before anything is downloaded."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.config import ModelConfig, from_hf
from slipstream.models.dense import Model, build, expected_shapes


def read_shape(path: Path) -> ModelConfig:
    """The config of a `config.json`, or of a folder that holds one; weights are not looked at."""
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read ({error.strerror}); give a config.json."
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{file} is no JSON ({error}); give a Hugging Face config.json."
        ) from error
    return from_hf(values, source=str(file))


def random_model(
    config: ModelConfig, *, seed: int, device: torch.device, dtype: torch.dtype
) -> Model:
    """Weights drawn from N(0, 0.02), norms of ones.

    Raises `ModelError` where the device has no room for them.
    """
    shapes = expected_shapes(config)
    size = sum(torch.Size(s).numel() for s in shapes.values()) * dtype.itemsize / 2**30
    if device.type == "cpu" and size > (whole := memory()):
        raise ModelError(
            f"The weights of this shape need {size:.1f} GiB, more than the {whole:.1f} this "
            "machine has; use a GPU or a smaller shape."
        )
    generator = torch.Generator(device).manual_seed(seed)

    def get(name: str) -> Tensor:
        shape = shapes[name]
        if len(shape) == 1 and name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype, device=device)
        values = torch.empty(shape, dtype=dtype, device=device)
        return values.normal_(0.0, 0.02, generator=generator)

    try:
        return build(config, get)
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"The weights of this shape need {size:.1f} GiB, more than {device} has free."
        ) from error


def memory() -> float:
    """GiB of memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
