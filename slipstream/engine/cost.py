"""What a target and a drafter of some shape cost on this machine, before weights are downloaded.

Random weights of the true shape run through the real engine: prefill, lane, host. Speed is all they
can say; how many draft tokens hold is *given* (`acceptance`, synthetic and labeled so).
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slipstream.control.static import StaticController
from slipstream.drafters.base import Drafter
from slipstream.drafters.none import NoneDrafter
from slipstream.drafters.specs import DrafterContext, build
from slipstream.engine.engine import Engine
from slipstream.engine.fast import attach
from slipstream.engine.lane import cuda_clock
from slipstream.errors import InvalidConfig
from slipstream.models.config import ModelConfig
from slipstream.models.dense import Model
from slipstream.models.loading import LoadedModel
from slipstream.models.shapes import random_model, weight_bytes
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.target.graphs import Step, capture
from slipstream.target.target import Target
from slipstream.types import SamplingParams

PAGE_SIZE = 64
WARM_STEPS, STEPS, REPLAYS = 12, 40, 30
_DFLASH = re.compile(r"dflash:(\d+)(?:,layers=(\d+))?$")


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds a step, medians; `floor` is bytes that must be read over the copy bandwidth.

    `step` is the graph on the device, `host` what the host added to it, `draft`, `verify`, `accept`
    the graph's parts timed on their own. `tokens_per_step` is synthetic where acceptance was given.
    `ms_per_token` is per user, `tok_s` of all users.
    """

    drafter: str
    users: int
    context: int
    draft_len: int
    synthetic: bool
    tokens_per_step: float
    draft: float
    verify: float
    accept: float
    step: float
    host: float
    floor: float
    ms_per_token: float
    tok_s: float


@dataclass(frozen=True, slots=True)
class Case:
    """What to measure. `context`: tokens a row has half way through the measured steps.
    `acceptance`: mean tokens a row-step, as in tokens per step; None keeps what the random model
    accepts (and takes it to be 1 where it plans the context).
    """

    drafter: str
    users: int
    context: int
    acceptance: float | None = None


