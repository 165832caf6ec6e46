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
from slipstream.train.recipe import initial, labels


class ChainNetwork:
    """Trainable float32 tensors by checkpoint name, unrolled over `draft_len` tokens.

    A subclass says what the layer starts from (`start`), what it reads (`enter`), what leaves it
    (`leave`) and goes to the head and is fed back (`out`). `prefix`: of the layer's tensor names.
    """

    def __init__(
        self,
        sizes: ModelConfig,
        shapes: dict[str, tuple[int, ...]],
        target: Model,
        *,
        prefix: str,
        draft_len: int,
        seed: int,
    ) -> None:
        if target.head.packed:
            raise InvalidConfig("Training needs the target in float32 on a CPU, or on a GPU.")
        self.sizes, self.target, self.draft_len = sizes, target, draft_len
        self._shapes, self._prefix = shapes, prefix
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
        """[tokens, len(needs), hidden] -> the states of the text, [tokens, hidden]."""
        raise NotImplementedError

    def enter(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Residual stream, and what queries, keys and values are products of."""
        raise NotImplementedError

    def out(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the head reads, and what is fed back."""
        raise NotImplementedError

    def agreement(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each draft token would be the text's own, [anchors, draft_len], and which exist;
        the text's own tokens are fed back.
        """
        wanted, there = labels(tokens, anchors, self.draft_len + 1)
        with torch.no_grad():
            said = self.logits(features, tokens, anchors).argmax(-1)
        return (said == wanted) & there, there

    def logits(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """[anchors, draft_len, vocab]: what is drafted after the token at each anchor.

        `features` [tokens, len(needs), hidden] and `tokens` int64 of one text; `anchors` int64
        positions from 1 on. Later steps are fed the text's own tokens.
        """
        text = self.start(features)
        places = torch.arange(len(tokens) - 1, device=tokens.device)
        _, _, keys, values = self._projected(tokens[1:], text[:-1], places)
        states, said = text[anchors - 1], []
        chain: list[tuple[Tensor, Tensor]] = []
        seen = places[None, :] < anchors[:, None]
        for step in range(self.draft_len):
            own = tokens[(anchors + step).clamp(max=len(tokens) - 1)]
            residual, queries, k, v = self._projected(own, states, anchors - 1 + step)
            if step:
                chain.append((k, v))
            attended = attend(queries, keys, values, seen, chain, self.sizes.group)
            normed, states = self.out(self._finish(residual, attended))
            said.append(normed @ self.target.head.weight.float().t())
        return torch.stack(said, 1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm by the weight of this name."""
        return torch.rms_norm(x, [x.shape[-1]], self.get(name), self.sizes.norm_eps)

    def get(self, name: str) -> Tensor:
        """A weight by its name without `.weight`."""
        return self.tensors[f"{name}.weight"]

    def law(self, features: Tensor) -> Tensor:
        """The target's next-token probabilities at last-layer outputs [..., hidden]."""
        norm = self.target.norm
        with torch.no_grad():
            normed = torch.rms_norm(
                features.float(), [features.shape[-1]], norm.weight.float(), norm.eps
            )
            return (normed @ self.target.head.weight.float().t()).softmax(-1)

    def _projected(
        self, tokens: Tensor, states: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual; rotated queries and keys, and values: [tokens, heads, head_dim] each."""
        c = self.sizes
        residual, read = self.enter(F.embedding(tokens, self.target.embedding).float(), states)
        cos, sin = self._rope.rows(positions, int(positions.max()))

        def heads(name: str, *, turned: bool) -> Tensor:
            base = f"{self._prefix}self_attn.{name}"
            x = F.linear(read, self.get(f"{base}_proj"), self.tensors.get(f"{base}_proj.bias"))
            x = x.view(len(x), -1, c.head_dim)
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
    """Each query sees the text where `seen` [queries, text] says so, and its own chain.

    `queries` [n, heads, dim]; `keys`, `values` [text, kv, dim]; the chain's [n, kv, dim] each.
    """
    scale = queries.shape[-1] ** -0.5
    wide = [x.repeat_interleave(group, 1) for x in (keys, values)]
    scores = torch.einsum("nhd,thd->nht", queries, wide[0]) * scale
    scores = scores.masked_fill(~seen[:, None, :], float("-inf"))
    own = [
        (queries * k.repeat_interleave(group, 1)).sum(-1, keepdim=True) * scale for k, _ in chain
    ]
    weights = torch.cat([scores, *own], -1).softmax(-1)
    out = torch.einsum("nht,thd->nhd", weights[..., : len(keys)], wide[1])
    for i, (_, v) in enumerate(chain):
        out = out + weights[..., len(keys) + i, None] * v.repeat_interleave(group, 1)
    return out.flatten(1)
