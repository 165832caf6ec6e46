"""Row-wise kernels: the residual addition with its norm, and the gate of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import lead, overlap, wait
from slipstream.models.cuda.linear import Normed


@triton.jit
def inverse_rms(squares, row, parts, size, eps, PARTS: tl.constexpr):
    """1 / rms of a row from the shares of its sum of squares (`linear.Normed`)."""
    part = tl.arange(0, PARTS)
    shares = tl.load(squares + row * parts + part, mask=part < parts, other=0.0)
    return tl.rsqrt(tl.sum(shares, 0) / size + eps)


@triton.jit
def _norm_kernel(
    x,
    delta,
    weight,
    total,
    out,
    size,
    eps,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    lead(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    weights = tl.load(weight + at, mask=inside, other=0.0)
    if ADDED:
        # x is older than what the kernel in front writes.
        values = tl.load(x + row * size + at, mask=inside, other=0.0)
        wait(PDL)
    else:
        wait(PDL)
        values = tl.load(x + row * size + at, mask=inside, other=0.0)
    if ADDED:
        more = tl.load(delta + row * size + at, mask=inside, other=0.0).to(tl.float32)
        values = (values.to(tl.float32) + more).to(values.dtype)
        tl.store(total + row * size + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(out + row * size + at, (wide * scale).to(values.dtype) * weights, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight, row by row; `x` [rows, size]."""
    return _norm(x, None, weight, eps).scaled


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Normed:
    """The stream x + delta and its norm; both [rows, size]."""
    return _norm(x, delta, weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Normed:
    rows, size = x.shape
    out = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    _norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        total,
        out,
        size,
        eps,
        ADDED=delta is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size >= 2048 else 4,
        **overlap(x, early=True),
    )
    return Normed(total, out, None)


@triton.jit
def _gate_kernel(x, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x + row * 2 * size + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * 2 * size + size + at, mask=inside, other=0.0).to(tl.float32)
    silu = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + at, (silu * up).to(out.dtype.element_ty), mask=inside)


def silu_gate(x: Tensor) -> Tensor:
    """silu(first half) * second half of x [rows, 2 * size]: [rows, size]."""
    rows, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(rows, size)
    _gate_kernel[(rows, triton.cdiv(size, 1024))](x, out, size, BLOCK=1024, **overlap(x))
    return out
