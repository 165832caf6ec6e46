"""Rotary embeddings: one table of cosines and sines a model, looked up once a forward."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import ModelError
from slipstream.models.config import ModelConfig


class RopeTable:
    """cos and signed sin by position, grown as positions are reached.

    Halves are paired as Hugging Face does: dimension i turns with i + head_dim / 2. The sine of the
    first half is negated, so that with `swapped` halves the rotation is `x * cos + swapped * sin`.
    With a `partial_rotary_factor` the last pairs do not turn; see `paired` for which those are.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies, self._scale = _frequencies(config)
        self._dtype, self._device = dtype, device
        self._limit = config.max_context
        self._cos = self._sin = torch.empty(0)
        self._grow(min(1024, self._limit))

    def rows(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """cos, sin of shape [N, 1, head_dim] for int64 `positions` [N], the largest being
        `last`.
        """
        if last >= self._cos.shape[0]:
            self._grow(max(last + 1, min(2 * self._cos.shape[0], self._limit)))
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """The whole tables, [at least `length`, head_dim] each; they stay put once that long."""
        if length > self._cos.shape[0]:
            self._grow(length)
        return self._cos[:, 0], self._sin[:, 0]

    def _grow(self, length: int) -> None:
        # Angles in float32 on the CPU, rounded to the model's dtype once, as the oracle does.
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies[None, :]
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        self._cos = self._place(torch.cat((cos, cos), -1))
        self._sin = self._place(torch.cat((-sin, sin), -1))

    def _place(self, table: Tensor) -> Tensor:
        return table.to(device=self._device, dtype=self._dtype)[:, None, :]


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies, float32 [head_dim / 2], and the factor on cos and sin."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        turned = int(config.head_dim * (rope.get("partial_rotary_factor") or 1.0))
        exponents = torch.arange(0, turned, 2, dtype=torch.int64).float() / turned
        still = torch.zeros((config.head_dim - turned) // 2)
        return torch.cat((1.0 / (rope["rope_theta"] ** exponents), still)), 1.0
    # Scaled variants are the ecosystem's arithmetic, taken from transformers and imported only
    # here: that import alone costs more than loading the embedded model.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = AutoConfig.for_model(
        **{k: v for k, v in config.hf.items() if k not in ("rope_scaling", "rope_theta")},
        **({} if config.hf.get("rope_parameters") else {"rope_parameters": dict(rope)}),
    )
    try:
        frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](hf, torch.device("cpu"))
    except KeyError as error:
        raise ModelError(
            f"The rotary type {rope['rope_type']!r} needs {error} in rope_parameters; add it."
        ) from error
    return frequencies.float(), float(scale)


def paired(head_dim: int, rotated: int) -> Tensor:
    """Order of a head's dimensions, int64, in which dimension i pairs with i + head_dim / 2.

    In checkpoints that rotate only the first `rotated` of them, i pairs with i + rotated / 2.
    Queries and keys reordered alike give the same scores.
    """
    turned = torch.arange(rotated).view(2, -1)
    still = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat((turned, still), 1).flatten()
