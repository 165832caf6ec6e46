"""The DFlash drafter's passes on the device: context keys and values from target features, then a
block of mask tokens that sees the context and itself.

Source: DFlash (arXiv 2602.06036); layout of the published checkpoints. Weights here are random of
the true shape, for cost measurements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.models.config import ModelConfig
from slipstream.models.cuda.attention import Tiles
from slipstream.models.cuda.layers import Flat, logits, product, run_layers
from slipstream.models.cuda.norm import rms_norm
from slipstream.models.cuda.rope import rotate_and_store
from slipstream.models.dense import Model
from slipstream.models.linear import Linear
from slipstream.models.shapes import random_model
from slipstream.sampling.fused import Chooser
from slipstream.target.device import scratch_of, splits_for
from slipstream.target.graphs import Step
from slipstream.target.slots import prepare


def default_taps(num_layers: int, count: int) -> tuple[int, ...]:
    """Feature indices `hs[i]` evenly from the output of layer 1 to that of layer n - 3."""
    if count == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (count - 1)) + 1 for i in range(count))


@dataclass(frozen=True, slots=True)
class DFlashWeights:
    """`model`: the draft layers with the target's embedding and head. `fc` [hidden, taps * hidden],
    `norm` [hidden]; `kv`: the key and value rows of all layers' projections, one product for all
    layers because all read the same context.
    """

    model: Model
    fc: Linear
    norm: Tensor
    kv: Linear
    taps: tuple[int, ...]


def random_weights(target: Model, *, layers: int, taps: int, seed: int) -> DFlashWeights:
    """A drafter of the target's width with random layers; embedding and head are the target's."""
    config = _draft_config(target.config, layers)
    model = random_model(config, seed=seed, device=target.device, dtype=target.dtype, shared=target)
    hidden, generator = config.hidden_size, torch.Generator(target.device).manual_seed(seed)
    fc = torch.randn(
        hidden, taps * hidden, dtype=target.dtype, device=target.device, generator=generator
    )
    queries = config.num_heads * config.head_dim
    weight = torch.cat([layer.qkv.weight[queries:] for layer in model.layers])
    biases = [layer.qkv.bias[queries:] for layer in model.layers if layer.qkv.bias is not None]
    kv = Linear(weight, torch.cat(biases) if biases else None, False)
    norm = torch.ones(hidden, dtype=target.dtype, device=target.device)
    count = target.config.num_layers
    return DFlashWeights(model, Linear(fc * 0.01, None, False), norm, kv, default_taps(count, taps))


def _draft_config(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, num_layers=layers, rope=(True,) * layers, windows=(None,) * layers)


class DFlashPass:
    """The drafting of a step for `rows` rows: `draft_len` tokens each, greedy."""

    def __init__(
        self, weights: DFlashWeights, rows: int, draft_len: int, *, storage: list[Tensor]
    ) -> None:
        self.needs = weights.taps
        self._weights, self._storage = weights, storage
        device = weights.model.device
        width = draft_len + 1
        count = rows * width
        self._masks = torch.zeros(rows, draft_len, dtype=torch.int32, device=device)
        self._counts = torch.full((rows,), draft_len, dtype=torch.int32, device=device)
        self._ids = torch.zeros(count, dtype=torch.int64, device=device)
        self._positions = torch.zeros(count, dtype=torch.int32, device=device)
        self._cells = torch.zeros(count, dtype=torch.int32, device=device)
        self._first = torch.zeros(rows, dtype=torch.int32, device=device)
        self._chooser = Chooser(rows, width, vocab=weights.model.config.vocab_size, device=device)
        self._splits = splits_for(rows * weights.model.config.num_kv_heads, device)

    def enqueue(self, step: Step) -> None:
        """Launch both passes; `step.features` are of the step before."""
        self._take_in(step)
        self._draft(step)

    def _take_in(self, step: Step) -> None:
        """Keys and values of the positions the target saw last; rejected ones are overwritten."""
        w, config = self._weights, self._weights.model.config
        features = step.features.flatten(1)
        fused = product(features, w.fc.weight, w.fc.bias)
        context = rms_norm(fused, w.norm, config.norm_eps)
        tables = w.model.rope.tables(config.max_context)
        fresh = product(context, w.kv.weight, w.kv.bias).chunk(len(w.model.layers), 1)
        for layer, kv, storage in zip(w.model.layers, fresh, self._storage, strict=True):
            norms = layer.qk_norm
            rotate_and_store(
                kv,
                tables,
                norms=norms[config.num_heads :] if norms is not None else None,
                eps=layer.attention_norm.eps,
                positions=step.positions,
                slots=step.cells,
                storage=storage,
                kv=config.num_kv_heads,
            )

    def _draft(self, step: Step) -> None:
        slots, model = step.slots, self._weights.model
        rows, width = len(step.slot_of), self._masks.shape[1] + 1
        prepare(
            slots,
            step.slot_of,
            drafts=self._masks,
            counts=self._counts,
            ids=self._ids,
            positions=self._positions,
            cells=self._cells,
        )
        flat = self._flat(step, rows, width)
        hidden, _ = run_layers(model, F.embedding(self._ids, model.embedding), flat, self._storage)
        best = self._chooser.best(logits(model, hidden)).view(rows, width)
        step.drafts.copy_(best[:, 1:])
        step.counts.fill_(width - 1)

    def _flat(self, step: Step, rows: int, width: int) -> Flat:
        slots, config = step.slots, self._weights.model.config
        tiles = Tiles(
            row=step.slot_of,
            first=self._first,
            start=slots.start,
            length=slots.length,
            token=slots.token,
            pages=slots.pages,
            tokens=width,
            splits=self._splits,
        )
        scratch = scratch_of(tiles, config, self._ids.device)
        ahead = (True,) * config.num_layers
        return Flat(self._positions, self._cells, tiles, scratch, slots.page_size, ahead)
