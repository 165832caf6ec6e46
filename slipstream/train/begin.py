"""Training on: a checkpoint's weights in a network of the same size or a larger one."""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.errors import ModelError
from slipstream.models.checkpoint import opened
from slipstream.models.dense import Model
from slipstream.train.recipe import Network


def go_on_from(network: Network, folder: Path, target: Model) -> None:
    """Put a checkpoint's weights where random ones were.

    A network may be larger than the checkpoint: wider in its MLP, or with more layers. It begins
    as the same function then (Net2Net, arXiv 1511.05641): new layers and neurons add nothing at
    first, for what leads out of them is zero. Raises `ModelError` naming the first tensor that is
    larger in the checkpoint or missing there, and for other methods' checkpoints.
    """
    with opened(folder, target=target) as handles, torch.no_grad():
        if not any(name in handles for name in network.tensors):
            raise ModelError(
                f"{folder} has none of the tensors of {network.recipe}, such as "
                f"{next(iter(network.tensors))}; give a checkpoint of this recipe."
            )
        for name, own in network.tensors.items():
            leads_out = name.endswith(("o_proj.weight", "down_proj.weight"))
            if name not in handles and name.startswith("layers."):
                if leads_out:
                    own.zero_()
                continue
            found = handles[name].get_tensor(name) if name in handles else own.new_empty(0)
            if name in network.by_head_row:
                d2t = handles["d2t"].get_tensor("d2t") if "d2t" in handles else None
                found = network.draft_head.rows(found, d2t)
            if found.dim() != own.dim() or any(
                a > b for a, b in zip(found.shape, own.shape, strict=True)
            ):
                raise ModelError(
                    f"{folder} cannot be trained on: {name} should be {list(own.shape)} or smaller "
                    f"there, it is {list(found.shape)}; give the recipe and its sizes, or larger."
                )
            if leads_out and found.shape != own.shape:
                own.zero_()
            own[tuple(slice(size) for size in found.shape)] = found.to(own)
