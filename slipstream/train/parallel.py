"""Training on several GPUs: torch's DistributedDataParallel, started by torchrun.

Every process holds the whole target and the whole drafter, trains on its own texts of a step, and
the gradients are averaged. Drafters are small, so nothing of them has to be cut up (FSDP).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.errors import InvalidConfig
from slipstream.train.recipe import Batch, Network

_PATIENCE = timedelta(minutes=10)
"""How long a process waits for the others: longer than any report, not for ever."""


@dataclass(frozen=True, slots=True)
class World:
    """One process's place among the `size` that train together: `rank`, from 0 on. The first one
    speaks, measures and writes.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process speaks for all."""
        return self.rank == 0

    def of_first(self, value: float) -> float:
        """The first process's value. Every process has to ask."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)  # on the host: no GPU is waited for
        distributed.broadcast(shared, src=0)
        return float(shared)

    def mean(self, value: Tensor) -> Tensor:
        """The mean of all processes' values. Every process has to ask."""
        if self.size == 1:
            return value
        total = value.clone()
        distributed.all_reduce(total)
        return total / self.size

    def joined(self, network: Network) -> Callable[[Batch], Tensor]:
        """The network's loss, whose `backward` leaves the mean of all processes' gradients.

        All get the first one's weights. The network's tensors are replaced by parameters that share
        their memory, so an optimizer has to be made afterwards.
        """
        if self.size == 1:
            return network.loss
        return DistributedDataParallel(_Module(network))


ALONE = World()


class _Module(nn.Module):
    """A network as torch's wrapper wants it: parameters, and a forward that is the loss."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        for name, tensor in network.tensors.items():
            network.tensors[name] = nn.Parameter(tensor.detach())
        self.held = nn.ParameterList(network.tensors.values())
        self._loss = network.loss

    def forward(self, batch: Batch) -> Tensor:
        """The training loss, a scalar."""
        return self._loss(batch)


@contextmanager
def world_of(device: str | None) -> Iterator[tuple[World, str]]:
    """Where this process stands, and the device it trains on: a GPU of its own, or the CPU.

    Without torchrun it is alone. `device`: "cpu", "cuda", or None for a GPU if there
    is any. Raises `InvalidConfig` where there are more processes than GPUs.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    # Other programs set RANK and WORLD_SIZE too; only torchrun starts processes to train together.
    size = int(os.environ["WORLD_SIZE"]) if distributed.is_torchelastic_launched() else 1
    if size == 1:
        yield ALONE, device
        return
    if device == "cuda":
        _take_gpu(int(os.environ["LOCAL_RANK"]))
    elif device != "cpu":
        raise InvalidConfig(
            f"device is {device!r}, but each of {size} processes takes its own; give cuda or cpu."
        )
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=_PATIENCE)
    yield World(distributed.get_rank(), size), device
    # After an error others may still wait for this process, and a farewell would wait for them;
    # its end makes torchrun end them.
    distributed.destroy_process_group()


def _take_gpu(local: int) -> None:
    count = torch.cuda.device_count()
    if local >= count:
        raise InvalidConfig(
            f"--nproc-per-node asks for {local + 1} processes or more, but this machine has "
            f"{count} GPUs; ask for at most one process a GPU."
        )
    torch.cuda.set_device(local)
