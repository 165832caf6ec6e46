"""What a target and a drafter of some shape cost on this machine, before weights are downloaded.

Random weights of the true shape run through the real engine: prefill, lane, host; on a CPU its five
lines. Speed is all they can say; how many draft tokens hold is *given* (`acceptance`, synthetic and
labeled so).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.control.static import StaticController
from slipstream.drafters.base import Drafter
from slipstream.drafters.shaped import Shape, shape_of
from slipstream.drafters.specs import DrafterContext
from slipstream.engine.engine import Engine
from slipstream.engine.fast import attach
from slipstream.engine.floor import step_bytes
from slipstream.engine.lane import HostClock, cuda_clock
from slipstream.engine.verifier import Verifier
from slipstream.errors import InvalidConfig
from slipstream.models.config import ModelConfig
from slipstream.models.loading import LoadedModel
from slipstream.models.shapes import random_model
from slipstream.sampling.uniforms import Uniforms
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.target.graphs import Step, capture
from slipstream.target.target import Target
from slipstream.types import Draft, Row, SamplingParams, StageTimes, Verdict

PAGE_SIZE = 64
WARM_STEPS, STEPS, REPLAYS = 12, 40, 30
_COPIED = {"cuda": 2**31, "cpu": 2**28}  # bytes of the copy that tells the bandwidth


@dataclass(frozen=True, slots=True)
class Cost:
    """Milliseconds a step, medians; `floor` is bytes that must be read over the copy bandwidth.

    `step` is the graph on the device, `host` what the host added to it, `draft`, `verify`, `accept`
    the graph's parts timed on their own; on a CPU the three stages of a step, and `step` all of
    them. `tokens_per_step` is synthetic where acceptance was given.
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
    source = torch.ones(_COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    clock = cuda_clock if device.type == "cuda" else HostClock
    return 2 * source.numel() / (_median_ms(lambda: target.copy_(source), clock) / 1e3)


def measure(loaded: LoadedModel, case: Case, *, bandwidth: float) -> Cost:
    """Run one case. Raises `InvalidConfig` for values that make no sense, `ModelError` where memory
    is short.
    """
    engine, drafter = _engine(loaded, case)
    times, tokens = _run(engine, case)
    draft, verify, accept = _parts(engine, times)
    for request_id in range(case.users):
        engine.cancel(request_id)
    device, host = (
        statistics.median(t.draft + t.verify + t.sample for t in times) * 1e3,
        statistics.median(t.host for t in times) * 1e3,
    )
    floor = step_bytes(loaded.model, drafter, users=case.users, context=case.context) / bandwidth
    return Cost(
        drafter=case.drafter,
        users=case.users,
        context=case.context,
        draft_len=drafter.max_draft_len,
        synthetic=case.acceptance is not None,
        tokens_per_step=tokens,
        draft=draft,
        verify=verify,
        accept=accept,
        step=device,
        host=host,
        floor=floor * 1e3,
        ms_per_token=(device + host) / tokens,
        tok_s=case.users * tokens / (device + host) * 1e3,
    )


def _engine(loaded: LoadedModel, case: Case, *, lane: bool | None = None) -> tuple[Engine, Drafter]:
    """The engine of a case. `lane`: steps are graphs; None where the model is on an accelerator."""
    config = loaded.model.config
    lane = loaded.model.device.type != "cpu" if lane is None else lane
    shape = shape_of(case.drafter, config)
    _check(case, shape, config, lane=lane)
    room = case.context + _answer_tokens(shape.spec.draft_len)
    pages = case.users * -(-(room + shape.reach) // PAGE_SIZE)
    drafter = shape.built(_context(loaded, case, pages))
    engine = Engine(
        Target(loaded, num_pages=pages, page_size=PAGE_SIZE, taps=drafter.needs),
        drafter,
        StaticController(drafter.max_draft_len, max_context=config.max_context),
        vocabulary=Vocabulary(config.vocab_size, ()),
        tokenizer=None,
        max_users=case.users,
        prefill_chunk=4096,
        prefix_cache=False,
    )
    forced = None if case.acceptance is None else case.acceptance - 1
    if lane:
        attach(engine, max_users=case.users, forced=forced)
        if engine.fast is None:
            raise InvalidConfig(
                f"drafter is {case.drafter!r}; its heads are of a size that a GPU's attention has "
                "no tiles for, so no step can be captured: measure another shape."
            )
    elif forced is not None:
        engine.verifier = _Forced(forced)
    return engine, drafter


def _context(loaded: LoadedModel, case: Case, pages: int) -> DrafterContext:
    config = loaded.model.config
    return DrafterContext(
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        max_users=case.users,
        target=loaded,
        pages=pages,
        page_size=PAGE_SIZE,
    )


def _check(case: Case, shape: Shape, config: ModelConfig, *, lane: bool) -> None:
    """Raise `InvalidConfig` for a case that makes no sense, before anything is built."""
    if not 1 <= case.users <= 64:
        raise InvalidConfig(f"users is {case.users}; allowed: 1 to 64.")
    room = _answer_tokens(shape.spec.draft_len)
    if case.context < 1 or case.context + room > config.max_context:
        raise InvalidConfig(
            f"context is {case.context}; this model reaches {config.max_context}, and "
            f"{room} tokens are written while measuring: use 1 to {config.max_context - room}."
        )
    most = shape.spec.draft_len + 1
    if case.acceptance is None:
        return
    if not 1 <= case.acceptance <= most:
        raise InvalidConfig(
            f"acceptance is {case.acceptance}; with {case.drafter} a step brings 1 to "
            f"{most} tokens."
        )
    if not lane and shape.config is None:
        raise InvalidConfig(
            f"acceptance is {case.acceptance} for {case.drafter!r}, which on a CPU drafts only "
            "what it finds in the text; leave it out, or measure traffic with `slipstream grid`."
        )


class _Forced(Verifier):
    """Synthetic acceptance on the host: `mean` draft tokens a row-step hold, whatever they are."""

    def __init__(self, mean: float) -> None:
        self._mean, self._rng = mean, np.random.default_rng(0)

    def verify(
        self, rows: Sequence[Row], draft: Draft, logits: Tensor, uniforms: Uniforms
    ) -> Verdict:
        """The true verdict, at its true cost, with other numbers of accepted tokens."""
        found = super().verify(rows, draft, logits, uniforms)
        whole = int(self._mean)
        more = self._rng.random(len(rows)) < self._mean - whole
        accepted = np.minimum(whole + more, draft.lens).astype(np.int64)
        return Verdict(accepted, found.next_tokens, found.logprobs, found.errors)


def _answer_tokens(draft_len: int) -> int:
    """Most tokens a row can be given while measuring, the replays of its parts included."""
    return (WARM_STEPS + STEPS + 3 * REPLAYS + 8) * (draft_len + 1)


def _run(engine: Engine, case: Case) -> tuple[list[StageTimes], float]:
    """Times of each measured step, and committed tokens a row-step. A step of the lane has all its
    time on the device in `verify`.
    """
    rng = np.random.default_rng(0)
    vocab = engine.vocabulary.size
    most = _answer_tokens(engine.drafter.max_draft_len)
    params = SamplingParams(max_tokens=most, ignore_eos=True)
    lead = round((WARM_STEPS + STEPS / 2) * (case.acceptance or 1))
    for _ in range(case.users):
        engine.submit(rng.integers(0, vocab, max(1, case.context - lead)).tolist(), params)
    rows = engine.rows
    times: list[StageTimes] = []
    committed = 0
    while len(times) < WARM_STEPS + STEPS:
        outputs = engine.step()
        record = rows[0].records[-1] if rows[0].records else None
        if len(outputs) == case.users and record is not None and not record.prefill_tokens:
            times.append(record.times)
            if len(times) > WARM_STEPS:
                committed += sum(len(o.tokens) for o in outputs)
    return times[WARM_STEPS:], committed / (STEPS * case.users)


def _parts(engine: Engine, times: Sequence[StageTimes]) -> tuple[float, float, float]:
    """Milliseconds of draft, verify and accept: each captured and replayed on its own, or the
    medians of a CPU's stages.
    """
    if engine.fast is None:
        stages = ((t.draft, t.verify, t.sample) for t in times)
        draft, verify, accept = (statistics.median(x) * 1e3 for x in zip(*stages, strict=True))
        return draft, verify, accept
    with torch.inference_mode():
        return _replayed_parts(engine.fast.lane.current)


def _replayed_parts(step: Step) -> tuple[float, float, float]:
    scores = step.enqueue_verify()
    return (
        _replayed(step.enqueue_draft) if step.drafts_here else 0.0,
        _replayed(step.enqueue_verify),
        _replayed(lambda: step.enqueue_accept(scores)),
    )


def _replayed(enqueue: Callable[[], Any]) -> float:
    graph = capture(enqueue)
    return _median_ms(graph.replay, cuda_clock)


def _median_ms(work: Callable[[], Any], clock: Callable[[], Any]) -> float:
    times: list[float] = []
    for _ in range(REPLAYS):
        begun, done = clock(), clock()
        begun.record()
        work()
        done.record()
        done.synchronize()
        times.append(float(begun.elapsed_time(done)))
    return statistics.median(times[REPLAYS // 4 :])
