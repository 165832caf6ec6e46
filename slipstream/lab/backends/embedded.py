"""The engine of this package, in this process. The only file of the lab that reaches it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from slipstream.engine import LLM
from slipstream.engine.llm import DTYPES
from slipstream.errors import InvalidConfig
from slipstream.lab.backends.base import Scores, TargetInfo
from slipstream.lab.samples import Request, Sample
from slipstream.models.loading import LoadedModel
from slipstream.types import Completion, Timings

TINY = "tiny"
TINY_CONTEXT = 16384
MAX_USERS = 64
TURN = 0.25
"""Seconds of an arm's own clock that a turn takes on an accelerator."""


class Embedded:
    """Implements `Backend`: one `LLM` an arm, forks of one, so that weights are shared."""

    def __init__(self, target: str, *, dtype: str, threads: int | None) -> None:
        model = _tiny(dtype) if target == TINY else target
        self._base = LLM(model, dtype=dtype, max_users=1, kv_tokens=64, threads=threads)
        self._arms: dict[str, LLM] = {}
        self._target, self._dtype = target, dtype
        self._turn = TURN if self._base.loaded.model.device.type == "cuda" else 0.0

    @property
    def info(self) -> TargetInfo:
        """Name, weights and limits of the loaded model."""
        loaded = self._base.loaded
        return TargetInfo(
            target=self._target,
            fingerprint=loaded.fingerprint,
            dtype=self._dtype,
            threads=torch.get_num_threads(),
            context=loaded.model.config.max_context,
            chat_template=bool(getattr(self._base.tokenizer, "chat_template", None)),
            random_weights=self._target == TINY,
        )

    def open(self, arms: Sequence[str], *, users: int, kv_tokens: int) -> dict[str, dict[str, Any]]:
        """Fork an engine for every arm; all settings but the drafter are alike."""
        if users > MAX_USERS:
            raise InvalidConfig(f"The embedded engine serves 1 to {MAX_USERS} users, not {users}.")
        shared = {"max_users": users, "kv_tokens": kv_tokens, "prefix_cache": True}
        self._arms = {arm: self._base.fork(arm, **shared) for arm in arms}
        return {arm: _settings(llm, shared) for arm, llm in self._arms.items()}

    def count_tokens(self, text: str) -> int:
        """Tokens of plain text, without special ones."""
        return len(self._base.tokenizer(text, add_special_tokens=False).input_ids)

    def reset(self, arm: str) -> None:
        """Drop the arm's reusable prefixes and its drafter's memory."""
        self._arms[arm].engine.reset()

    def run(self, arm: str, requests: Sequence[Request], *, users: int) -> list[Sample]:
        """Closed loop, timed where a client would stand: at submit and after each step."""
        return self.run_together([arm], requests, users=users)[arm]

    def run_together(
        self, arms: Sequence[str], requests: Sequence[Request], *, users: int
    ) -> dict[str, list[Sample]]:
        """All arms at once, taking turns, each on a clock that stands still while the others work.
        The arm whose clock is furthest behind goes next, so whatever the machine does in a second
        it does to all of them. A turn is one step; on an accelerator, where an engine is one step
        ahead of its device, it is `TURN` seconds and lasts until the device has nothing left to do:
        else an arm's last step would run on the next one's clock.
        """
        loops = {arm: _Loop(self._arms[arm], requests, users) for arm in arms}
        try:
            while open_loops := [loop for loop in loops.values() if not loop.done]:
                loop = min(open_loops, key=lambda loop: loop.clock)
                loop.advance_for(self._turn)
                if self._turn:
                    loop.settle()
        finally:
            for loop in loops.values():
                loop.cancel()
        return {arm: loop.samples() for arm, loop in loops.items()}

    def score(self, request: Request, token_ids: Sequence[int]) -> Scores:
        """Teacher-forced margins on the shared weights, one forward without drafts."""
        llm = next(iter(self._arms.values()))
        margins, argmax, gaps = llm.score(_encode(llm, request), list(token_ids))
        return Scores(tuple(margins), tuple(argmax), tuple(gaps))

    def close(self) -> None:
        """Let the engines' caches go."""
        self._arms = {}


