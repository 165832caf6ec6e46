"""The training loop of a drafter: batches of texts, checkpoints, held-out acceptance."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.errors import InvalidConfig
from slipstream.models.loading import LoadedModel
from slipstream.train.data import Features, Text
from slipstream.train.optimizer import Optimizer
from slipstream.train.parallel import ALONE, World
from slipstream.train.recipe import Batch, Network
from slipstream.train.shards import make_folder
from slipstream.types import IntArray

CHECKPOINT = "training.pt"
HISTORY = "history.jsonl"
_LOOKED_AT, _HELD = 64, 1000
"""Held-out texts that a report looks at, and the most that are held out."""
_MOST = 20
"""Times that a text is there: weights above are a mistake."""
_QUIET = 20.0
"""Seconds after which a line says how far it is, between the reports that measure acceptance."""
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train. `anchors` blocks of each of `batch` texts make a step; the learning rate rises
    over `warmup` of the way and falls as a cosine to a hundredth. `held_out`: share of the texts
    that is never trained on. `minutes`: train that long instead of `steps`; then the way is time.
    `reports`: times, evenly spread, that acceptance is measured and a checkpoint written. Each of
    several processes takes `batch` texts a step. `mix`: how often a text of a kind is there among
    those that are trained on, for kinds where that is not once.
    """

    steps: int = 1000
    minutes: float | None = None
    batch: int = 4
    anchors: int = 64
    optimizer: str = "adamw"
    lr: float = 6e-4
    warmup: float = 0.04
    clip: float = 1.0
    held_out: float = 0.1
    seed: int = 0
    reports: int = 20
    mix: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Teacher-forced, greedy: `by_position[i]` is the share of blocks whose first i + 1 masks said
    what the target said; `tokens_per_step` is one more than their sum.
    """

    by_position: tuple[float, ...]

    @property
    def tokens_per_step(self) -> float:
        """What a step would commit on average, its next token included."""
        return 1 + sum(self.by_position)


class Trainer:
    """Trains one network on texts, resuming from `out` where it holds a checkpoint of this plan.

    In a `world` of several processes all train, on different texts of the same steps, and only the
    first speaks and writes.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        network: Network,
        texts: Sequence[Text],
        plan: Plan,
        *,
        out: Path,
        say: Say = print,
        world: World = ALONE,
    ) -> None:
        self.network, self.plan, self.out, self.world = network, plan, out, world
        self._say: Say = say if world.is_first else silent
        held = min(len(texts) - 1, math.ceil(plan.held_out * len(texts)), _HELD)
        self.texts, self.held = list(texts[: len(texts) - held]), list(texts[len(texts) - held :])
        self.texts = mixed(self.texts, plan.mix, seed=plan.seed)
        self.texts.sort(key=lambda t: len(t.tokens))  # batches are of texts about as long
        longest = max(len(t.tokens) for t in texts)
        self._features = Features(loaded, network.needs, longest=plan.batch * (longest + 64))
        self._device = loaded.model.device
        if len(self.texts) < world.size:
            raise InvalidConfig(
                f"{len(self.texts)} texts are too few for {world.size} processes; make more."
            )
        self._loss = world.joined(network)
        self._optimizer = Optimizer(network.tensors, kind=plan.optimizer, lr=plan.lr)
        self.step, self._spent, self._share = 0, 0.0, 0.0
        self._begun = time.perf_counter()
        make_folder(out)
        self._resume(loaded.fingerprint)

    def run(self) -> None:
        """Train to the end; a checkpoint and an export with every report."""
        spoke, recent = time.perf_counter(), list[Tensor]()
        self._begun = spoke - self._spent
        self._share = self._look()
        due = self._next()
        while self._share < 1:
            recent.append(self._train())
            self.step += 1
            self._share = self._look()
            if self.world.is_first and time.perf_counter() - spoke > _QUIET:
                spoke = time.perf_counter()
                self._say(
                    f"{self._where()}  loss {float(recent[-1]):.3f}  {self._left():.0f} s left"
                )
            if self._share >= due or self._share >= 1:
                due = self._next()
                if self.world.is_first:
                    self._report(float(torch.stack(recent).mean()))
                    self._save()
                recent = []

    def _look(self) -> float:
        """How much of the way is done, 1 at the end; by the first process's clock if it is time."""
        if self.plan.minutes is None:
            return self.step / self.plan.steps
        spent = time.perf_counter() - self._begun
        return self.world.of_first(spent / (60 * self.plan.minutes))

    def _next(self) -> float:
        """The share at which the next report is due."""
        return (math.floor(self._share * self.plan.reports + 1e-9) + 1) / self.plan.reports - 1e-9

    def _left(self) -> float:
        """Seconds to the end at this pace."""
        spent = time.perf_counter() - self._begun
        return spent / self._share * max(0.0, 1 - self._share)

    def _where(self) -> str:
        of = f"/{self.plan.steps}" if self.plan.minutes is None else ""
        return f"step {self.step}{of}"

    def exported(self) -> dict[str, Tensor]:
        """The weights in bfloat16, by checkpoint name."""
        return {n: t.detach().to(torch.bfloat16) for n, t in self.network.tensors.items()}

    def acceptance(self, texts: Sequence[Text] | None = None, *, anchors: int = 64) -> Acceptance:
        """On given texts, or on at most `_LOOKED_AT` held-out ones; at most `anchors` blocks of
        each, evenly spread.
        """
        texts = texts if texts is not None else (self.held or self.texts)[:_LOOKED_AT]
        right, total = torch.zeros(2, self.network.draft_len)
        for start in range(0, len(texts), self.plan.batch):
            some = texts[start : start + self.plan.batch]
            where = np.stack([_spread(text, anchors) for text in some])
            held, there = self._agreement(self._features.batch(some, where))
            right += held.cumprod(-1).sum((0, 1)).cpu()
            total += there.sum((0, 1)).cpu()
        return Acceptance(tuple((right / total.clamp(min=1)).tolist()))

    def _agreement(self, batch: Batch) -> tuple[Tensor, Tensor]:
        with self._precision():
            return self.network.agreement(batch)

    def _precision(self) -> AbstractContextManager[Any]:
        """bfloat16 products of float32 weights on a GPU; float32 on a CPU."""
        return torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda")

    def _train(self) -> Tensor:
        """One step; its mean loss, not yet read back from the device."""
        batch = self._features.batch(*self._picked())
        with self._precision():
            value = self._loss(batch)
        value.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(self.network.tensors.values()), self.plan.clip)
        self._optimizer.step(self._rate())
        return self.world.mean(value.detach())

    def _picked(self) -> tuple[list[Text], IntArray]:
        """The step's texts of this process, and their anchors. What all pick together is what one
        process would pick with a batch as large as all of theirs.
        """
        rng = np.random.default_rng((self.plan.seed, self.step))
        count = self.plan.batch * self.world.size
        first = int(rng.integers(0, max(1, len(self.texts) - count + 1)))
        picked = self.texts[first : first + count]
        where = np.sort([rng.integers(*_range(t), self.plan.anchors) for t in picked])
        own = slice(self.world.rank, None, self.world.size)
        return picked[own], where[own]

    def _rate(self) -> float:
        """The share of the peak learning rate for the next step."""
        share, warm = self._share, self.plan.warmup
        if share < warm:
            return max(share / warm, 1e-3)
        return 0.01 + 0.99 * (1 + math.cos(math.pi * (share - warm) / (1 - warm))) / 2

    def _report(self, mean_loss: float) -> None:
        found = self.acceptance()
        shown = " ".join(f"{share:.2f}" for share in found.by_position)
        what = "held-out" if self.held else "trained-on"
        self._say(
            f"{self._where()}  loss {mean_loss:.3f}  {what} acceptance {shown}  "
            f"tokens/step {found.tokens_per_step:.2f}  {self._left():.0f} s left"
        )
        line = {"step": self.step, "loss": mean_loss, "acceptance": found.by_position}
        with (self.out / HISTORY).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    # --- checkpoints -------------------------------------------------------------------------

    def _identity(self, target: str) -> dict[str, Any]:
        plan = asdict(self.plan) | {"reports": None}
        if not self.plan.mix:
            del plan["mix"]  # checkpoints from before there was one go on
        shapes = {name: list(shape) for name, shape in self.network.shapes.items()}
        return {
            "recipe": self.network.recipe,
            "plan": plan,
            "target": target,
            "shapes": shapes,
            "texts": len(self.texts),
            "processes": self.world.size,
        }

    def _resume(self, target: str) -> None:
        self._mine = self._identity(target)
        file = self.out / CHECKPOINT
        if file.is_file():
            self._restore(file)
        elif self.world.is_first:
            (self.out / HISTORY).unlink(missing_ok=True)
        if self.step != self.world.of_first(self.step):
            raise InvalidConfig(
                f"{self.out} holds the checkpoint for some of the processes only; give a folder "
                "that all of them see."
            )

    def _restore(self, file: Path) -> None:
        state = torch.load(file, map_location=self._device, weights_only=True)
        if state["identity"] != self._mine:
            raise InvalidConfig(
                f"{file} is a checkpoint of another training (other recipe, plan, target, sizes, "
                "texts or number of processes); delete it or choose another folder."
            )
        with torch.no_grad():
            for name, own in self.network.tensors.items():
                own.copy_(state["tensors"][name])
        self._optimizer.restore(state["optimizer"])
        self.step, self._spent = int(state["step"]), float(state["spent"])
        self._say(f"resumed at step {self.step}")

    def _save(self) -> None:
        partial = self.out / f"{CHECKPOINT}.partial"
        tensors = {name: t.detach() for name, t in self.network.tensors.items()}
        state = {
            "identity": self._mine,
            "tensors": tensors,
            "optimizer": self._optimizer.state(),
            "step": self.step,
            "spent": time.perf_counter() - self._begun,
        }
        torch.save(state, partial)
        partial.replace(self.out / CHECKPOINT)
        self.network.save(self.out, self.exported())