def shape_model(config: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of `config` with random weights and no tokenizer."""
    model = random_model(config, seed=0, device=device, dtype=dtype)
    return LoadedModel(model, None, "random weights", Path("random"), "random")


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read plus written, of a large copy on the device."""
    source = torch.empty(2**31, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / (_median_ms(lambda: target.copy_(source)) / 1e3)


def measure(loaded: LoadedModel, case: Case, *, bandwidth: float) -> Cost:
    """Run one case. Raises `InvalidConfig` for values that make no sense, `ModelError` where memory
    is short.
    """
    engine, drafter = _engine(loaded, case)
    fast = engine.fast
    assert fast is not None
    seconds, tokens = _run(engine, case)
    step = fast.lane.current
    with torch.inference_mode():
        parts = _parts(step)
    for request_id in range(case.users):
        engine.cancel(request_id)
    device, host = (statistics.median(values) * 1e3 for values in seconds)
    return Cost(
        drafter=case.drafter,
        users=case.users,
        context=case.context,
        draft_len=drafter.max_draft_len,
        synthetic=case.acceptance is not None,
        tokens_per_step=tokens,
        draft=parts[0],
        verify=parts[1],
        accept=parts[2],
        step=device,
        host=host,
        floor=_floor_bytes(loaded.model, drafter, case) / bandwidth * 1e3,
        ms_per_token=(device + host) / tokens,
        tok_s=case.users * tokens / (device + host) * 1e3,
    )


def _engine(loaded: LoadedModel, case: Case) -> tuple[Engine, Drafter]:
    config = loaded.model.config
    if not 1 <= case.users <= 64:
        raise InvalidConfig(f"users is {case.users}; allowed: 1 to 64.")
    draft_len = _draft_len(loaded.model, case)
    room = case.context + _answer_tokens(draft_len)
    if room > config.max_context:
        raise InvalidConfig(
            f"context is {case.context}; this model reaches {config.max_context}, and "
            f"{room - case.context} tokens are written while measuring. Use less."
        )
    pages = case.users * -(-(room + draft_len + 1) // PAGE_SIZE)
    drafter = _drafter(loaded.model, case, pages * PAGE_SIZE)
    if case.acceptance is not None and not 1 <= case.acceptance <= drafter.max_draft_len + 1:
        raise InvalidConfig(
            f"acceptance is {case.acceptance}; with {case.drafter} a step brings 1 to "
            f"{drafter.max_draft_len + 1} tokens."
        )
    engine = Engine(
        Target(loaded, num_pages=pages, page_size=PAGE_SIZE),
        drafter,
        StaticController(drafter.max_draft_len, max_context=config.max_context),
        vocabulary=Vocabulary(config.vocab_size, ()),
        tokenizer=None,
        max_users=case.users,
        prefill_chunk=4096,
        prefix_cache=False,
    )
    forced = None if case.acceptance is None else case.acceptance - 1
    attach(engine, max_users=case.users, forced=forced)
    if engine.fast is None:
        raise InvalidConfig(
            f"drafter is {case.drafter!r}; `slipstream cost` measures none, ngram, suffix, dflash."
        )
    return engine, drafter


def _answer_tokens(draft_len: int) -> int:
    """Most tokens a row can be given while measuring, the replays of its parts included."""
    return (WARM_STEPS + STEPS + 3 * REPLAYS + 8) * (draft_len + 1)


def _draft_len(model: Model, case: Case) -> int:
    match = _DFLASH.match(case.drafter)
    return int(match[1]) if match else int(_drafter(model, case, 0).max_draft_len)


def _drafter(model: Model, case: Case, slots: int) -> Any:
    match = _DFLASH.match(case.drafter)
    if match:
        return _ShapeDFlash(model, int(match[1]), int(match[2] or 5), slots, case.drafter)
    config = model.config
    context = DrafterContext(
        vocab_size=config.vocab_size, max_context=config.max_context, max_users=case.users
    )
    return build(case.drafter, context=context)


class _ShapeDFlash(NoneDrafter):
    """The DFlash shape with random weights, on the device only; the host takes nothing in."""

    def __init__(self, target: Model, draft_len: int, layers: int, slots: int, name: str) -> None:
        from slipstream.drafters.dflash_device import random_weights

        super().__init__(name)
        self.max_draft_len, self.reach = draft_len, draft_len + 1
        self.weights = random_weights(
            target, layers=layers, taps=5, block_size=draft_len + 1, seed=1
        )
        config = self.weights.model.config
        shape = (slots, 2 * config.num_kv_heads, config.head_dim)
        self._storage = [
            torch.zeros(shape, dtype=target.dtype, device=target.device) for _ in range(layers)
        ]

    def on_device(self) -> Any:
        from slipstream.drafters.dflash_device import BlockForm

        return BlockForm(weights=self.weights, draft_len=self.max_draft_len, storage=self._storage)


def _run(engine: Engine, case: Case) -> tuple[tuple[list[float], list[float]], float]:
    """Device and host seconds of each measured step, and committed tokens a row-step."""
    rng = np.random.default_rng(0)
    vocab = engine.vocabulary.size
    most = _answer_tokens(engine.drafter.max_draft_len)
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    lead = round((WARM_STEPS + STEPS / 2) * (case.acceptance or 1))
    for _ in range(case.users):
        engine.submit(rng.integers(0, vocab, max(1, case.context - lead)).tolist(), params)
    rows = engine.rows
    device: list[float] = []
    host: list[float] = []
    committed = 0
    while len(device) < WARM_STEPS + STEPS:
        outputs = engine.step()
        record = rows[0].records[-1] if rows[0].records else None
        if len(outputs) == case.users and record is not None and not record.prefill_tokens:
            device.append(record.times.verify)
            host.append(record.times.host)
            if len(device) > WARM_STEPS:
                committed += sum(len(o.tokens) for o in outputs)
    return (device[WARM_STEPS:], host[WARM_STEPS:]), committed / (STEPS * case.users)


def _parts(step: Step) -> tuple[float, float, float]:
    """Milliseconds of draft, verify and accept, each captured and replayed on its own."""
    scores = step.enqueue_verify()
    return (
        _replayed(step.enqueue_draft) if step.drafts_here else 0.0,
        _replayed(step.enqueue_verify),
        _replayed(lambda: step.enqueue_accept(scores)),
    )


def _replayed(enqueue: Callable[[], Any]) -> float:
    graph = capture(enqueue)
    return _median_ms(graph.replay)


def _median_ms(work: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(REPLAYS):
        begun, done = cuda_clock(), cuda_clock()
        begun.record()
        work()
        done.record()
        done.synchronize()
        times.append(float(begun.elapsed_time(done)))
    return statistics.median(times[REPLAYS // 4 :])


def _floor_bytes(model: Model, drafter: Any, case: Case) -> int:
    """Weights once a forward, keys and values once a layer; the drafter's likewise."""
    per_token = _kv_bytes(model.config, model.dtype)
    total = weight_bytes(model) + case.users * case.context * per_token
    weights = getattr(drafter, "weights", None)
    if weights is not None:
        total += weight_bytes(weights.model) + weights.fc.weight.numel() * model.dtype.itemsize
        per_token = _kv_bytes(weights.model.config, model.dtype)
        total += case.users * case.context * per_token
    return int(total)


def _kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.num_layers * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize
