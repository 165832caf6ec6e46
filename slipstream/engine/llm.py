"""The offline API: `LLM(model, drafter=...).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from slipstream.cache.pages import PageTable
from slipstream.control.static import StaticController
from slipstream.drafters import weights
from slipstream.drafters.specs import DrafterContext, build, parse
from slipstream.engine.engine import Engine, StepOutput
from slipstream.errors import InvalidConfig, InvalidRequest, ModelError
from slipstream.models.loading import EMBEDDED, LoadedModel, load
from slipstream.sampling.vocabulary import Vocabulary
from slipstream.target.target import ForwardRow, Target
from slipstream.types import Completion, SamplingParams

Prompt: TypeAlias = str | Seq[int] | Seq[Mapping[str, str]]
"""Raw text, token ids, or chat messages (`{"role": ..., "content": ...}`)."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MAX_USERS = 256
PAGE_SIZE = 16
DEVICE_PAGE_SIZE = 64  # what an attention program reads at once on an accelerator
_PREFILL_CHUNK = {"cpu": 512, "cuda": 2048}
_GPU_RESERVE = 2**31  # for activations, graphs and libraries
SCORE_POSITIONS = 128  # logits held at once while scoring: 128 x 49,152 floats are 25 MB


class LLM:
    """A model, a drafter and an engine.

    `model`: "smollm2-135m" (embedded), a local Hugging Face directory or a GGUF file.
    `drafter`: a spec such as "none", "ngram:3", "suffix", "mtp:2" (weights that ship for the
    model) or "mtp:PATH:2"; `drafter_weights` is then the digest of its weights, else None.
    `kv_tokens`: positions the paged cache holds, all users together (default: what the users can
    need, within half of the free memory). `dtype`: bfloat16 (default) or float32; a `LoadedModel`
    brings its own, and its device. `device`: cpu, cuda or cuda:N (default: cuda where there is
    one). `prefill_chunk`: prompt tokens of a step (default: 512, 2,048 on a GPU). `threads`: torch
    threads (default: torch's choice).
    """

    def __init__(
        self,
        model: str | Path | LoadedModel = EMBEDDED,
        *,
        drafter: str = "none",
        dtype: str | None = None,
        device: str | None = None,
        max_users: int = 16,
        kv_tokens: int | None = None,
        prefix_cache: bool = True,
        prefill_chunk: int | None = None,
        threads: int | None = None,
    ) -> None:
        if not 1 <= max_users <= MAX_USERS:
            raise InvalidConfig(f"max_users is {max_users}; allowed: 1 to {MAX_USERS}.")
        if kv_tokens is not None and kv_tokens < 1:
            raise InvalidConfig(f"kv_tokens is {kv_tokens}; allowed: 1 or more.")
        if prefill_chunk is not None and prefill_chunk < 1:
            raise InvalidConfig(f"prefill_chunk is {prefill_chunk}; allowed: 1 or more.")
        if threads is not None:
            if threads < 1:
                raise InvalidConfig(f"threads is {threads}; allowed: 1 or more.")
            torch.set_num_threads(threads)
        self.loaded = _load(model, dtype, device)
        if self.loaded.model.device.type == "cuda":
            # cuDNN's attention plans a quarter of a second for every new shape, and prompts that a
            # chain drafter takes in have no two alike.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._settings: dict[str, Any] = {
            "max_users": max_users,
            "kv_tokens": kv_tokens,
            "prefix_cache": prefix_cache,
            "prefill_chunk": prefill_chunk or _PREFILL_CHUNK[self.loaded.model.device.type],
        }
        self.tokenizer = self.loaded.tokenizer
        self._inboxes: dict[int, deque[StepOutput]] = {}
        config = self.loaded.model.config
        context = DrafterContext(
            vocab_size=config.vocab_size,
            max_context=config.max_context,
            tokenizer=self.tokenizer,
            dtype=self.loaded.model.dtype,
            max_users=max_users,
            device=str(self.loaded.model.device),
            prefix_cache=prefix_cache,
            target=self.loaded,
            page_size=PAGE_SIZE if self.loaded.model.device.type == "cpu" else DEVICE_PAGE_SIZE,
        )
        tokens = kv_tokens or _default_kv_tokens(self.loaded, max_users)
        context = replace(context, pages=-(-tokens // context.page_size))
        spec = parse(drafter)
        self.drafter = build(spec, context=context)
        self.drafter_weights = weights.fingerprint(spec, context)
        self.engine = self._build_engine(context)

    def _build_engine(self, context: DrafterContext) -> Engine:
        model, settings = self.loaded.model, self._settings
        config, max_users = model.config, settings["max_users"]
        engine = Engine(
            Target(
                self.loaded,
                num_pages=context.pages,
                page_size=context.page_size,
                taps=self.drafter.needs,
            ),
            self.drafter,
            StaticController(self.drafter.max_draft_len, max_context=config.max_context),
            vocabulary=Vocabulary.from_tokenizer(
                self.tokenizer, size=config.vocab_size, eos_ids=config.eos_token_ids
            ),
            tokenizer=self.tokenizer,
            max_users=max_users,
            prefill_chunk=settings["prefill_chunk"],
            prefix_cache=settings["prefix_cache"],
        )
        if model.device.type == "cuda":
            from slipstream.engine.fast import attach

            attach(engine, max_users=max_users, warm=True)
        return engine

    def fork(self, drafter: str, **changes: Any) -> LLM:
        """Another engine on the same weights (shared, nothing else is) with another drafter."""
        return LLM(self.loaded, drafter=drafter, **{**self._settings, **changes})

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; messages go through the model's chat template."""
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt).input_ids)
        if not isinstance(prompt, Seq):
            raise InvalidRequest(f"A prompt is text, token ids or messages, not {prompt!r}.")
        items = list(prompt)
        if not all(isinstance(m, Mapping) for m in items):
            return [_token_id(t) for t in items]
        if not items:
            return []
        if not self.tokenizer.chat_template:
            raise ModelError(
                f"{self.loaded.name} has no chat template; give text or token ids, not messages."
            )
        text = self.tokenizer.apply_chat_template(items, tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer every prompt; `params.n` answers each, in prompt order, then by `index`.

        Raises `InvalidRequest` before anything runs if a prompt cannot be served.
        """
        ids = self._submit_all(prompts, params)
        done = {o.request_id: o.completion for o in self._run(ids) if o.completion}
        return [done[i] for i in ids]

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[StepOutput]:
        """The same, step by step: new tokens and text per request, the completion with the last.

        Leaving the iterator early cancels what still runs.
        """
        return self._run(self._submit_all(prompts, params))

    def _run(self, ids: Seq[int]) -> Iterator[StepOutput]:
        inbox: deque[StepOutput] = deque()
        self._inboxes |= dict.fromkeys(ids, inbox)
        outputs = self._drain(ids, inbox)
        next(outputs)  # enter it, so that dropping the iterator unread cancels the requests
        return cast("Iterator[StepOutput]", outputs)

    def _drain(
        self, ids: Seq[int], inbox: deque[StepOutput]
    ) -> Generator[StepOutput | None, None, None]:
        open_ids = set(ids)
        try:
            yield None
            while inbox or any(map(self.engine.knows, open_ids)):
                if not inbox:
                    self._step()
                while inbox:
                    output = inbox.popleft()
                    if output.completion:
                        open_ids.discard(output.request_id)
                    yield output
        finally:
            for request_id in open_ids:
                self.engine.cancel(request_id)
            for request_id in ids:
                self._inboxes.pop(request_id, None)

    def _step(self) -> None:
        """One round; outputs go to whoever waits for them, since several calls may be open."""
        for output in self.engine.step():
            inbox = self._inboxes.get(output.request_id)
            if inbox is not None:
                inbox.append(output)

    def _submit_all(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[int]:
        many = as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(many)
        else:
            each = list(params)
        if len(each) != len(many):
            raise InvalidRequest(
                f"{len(each)} params for {len(many)} prompts; give one or as many."
            )
        ids: list[int] = []
        try:
            for prompt, p in zip(many, each, strict=True):
                tokens = self.encode(prompt)
                ids += [self.engine.submit(tokens, p, index=i) for i in range(p.n)]
        except Exception:
            for request_id in ids:
                self.engine.cancel(request_id)
            raise
        return ids

    @torch.inference_mode()
    def score(
        self, prompt: Seq[int], output: Seq[int]
    ) -> tuple[list[float], list[int], list[float]]:
        """Teacher-forced, at each output position (plain logits): top-2 margin, argmax, and how far
        below the likeliest token the given one lies.
        """
        target, tokens = self.engine.target, [*prompt, *output]
        table = PageTable(target.pool, expected_tokens=len(tokens))
        if not table.reserve(len(tokens)):
            raise InvalidRequest(
                f"Scoring needs room for {len(tokens)} tokens; the cache is full. Raise kv_tokens."
            )
        margins: list[float] = []
        best: list[int] = []
        gaps: list[float] = []
        try:
            # Position i's logits come from feeding token i - 1; the last token is never fed.
            start = 0
            while start < len(tokens) - 1:
                end = min(start + SCORE_POSITIONS, len(tokens) - 1)
                wanted = min(end - start, max(0, end - (len(prompt) - 1)))
                rows = [ForwardRow(tokens[start:end], start, table.pages, wanted)]
                logits = target.forward(rows).logits.float()
                top = logits.topk(2, dim=-1)
                given = torch.tensor(tokens[end + 1 - wanted : end + 1], device=logits.device)
                own = logits.gather(1, given.unsqueeze(1))[:, 0]
                gaps += (top.values[:, 0] - own).tolist()
                margins += (top.values[:, 0] - top.values[:, 1]).tolist()
                best += top.indices[:, 0].tolist()
                start = end
        finally:
            table.release()
        return margins, best, gaps


def as_prompts(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of ids or of messages is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(i, (int, Mapping)) for i in items) else items


def _token_id(token: object) -> int:
    if not isinstance(token, int) or isinstance(token, bool):
        raise InvalidRequest(
            f"A prompt is text, token ids or messages, not a list holding {token!r}."
        )
    return token


def _load(model: str | Path | LoadedModel, dtype: str | None, device: str | None) -> LoadedModel:
    if dtype is not None and dtype not in DTYPES:
        raise InvalidConfig(f"dtype is {dtype!r}; choose one of {', '.join(DTYPES)}.")
    if not isinstance(model, LoadedModel):
        return load(model, dtype=DTYPES[dtype or "bfloat16"], device=_device(device))
    if device is not None and model.model.device != _device(device):
        raise InvalidConfig(
            f"device is {device!r}, but {model.name} is on {model.model.device}; load it again."
        )
    if dtype is not None and model.model.dtype is not DTYPES[dtype]:
        raise InvalidConfig(
            f"dtype is {dtype!r}, but {model.name} is loaded as {model.model.dtype}; load it again."
        )
    return model


def _device(name: str | None) -> torch.device:
    cuda = torch.cuda.is_available()
    if name is None:
        return torch.device("cuda", 0) if cuda else torch.device("cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise InvalidConfig(f"device is {name!r}; choose cpu, cuda or cuda:N.")
    if kind == "cpu":
        return torch.device("cpu")
    if not cuda or int(index or 0) >= torch.cuda.device_count():
        raise InvalidConfig(f"device is {name!r}, which this machine does not have; try cpu.")
    return torch.device("cuda", int(index or 0))


def _default_kv_tokens(loaded: LoadedModel, max_users: int) -> int:
    """What the users can need, within nine tenths of a GPU's free memory or half of a host's."""
    config, device = loaded.model.config, loaded.model.device
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - _GPU_RESERVE
        share, width = free * 9 // 10, loaded.model.dtype.itemsize
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        share, width = free // 2, 4
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    most = share // per_token
    if most < 2 * DEVICE_PAGE_SIZE:
        raise ModelError(
            f"{loaded.name} leaves {free / 2**30:.1f} GiB on {device}, too little for a cache; "
            "use a smaller model or free memory."
        )
    return int(min(max_users * config.max_context, most))
