"""Prompts that the device reads while the lane goes on.

Where a forward is launch-bound, a step that mixes prompts with decoding rows makes every row wait:
for the lane to drain, for the host to lay the batch out, for the lane to be entered again. So the
prompts of new requests run as a forward of their own between two steps of the lane, and the host
looks at it when the steps behind it keep the device busy. Large models keep the mixed forward,
which reads their weights once for both.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.engine.clock import Clock
from slipstream.engine.features import fed_rows
from slipstream.engine.scheduler import Batch
from slipstream.target.target import ForwardOutput
from slipstream.types import Draft

if TYPE_CHECKING:
    from slipstream.engine.engine import Engine, StepOutput


class Reading:
    """One forward over the chunks of `batch`, launched at once.

    `begun`, `done`: events of the lane's clock, recorded around it.
    """

    def __init__(self, engine: Engine, batch: Batch, *, begun: Any, done: Any) -> None:
        self._engine, self._batch = engine, batch
        self._begun, self._done = begun, done
        self._fed = fed_rows(batch, Draft.empty(0))
        begun.record()
        self._launched = engine.target.launch(engine.forward_rows(batch, Draft.empty(0)))
        done.record()

    def finish(self) -> tuple[list[StepOutput], float]:
        """Wait for it, choose next tokens and commit them; also the device's seconds.

        Requests that ended meanwhile get nothing.
        """
        engine = self._engine
        self._done.synchronize()
        spent = self._begun.elapsed_time(self._done) / 1e3
        timer = Clock(verify=spent)
        with _beside(engine.target.loaded.model.device):
            scores = engine.target.settle(self._launched)
            batch, scores = self._alive(scores)
            draft = Draft.empty(len(batch.rows))
            verdict = engine.verifier.verify(batch.rows, draft, scores.logits, engine.uniforms)
        timer.lap("sample")
        return engine.conclude(batch, draft, verdict, self._fed, scores, timer), spent

    def _alive(self, scores: ForwardOutput) -> tuple[Batch, ForwardOutput]:
        """The batch and its output without requests that ended while it ran."""
        knows, chunks = self._engine.knows, self._batch.in_order
        kept = [i for i, chunk in enumerate(chunks) if knows(chunk.row.request_id)]
        if len(kept) == len(chunks):
            return self._batch, scores
        wanted = [
            i for i in kept if chunks[i].ends_prompt
        ]  # these come first, a row of logits each
        at = torch.from_numpy(np.array(wanted, np.int64)).to(scores.logits.device)
        broken = frozenset(new for new, old in enumerate(kept) if old in scores.broken)
        alive = ForwardOutput(scores.logits.index_select(0, at), scores.features, broken)
        return Batch([], [chunks[i] for i in kept]), alive


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """On CUDA a stream of its own for what waits for the device, so that it does not wait for the
    steps launched meanwhile. Whoever enters has waited for what is read inside.
    """
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(_stream(device))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
