"""What drafters that go token by token share in training: the unrolled forward.

The layer is run as it will be served: over the text with the target's states, then, behind each
anchor, over its own outputs, each step seeing the text up to the anchor and its own earlier steps
(training-time test, EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.errors import InvalidConfig
from slipstream.models.config import ModelConfig
from slipstream.models.dense import Model
from slipstream.models.rope import RopeTable
from slipstream.train.head import DraftHead
from slipstream.train.recipe import Batch, agreement, initial


class ChainNetwork:
    """Trainable float32 tensors by checkpoint name, unrolled over `draft_len` tokens.

    A subclass says what the layer starts from (`start`), what it reads (`enter`), and what of its
    output goes to the head and is fed back (`out`). `prefix`: of the layer's tensor names. `vocab`:
    what it may draft, see `train.head.DraftHead`.
    """

    by_head_row: tuple[str, ...] = ()

    def __init__(
        self,
        sizes: ModelConfig,
        shapes: dict[str, tuple[int, ...]],
        target: Model,
        *,
        prefix: str,
        draft_len: int,
        seed: int,
        vocab: Tensor | None = None,
    ) -> None:
        if target.head.packed:
            raise InvalidConfig("Training needs the target in float32 on a CPU, or on a GPU.")
        self.sizes, self.target, self.draft_len = sizes, target, draft_len
        self._shapes, self._prefix = shapes, prefix
        self.draft_head = DraftHead(target, vocab)
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            name: initial(name, shape, generator).to(target.device).requires_grad_()
            for name, shape in shapes.items()
        }
        self._rope = RopeTable(sizes, dtype=torch.float32, device=target.device)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor."""
        return self._shapes

    def start(self, features: Tensor) -> Tensor:
        """[..., len(needs), hidden] -> the states of the text, [..., hidden]."""
        raise NotImplementedError

    def enter(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream, and what queries, keys and values are products of."""
        raise NotImplementedError

    def out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, and what is fed back."""
        raise NotImplementedError

    def agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Network`; the text's own tokens are fed back."""
        with torch.no_grad():
            said = self.draft_head.tokens(self.logits(batch).argmax(-1))
        return agreement(said, batch)

    def logits(self, batch: Batch) -> Tensor:
        """[texts, blocks, draft_len, head's rows]: what is drafted behind each anchor.

        Later steps are fed the text's own tokens.
        """
        return torch.stack([self.draft_head.logits(n) for n in self.unrolled(batch)], 2)

    def unrolled(self, batch: Batch) -> list[Tensor]:
        """What the head reads at each step: [texts, blocks, hidden] each."""
        text = self.start(batch.features)
        longest = batch.tokens.shape[1]
        places = torch.arange(longest - 1, device=batch.tokens.device)
        at = places.expand(len(batch.tokens), -1)
        _, _, keys, values = self._projected(batch.tokens[:, 1:], text[:, :-1], at, longest)
        before = (batch.anchors - 1)[..., None].expand(-1, -1, text.shape[-1])
        states, said = text.gather(1, before), []
        own = batch.tokens_at(batch.places(0, self.draft_len))
        seen = places < batch.anchors[..., None]
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(self.draft_len):
            residual, queries, k, v = self._projected(
                own[..., step], states, batch.anchors - 1 + step, longest + self.draft_len
            )
            if step:
                chain.append((k, v))
            attended = attend(queries, keys, values, seen, chain, self.sizes.group)
            normed, states = self.out(self._finish(residual, attended))
            said.append(normed)
        return said

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm by the weight of this name."""
        return torch.rms_norm(x.float(), [x.shape[-1]], self.get(name), self.sizes.norm_eps)

    def get(self, name: str) -> Tensor:
        """A weight by its name without `.weight`."""
        return self.tensors[f"{name}.weight"]

    def _projected(
        self, tokens: Tensor, states: Tensor, positions: Tensor, last: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual; rotated queries and keys, and values: [texts, rows, heads, head_dim] each."""
        c = self.sizes
        residual, read = self.enter(F.embedding(tokens, self.target.embedding).float(), states)
        cos, sin = (
            table.view(*positions.shape, 1, -1)
            for table in self._rope.rows(positions.flatten(), last)
        )

        def heads(name: str, *, turned: bool) -> Tensor:
            base = f"{self._prefix}self_attn.{name}"
            x = F.linear(read, self.get(f"{base}_proj"), self.tensors.get(f"{base}_proj.bias"))
            x = x.view(*x.shape[:-1], -1, c.head_dim).float()
            if f"{base}_norm.weight" in self.tensors:
                x = torch.rms_norm(x, [c.head_dim], self.get(f"{base}_norm"), c.norm_eps)
            return x * cos + torch.roll(x, c.head_dim // 2, -1) * sin if turned else x

        return residual, heads("q", turned=True), heads("k", turned=True), heads("v", turned=False)

    def _finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + attended @ self.get(f"{self._prefix}self_attn.o_proj").t()
        normed = self.norm(x, f"{self._prefix}post_attention_layernorm")
        gate, up = (normed @ self.get(f"{self._prefix}mlp.{n}_proj").t() for n in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.get(f"{self._prefix}mlp.down_proj").t()


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    chain: list[tuple[Tensor, Tensor]],
    group: int,
) -> Tensor:
    """Each query sees the text where `seen` [texts, rows, text] says so, and its own chain.

    `queries` [texts, rows, heads, dim]; `keys`, `values` [texts, text, kv, dim]; the chain's
    [texts, rows, kv, dim] each. Returns [texts, rows, heads * dim].
    """
    scale = queries.shape[-1] ** -0.5
    wide = [x.repeat_interleave(group, 2) for x in (keys, values)]
    scores = torch.einsum("bnhd,bthd->bnht", queries, wide[0]) * scale
    scores = scores.masked_fill(~seen[:, :, None, :], float("-inf"))
    own = [
        (queries * k.repeat_interleave(group, 2)).sum(-1, keepdim=True) * scale for k, _ in chain
    ]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    count = keys.shape[1]
    out = torch.einsum("bnht,bthd->bnhd", weights[..., :count], wide[1])
    for i, (_, v) in enumerate(chain):
        out = out + weights[..., count + i, None] * v.repeat_interleave(group, 2)
    return out.flatten(2)
