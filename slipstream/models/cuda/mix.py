"""DFlash2's convolutions along a block as one kernel each; see `models.layers.convolved`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from slipstream.models.cuda.launch import overlap, wait
from slipstream.models.layers import Conv

_BLOCK = 1024


@triton.jit
def _mix_kernel(
    x,
    delta,
    base,
    residual,
    out,
    size,
    groups,
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, place = at < size, row % ROWS
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS):
        which = SIDE * TAPS + tap
        kernel = tl.load(base + which * size + at, mask=inside, other=0.0).to(tl.float32)
        own = delta + (row * 2 * TAPS + which) * groups + at // GROUP
        kernel += tl.load(own, mask=inside, other=0.0).to(tl.float32)
        there = inside & (place >= tap)
        total += tl.load(x + (row - tap) * size + at, mask=there, other=0.0).to(tl.float32) * kernel
    if ADDED:
        total += tl.load(residual + row * size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + at, total, mask=inside)


def mixed(
    x: Tensor, delta: Tensor, conv: Conv, *, side: int, block: int, residual: Tensor | None = None
) -> Tensor:
    """Convolve `x` [N, hidden] along blocks of `block` rows, plus `residual`.

    `delta` [N, 2 * taps * hidden / group]: what each token adds to the kernels, of which `side` 0
    stands before the sublayer and 1 behind it.
    """
    size, out = x.shape[1], x.new_empty(x.shape)
    _mix_kernel[(len(x), triton.cdiv(size, _BLOCK))](
        x,
        delta,
        conv.base,
        x if residual is None else residual,
        out,
        size,
        size // conv.group,
        SIDE=side,
        TAPS=len(conv.base) // 2,
        ROWS=block,
        GROUP=conv.group,
        ADDED=residual is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(size)),
        **overlap(x),
    )
    return out
