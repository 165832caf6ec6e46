"""Bytes that a step has to read: the floor that its time is compared with.

The target's layers and head are read once, and so are a block drafter's. A chain's passes wait for
each other's tokens: its layers, its head and its keys and values are read once a draft token. So is
what a block's walk reads of the whole vocabulary. Rows looked up in a table (embeddings, codebooks)
are too few to count.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from slipstream.drafters.base import Drafter
from slipstream.drafters.chain import ChainDrafter
from slipstream.drafters.dflash import DFlashDrafter
from slipstream.drafters.dflash2 import DFlash2Drafter
from slipstream.drafters.dspark import DSparkDrafter
from slipstream.models.config import ModelConfig
from slipstream.models.dense import Model
from slipstream.models.eagle3_network import Eagle3
from slipstream.models.layers import Layer
from slipstream.models.linear import Linear
from slipstream.models.mtp_head import MtpHead


def step_bytes(model: Model, drafter: Drafter, *, users: int, context: int) -> int:
    """Bytes of one step: target and drafter, `users` rows of `context` tokens each."""
    own = _weights([*_layers(model.layers), model.head])
    cached = users * kv_bytes(model.config, context, model.dtype)
    return own + cached + drafter_bytes(drafter, users=users, context=context)


def drafter_bytes(drafter: Drafter, *, users: int, context: int) -> int:
    """Bytes that the drafter's part of a step reads; 0 for one without weights."""
    if isinstance(drafter, ChainDrafter):
        return _chain_bytes(drafter, users, context)
    if isinstance(drafter, DFlashDrafter):
        return _block_bytes(drafter, users, context)
    return 0


def kv_bytes(config: ModelConfig, context: int, dtype: torch.dtype) -> int:
    """Keys and values of one row of `context` tokens, as far as each layer sees."""
    seen = sum(context if window is None else min(context, window) for window in config.windows)
    return seen * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize


def _chain_bytes(drafter: ChainDrafter, users: int, context: int) -> int:
    w = drafter.weights
    once: list[Linear] = []
    if isinstance(w, Eagle3):
        once, each = [w.fc], [*_layers(w.blocks), w.head]
    elif isinstance(w, MtpHead):
        gate = [] if w.gate is None else [w.gate]
        each = [w.join, *gate, *_layers([w.block]), w.head]
    else:
        raise TypeError(f"no floor is known for {type(w).__name__}")
    cached = users * kv_bytes(w.sizes, context, w.embedding.dtype)
    return _weights(once) + drafter.max_draft_len * (_weights(each) + cached)


def _block_bytes(drafter: DFlashDrafter, users: int, context: int) -> int:
    model = drafter.weights.model
    once = [*_layers(model.layers), model.head, drafter.weights.fc]
    once += [conv.delta for layer in model.layers if layer.mix for conv in layer.mix[:2]]
    each: list[Linear] = []
    if isinstance(drafter, DFlash2Drafter):
        once.append(drafter.flash2.projection)
    if isinstance(drafter, DSparkDrafter):
        spark = drafter.spark
        each = [spark.second, *([spark.mix] if spark.mix else [])]
    cached = users * kv_bytes(model.config, context, model.dtype)
    return _weights(once) + drafter.max_draft_len * _weights(each) + cached


def _layers(layers: Sequence[Layer]) -> list[Linear]:
    return [w for layer in layers for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]


def _weights(linears: Iterable[Linear]) -> int:
    return sum(w.weight.numel() * w.weight.element_size() for w in linears)
