"""Training texts: prompts, answered by the target itself, and the features it sees them with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.cache.pages import PageTable
from slipstream.engine.llm import DEVICE_PAGE_SIZE, LLM, PAGE_SIZE, Prompt
from slipstream.errors import InvalidConfig
from slipstream.models.loading import LoadedModel
from slipstream.target.target import ForwardRow, Target
from slipstream.train.recipe import Batch
from slipstream.types import IntArray, SamplingParams

_HOST_TOKENS, _DEVICE_TOKENS = 1024, 16384
"""Tokens of a forward over training texts, on a CPU and on a GPU."""


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer. Drafters learn the tokens from `prompt_len` on.

    `tokens` int32 [length]; `kind`: what sort of prompt it was, "" where nobody said.
    """

    tokens: NDArray[np.int32]
    prompt_len: int
    kind: str = ""


def own_answers(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[Text]:
    """The target's answers, in order; answers under two tokens are left out.

    A drafter learns to say what its target would say, so the target has to be asked. One set of
    parameters for all gives each prompt a seed of its own, counted up from `params.seed` or 0.
    """
    if isinstance(params, SamplingParams):
        first = params.seed or 0
        params = [replace(params, seed=first + i) for i in range(len(prompts))]
    done = llm.generate(list(prompts), list(params))
    texts = [
        text_of(llm.encode(p), c.token_ids)
        for p, c in zip(prompts, done, strict=True)
        if len(c.token_ids) > 1
    ]
    if not texts:
        raise InvalidConfig("No prompt got an answer of two tokens or more; nothing to train on.")
    return texts


def text_of(prompt: Sequence[int], answer: Sequence[int], kind: str = "") -> Text:
    """A prompt's tokens and its answer's."""
    return Text(np.array([*prompt, *answer], np.int32), len(prompt), kind)


def self_prompts(
    llm: LLM, count: int, *, seed: int, openings: Sequence[str] = ("",), max_tokens: int = 160
) -> list[Prompt]:
    """User messages the target makes up when it is given the beginning of its chat template.

    `openings`: first words it is given, in turn; `max_tokens`: of a message. Source of the idea:
    Magpie (arXiv 2406.08464). Messages under four words, or over half of the context, are asked for
    again, up to five times as many as wanted; a target that has none in it gives fewer, or none.
    """
    if not llm.tokenizer.chat_template:
        raise InvalidConfig(f"{llm.loaded.name} has no chat template; give a file of prompts.")
    marker = "SLIPSTREAM"
    text = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    head, _, tail = text.partition(marker)
    begin = [list(llm.tokenizer(head + o, add_special_tokens=False).input_ids) for o in openings]
    stop = tail.strip().split("\n")[0][:32]
    found: list[Prompt] = []
    for turn in range(5):
        params = [
            SamplingParams(
                max_tokens=max_tokens,
                temperature=1.0,
                top_p=0.95,
                seed=seed + turn * count + i,
                stop=(stop,),
            )
            for i in range(count)
        ]
        asked = [begin[i % len(begin)] for i in range(count)]
        for i, answer in enumerate(llm.generate(asked, params)):
            content = (openings[i % len(openings)] + answer.text).strip()
            message: Prompt = [{"role": "user", "content": content}]
            fits = len(llm.encode(message)) <= llm.loaded.config.max_context // 2
            if fits and len(content.split()) >= 4 and len(found) < count:
                found.append(message)
        if len(found) == count:
            break
    return found


class Features:
    """Runs the target over whole texts and returns its hidden states at `taps`."""

    def __init__(self, loaded: LoadedModel, taps: tuple[int, ...], *, longest: int) -> None:
        """`longest`: tokens of all texts of a batch, each rounded up to whole pages."""
        on_host = loaded.model.device.type == "cpu"
        self._page = PAGE_SIZE if on_host else DEVICE_PAGE_SIZE
        self._budget = _HOST_TOKENS if on_host else _DEVICE_TOKENS
        self._target = Target(
            loaded, num_pages=-(-longest // self._page), page_size=self._page, taps=taps
        )

    def of(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, taps, hidden] of one text, detached, in the model's dtype."""
        return self.of_all([tokens])[0]

    def of_all(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """[texts, longest, taps, hidden], detached, in the model's dtype, zeros behind a text."""
        tables = [self._room(len(tokens)) for tokens in texts]
        out: Tensor | None = None
        for spans in _spans([len(tokens) for tokens in texts], self._budget):
            rows = [ForwardRow(list(texts[i][a:b]), a, tables[i].pages, 1) for i, a, b in spans]
            found = self._target.forward(rows).features
            assert found is not None
            if out is None:
                out = found.new_zeros(len(texts), max(map(len, texts)), *found.shape[1:])
            at = 0
            for i, a, b in spans:
                out[i, a:b] = found[at : at + b - a]
                at += b - a
        for table in tables:
            table.release()
        assert out is not None
        return out

    def batch(self, texts: Sequence[Text], anchors: IntArray) -> Batch:
        """Texts with blocks at `anchors` [texts, blocks], as networks take them."""
        device = self._target.loaded.model.device
        lengths = [len(text.tokens) for text in texts]
        padded = np.zeros((len(texts), max(lengths)), np.int64)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text.tokens)] = text.tokens
        return Batch(
            torch.from_numpy(padded).to(device),
            torch.tensor(lengths, device=device),
            torch.from_numpy(anchors).to(device),
            self.of_all([text.tokens.tolist() for text in texts]),
        )

    def _room(self, tokens: int) -> PageTable:
        table = PageTable(self._target.pool, expected_tokens=tokens)
        if not table.reserve(tokens):
            raise InvalidConfig(f"Texts of {tokens} tokens are longer than was planned for.")
        return table


def _spans(lengths: Sequence[int], budget: int) -> Iterator[list[tuple[int, int, int]]]:
    """Texts in order as (text, first, end), cut so that no forward exceeds `budget` tokens."""
    spans, room = [], budget
    for i, length in enumerate(lengths):
        at = 0
        while at < length:
            end = min(length, at + room)
            spans.append((i, at, end))
            room -= end - at
            at = end
            if not room:
                yield spans
                spans, room = [], budget
    if spans:
        yield spans
