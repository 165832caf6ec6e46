"""After any step the cache holds what a fresh prefill of the committed tokens would write."""

import pytest
import torch

from slipstream.cache.pages import PageTable
from slipstream.engine import LLM
from slipstream.models.tiny import tiny_model
from slipstream.target.target import ForwardRow, Target
from slipstream.types import SamplingParams

LOADED = tiny_model("qwen3")
PROMPTS = [[7, 8, 9, 7, 8, 9, 7, 8], [3, 4] * 9, list(range(40, 75))]


def fresh_cache(tokens):
    target = Target(LOADED, num_pages=16, page_size=16)
    table = PageTable(target.pool, expected_tokens=len(tokens))
    assert table.reserve(len(tokens))
    target.forward([ForwardRow(tokens, 0, table.pages, 0)])
    return target.read_cache(table.pages, len(tokens))


@pytest.mark.parametrize("drafter", ["none", "ngram:4,min=1", "suffix:6"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cache_equals_a_fresh_prefill_after_every_step(drafter, temperature):
    llm = LLM(LOADED, drafter=drafter, prefill_chunk=16, kv_tokens=2048)
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=5, ignore_eos=True)
    for prompt in PROMPTS:
        llm.engine.submit(prompt, params)
    rejected = 0
    while llm.engine.has_work:
        outputs = llm.engine.step()
        for row in llm.engine.scheduler.running:
            cached = llm.engine.target.read_cache(row.table.pages, row.computed)
            torch.testing.assert_close(
                cached, fresh_cache(row.tokens[: row.computed]), atol=1e-5, rtol=1e-5
            )
            assert not row.opened or row.computed == len(row.tokens) - 1
        for output in outputs:
            if output.completion:
                rejected += sum(r.drafted - r.accepted for r in output.completion.records)
    assert rejected > 0 or drafter == "none", "nothing was rejected: the test would prove nothing"
