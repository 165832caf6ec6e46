"""Matrix products with weights laid out once for the machine.

On a CPU with bf16 instructions a bf16 weight is reordered into oneDNN's blocked layout, which makes
a product cost about the same for 1 to 16 rows, and additions ride inside it. Elsewhere: plain
torch.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


@cache
def packs_bf16() -> bool:
    """Whether this machine multiplies bf16 natively through oneDNN."""
    return bool(
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


class Linear:
    """The map y = x @ weight.T + bias for x [N, in]; weight [out, in], bias [out] or None.

    The plain weight is not kept where it was packed.
    """

    __slots__ = ("_bias", "_packed", "_weight", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = (
            weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and packs_bf16()
        )
        self._bias = bias
        self._weight = weight
        if self._packed:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        """Map x of shape [N, in] to y of shape [N, out]."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.default(
                x, self._weight, self._bias, "none", [], ""
            )
        return F.linear(x, self._weight, self._bias)

    def silu(self, x: Tensor) -> Tensor:
        """SiLU of y [N, out], rounded once."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.default(
                x, self._weight, self._bias, "swish", [], ""
            )
        return F.silu(F.linear(x, self._weight, self._bias))

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """The map y + residual [N, out], rounded once."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, residual, self._weight, self._bias, "add"
            )
        return F.linear(x, self._weight, self._bias).add_(residual)

    def mul(self, x: Tensor, factor: Tensor) -> Tensor:
        """The map y * factor [N, out], rounded once."""
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.binary(
                x, factor, self._weight, self._bias, "mul"
            )
        return F.linear(x, self._weight, self._bias).mul_(factor)