def mixed(texts: Sequence[Text], mix: Mapping[str, float], *, seed: int) -> list[Text]:
    """Texts of each kind as often as `mix` says, once where it says nothing: 2.5 is twice for all,
    and a third time for a random half.

    Raises `InvalidConfig` for a kind that no text is of, a weight below 0, and where nothing stays.
    """
    kinds = sorted({text.kind for text in texts})
    for kind, weight in mix.items():
        if kind not in kinds:
            raise InvalidConfig(
                f"mix names {kind!r}, and no text is of that kind; choose from {', '.join(kinds)}."
            )
        if not 0 <= weight <= _MOST:
            raise InvalidConfig(f"mix gives {kind} {weight}; allowed: 0 to {_MOST}.")
    rng = np.random.default_rng(seed)
    found: list[Text] = []
    for text in texts:
        weight = mix.get(text.kind, 1.0)
        more = rng.random() < weight % 1
        found += [text] * (int(weight) + int(more))
    if not found:
        raise InvalidConfig(f"mix {dict(mix)} leaves no text to train on; weigh a kind above 0.")
    return found


def silent(_: str) -> None:
    """What processes say that are not the first."""


def _range(text: Text) -> tuple[int, int]:
    """Where anchors may be: from the prompt's last token to before the text's last."""
    low = max(1, text.prompt_len - 1)
    return low, max(low + 1, len(text.tokens) - 1)


def _spread(text: Text, count: int) -> IntArray:
    """At most `count` different anchors, evenly; behind the text's last token nothing is counted,
    which fills up short texts.
    """
    low, end = _range(text)
    found = np.unique(np.linspace(low, end - 1, num=count, dtype=np.int64))
    return np.pad(found, (0, count - len(found)), constant_values=len(text.tokens) - 1)
