"""Programmatic dependent launch: a kernel may be set up while the one before it drains.

Every kernel here first waits for its predecessor's results and then lets its successor be set up,
so that the microsecond a launch takes is hidden (CUDA programming guide, "Programmatic Dependent
Launch"; compute capability 9.0 on). Kernels of libraries in between just do not overlap.

What holds for all of them: nothing is written before the wait, and what is read before it was not
written by the kernel just before. Since a kernel lets its successor start only after its own wait,
everything older is finished and visible by then.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TRIED = {name for name in os.environ.get("SLIPSTREAM_TRY", "").split("+") if name}
"""Ways under measurement that are on, such as `pdl+cut` (`bench/gpu_try.py`)."""

FEW = 16
"""Up to this many rows a step is a read of weights by programs that need all the room there is."""


def tried(name: str) -> bool:
    """Whether a way under measurement is on."""
    return name in TRIED


@cache
def is_hopper(device: torch.device) -> bool:
    """Whether the device knows dependent launches and copies of whole tiles."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlap(x: Tensor) -> dict[str, Any]:
    """Launch options for kernels that call `wait(PDL)`; `x` [rows, ...] is their input.

    Only rows shorter than 4,096: measured on one NVIDIA H200, a step of a 135M model takes 0.85 of
    its time with overlap, one of an 8B model 1.02 to 1.04 (early programs hold room on the chip).
    """
    wanted = x.shape[-1] < 4096 or (tried("pdl") and len(x) > FEW)
    return {"PDL": True, "launch_pdl": True} if wanted and is_hopper(x.device) else {"PDL": False}


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait for the kernel before; then let the one behind be set up."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def read_ahead(address, BYTES: tl.constexpr):
    """Ask for `BYTES` (a multiple of 16) from each address on, for the L2 cache to have."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address.to(tl.int64), tl.full((), BYTES, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def read_rows_ahead(
    weight, row, inner, k, ROWS: tl.constexpr, WIDTH: tl.constexpr, LANES: tl.constexpr
):
    """`read_ahead` of bf16 `weight[row : row + ROWS, k : k + WIDTH]`, an equal piece a thread."""
    lane = tl.arange(0, LANES)
    piece: tl.constexpr = WIDTH * ROWS // LANES
    at = (row + lane % ROWS).to(tl.int64) * inner + k + lane // ROWS * piece
    read_ahead(weight + at, piece * 2)
