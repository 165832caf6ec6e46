"""Matrix products with weights laid out once for the machine.

On a CPU with bf16 instructions a bf16 weight is reordered into oneDNN's blocked layout, which makes
a product cost about the same for 1 to 16 rows, and additions ride inside it. Elsewhere: plain
torch. The functions here are compiled by TorchScript together with their callers.
"""

from functools import cache
from typing import NamedTuple, Optional

import torch
from torch import Tensor
from torch.nn import functional as F


@cache
def packs_bf16() -> bool:
    """Whether this machine multiplies bf16 natively through oneDNN."""
    return bool(
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear(NamedTuple):
    """The map y = x @ weight.T + bias for x [N, in]; make one with `pack`.

    `weight`: [out, in], or, if `packed`, oneDNN's opaque layout of it. `bias`: [out] or None.
    """

    weight: Tensor
    bias: Optional[Tensor]  # noqa: UP045 - TorchScript resolves this at run time
    packed: bool


def pack(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Lay out a weight [out, in] for this machine. The plain weight is not kept where packed."""
    packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packs_bf16()
    if packed:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return Linear(weight, bias, packed)


@cache
def _has_tiles() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


def cheaper_rows(rows: int, w: Linear) -> int:
    """How many rows a product of `rows` is better run with: `rows`, or a few more.

    On tile registers (AMX) oneDNN takes 1.3 to 1.5 times as long for 17 to 32 rows as for 16, and
    for 33 it takes as long as for 16 (log, 2026-11-30). Sixteen users with a few draft tokens lie
    in that range.
    """
    return 33 if 16 < rows < 33 and w.packed and _has_tiles() else rows


def linear(x: Tensor, w: Linear) -> Tensor:
    """Map x of shape [N, in] to y of shape [N, out]."""
    if w.packed:
        return torch.ops.mkldnn._linear_pointwise(x, w.weight, w.bias, "none", [], "")
    return F.linear(x, w.weight, w.bias)


def linear_add(x: Tensor, w: Linear, residual: Tensor) -> Tensor:
    """Map x [N, in] to y + residual [N, out], rounded once where packed."""
    if w.packed:
        return torch.ops.mkldnn._linear_pointwise(x, residual, w.weight, w.bias, "add")
    return F.linear(x, w.weight, w.bias).add_(residual)