def _settings(llm: LLM, shared: dict[str, Any]) -> dict[str, Any]:
    """An arm's resolved settings. A path does not say which weights lay there, so their digest
    does: a run whose drafter was trained again is not gone on with.
    """
    own = {"drafter": llm.drafter.name}
    if llm.drafter_weights is not None:
        own["weights"] = llm.drafter_weights
    return own | shared


def _tiny(dtype: str) -> LoadedModel:
    """A random model with room for real prompts, of which its byte tokenizer makes long ones."""
    from slipstream.models.tiny import tiny_model

    if dtype not in DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    return tiny_model(dtype=DTYPES[dtype], max_position_embeddings=TINY_CONTEXT)


class _Client:
    """One request from its sender's side."""

    def __init__(self, request: Request, prompt_tokens: int, arrived: float) -> None:
        self.request, self.prompt_tokens, self.arrived = request, prompt_tokens, arrived
        self.times: list[float] = []
        self.chunks: list[int] = []
        self.completion: Completion | None = None

    def sample(self) -> Sample:
        """The finished request as a row of the ledger."""
        done = self.completion
        assert done is not None
        return Sample(
            id=self.request.id,
            text=done.text,
            finish=done.finish_reason.value,
            timings=Timings(self.arrived, tuple(self.times), tuple(self.chunks)),
            seed=self.request.params.seed,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=done.cached_tokens,
            token_ids=tuple(done.token_ids),
            records=done.records,
            error=done.error,
        )


class _Loop:
    """One arm's closed loop: `users` requests in flight, `clock` in seconds of its own work."""

    def __init__(self, llm: LLM, requests: Sequence[Request], users: int) -> None:
        self._llm, self._users = llm, users
        self._waiting = deque((request, _encode(llm, request)) for request in requests)
        self._clients: dict[int, _Client] = {}
        self._running = 0
        self.clock = 0.0

    @property
    def done(self) -> bool:
        """True when every request has ended."""
        return not self._waiting and not self._running

    def advance_for(self, seconds: float) -> None:
        """At least one round of the engine, and more while `seconds` last and there is work."""
        end = self.clock + seconds
        self.advance()
        while self.clock < end and not self.done:
            self.advance()

    def settle(self) -> None:
        """Let the device end what it was given, on this arm's clock."""
        start = time.perf_counter() - self.clock
        self._llm.engine.settle()
        self.clock = time.perf_counter() - start

    def advance(self) -> None:
        """Send what a free user has to send, then one round of the engine."""
        start = time.perf_counter() - self.clock
        while self._waiting and self._running < self._users:
            request, prompt = self._waiting.popleft()
            request_id = self._llm.engine.submit(prompt, request.params)
            arrived = time.perf_counter() - start
            self._clients[request_id] = _Client(request, len(prompt), arrived)
            self._running += 1
        outputs = self._llm.engine.step()
        self.clock = time.perf_counter() - start
        for output in outputs:
            client = self._clients[output.request_id]
            if output.tokens:
                client.times.append(self.clock)
                client.chunks.append(len(output.tokens))
            if output.completion is not None:
                client.completion = output.completion
                self._running -= 1

    def cancel(self) -> None:
        """End what still runs."""
        for request_id, client in self._clients.items():
            if client.completion is None:
                self._llm.engine.cancel(request_id)

    def samples(self) -> list[Sample]:
        """Finished requests, in the order they were sent."""
        return [client.sample() for client in self._clients.values()]


def _encode(llm: LLM, request: Request) -> list[int]:
    prompt = request.prompt
    return llm.encode(list(prompt.messages) if prompt.messages is not None else prompt.text or "")
