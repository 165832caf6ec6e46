"""Blocks of drafters through the kernels, in Triton's interpreter: what the CPU path computes."""

import tests.interpreter  # noqa: F401, I001 - first

import pytest
import torch

from slipstream.engine import LLM
from slipstream.models.tiny import tiny_model
from slipstream.target.target import ForwardRow
from tests.models.test_dflash2 import made

LOADED = tiny_model("llama", head_dim=16)


@pytest.mark.parametrize("layers", [("full",), ("sliding", "full")], ids="-".join)
def test_the_kernels_give_the_blocks_of_the_cpu(tmp_path, layers):
    made(tmp_path, layers, loaded=LOADED)
    block = LLM(LOADED, drafter=f"dflash2:{tmp_path}:7", kv_tokens=256).drafter.block
    for storage in block.storage:
        storage.copy_(torch.randn(storage.shape, generator=torch.Generator().manual_seed(4)))
    rows = [
        ForwardRow([20 + i, *[319] * 7], start, [4 * i + 1, 4 * i + 2, 4 * i + 3], 8)
        for i, start in enumerate((3, 25, 40))
    ]
    expected = block.forward(rows)
    block.kernels = True
    found = block.forward(rows)
    torch.testing.assert_close(found.features, expected.features, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.logits, expected.logits, atol=1e-4, rtol=1e-4)
