"""Training texts: prompts, answered by the target itself, and the features it sees them with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.cache.pages import PageTable
from slipstream.engine.llm import LLM, Prompt
from slipstream.errors import InvalidConfig
from slipstream.models.loading import LoadedModel
from slipstream.target.target import ForwardRow, Target
from slipstream.types import SamplingParams

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and the target's answer. Drafters learn the tokens from `prompt_len` on."""

    tokens: tuple[int, ...]
    prompt_len: int


def own_answers(llm: LLM, prompts: Sequence[Prompt], params: SamplingParams) -> list[Text]:
    """The target's answers, each with a seed of its own; answers under two tokens are left out.

    A drafter learns to say what its target would say, so the target has to be asked.
    """
    ids = [llm.encode(p) for p in prompts]
    first = params.seed or 0
    each = [replace(params, seed=first + i) for i in range(len(ids))]
    done = llm.generate(list(ids), each)
    texts = [
        Text((*prompt, *answer.token_ids), len(prompt))
        for prompt, answer in zip(ids, done, strict=True)
        if len(answer.token_ids) > 1
    ]
    if not texts:
        raise InvalidConfig("No prompt got an answer of two tokens or more; nothing to train on.")
    return texts


def self_prompts(llm: LLM, count: int, *, seed: int) -> list[Prompt]:
    """User messages the target makes up when it is given the beginning of its chat template.

    Source of the idea: Magpie (arXiv 2406.08464). Messages under four words, or over half of the
    context, are asked for again, up to five times as many as wanted.
    """
    if not llm.tokenizer.chat_template:
        raise InvalidConfig(f"{llm.loaded.name} has no chat template; give a file of prompts.")
    marker = "SLIPSTREAM"
    text = llm.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    head, _, tail = text.partition(marker)
    begin = list(llm.tokenizer(head, add_special_tokens=False).input_ids)
    stop = tail.strip().split("\n")[0][:32]
    found: list[Prompt] = []
    for turn in range(5):
        params = [
            SamplingParams(
                max_tokens=160,
                temperature=1.0,
                top_p=0.95,
                seed=seed + turn * count + i,
                stop=(stop,),
            )
            for i in range(count)
        ]
        for answer in llm.generate([begin] * count, params):
            message: Prompt = [{"role": "user", "content": answer.text.strip()}]
            fits = len(llm.encode(message)) <= llm.loaded.config.max_context // 2
            if fits and len(answer.text.split()) >= 4 and len(found) < count:
                found.append(message)
        if len(found) == count:
            break
    if not found:
        raise InvalidConfig(f"{llm.loaded.name} made up no prompt; give a file of prompts.")
    return found


class Features:
    """Runs the target over whole texts and returns its hidden states at `taps`."""

    def __init__(self, loaded: LoadedModel, taps: tuple[int, ...], *, longest: int) -> None:
        self._target = Target(loaded, num_pages=-(-longest // 16), taps=taps)

    def of(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, taps, hidden], detached, in the model's dtype."""
        table = PageTable(self._target.pool, expected_tokens=len(tokens))
        if not table.reserve(len(tokens)):
            raise InvalidConfig(f"A text of {len(tokens)} tokens is longer than was planned for.")
        parts = []
        for start in range(0, len(tokens), _CHUNK):
            chunk = list(tokens[start : start + _CHUNK])
            features = self._target.forward([ForwardRow(chunk, start, table.pages, 1)]).features
            assert features is not None
            parts.append(features)
        table.release()
        return torch.cat(parts).clone()
