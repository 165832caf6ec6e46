"""The DSpark recipe: what is trained is what is served, it learns, and confidence ends drafts."""

import numpy as np
import pytest
import torch

from slipstream.drafters import dspark
from slipstream.engine import LLM
from slipstream.models.dspark import MARKOV, DSparkConfig
from slipstream.models.tiny import tiny_model
from slipstream.train.data import Features, own_answers, text_of
from slipstream.train.dflash import Shape, draft_config
from slipstream.train.dspark import DSparkNetwork
from slipstream.train.trainer import Plan, Trainer
from slipstream.types import SamplingParams

torch.set_num_threads(1)
LOADED = tiny_model("llama", layers=3)
GREEDY = SamplingParams(max_tokens=60, ignore_eos=True)
PROMPT = list(range(20, 30))


def network(markov="vanilla", **more):
    base = draft_config(LOADED.config, Shape(taps=2, block_size=7), mask_token_id=319)
    return DSparkNetwork(DSparkConfig(base, markov, rank=16, **more), LOADED.model, seed=1)


@pytest.mark.parametrize("markov", MARKOV)
def test_the_trained_network_is_the_served_one(tmp_path, markov, monkeypatch):
    net = network(markov)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in net.tensors.items():
        if "markov_w2" in name or "bias" in name:
            tensor.data = 0.3 * torch.randn(tensor.shape, generator=generator)
        tensor.data = tensor.data.bfloat16().float()  # what is saved
    net.save(tmp_path, net.tensors)
    served, real = [], dspark.choose

    def choose(lanes, logits, law, reduced):
        served.append(logits)
        return real(lanes, logits, law, reduced)

    monkeypatch.setattr(dspark, "choose", choose)
    arm = LLM(LOADED, drafter=f"dspark:{tmp_path}:7", prefill_chunk=16)
    (done,) = arm.generate([PROMPT * 4], GREEDY)
    tokens = [*PROMPT * 4, *done.token_ids]
    drafts = [r for r in done.records if r.drafted]
    with torch.no_grad():
        starts = np.array([[r.depth - 1 for r in drafts]])
        batch = Features(LOADED, net.needs, longest=200).batch([text_of(tokens, [])], starts)
        (trained,) = net.logits(batch)
    at = compared = 0
    for record, expected in zip(drafts, trained, strict=True):
        for k in range(min(record.drafted, record.accepted + 1)):
            torch.testing.assert_close(served[at + k][0], expected[k], atol=2e-3, rtol=1e-3)
            compared += 1
        at += record.drafted
    assert at == len(served)
    assert compared > 40


@pytest.mark.parametrize("markov", MARKOV)
def test_one_text_is_learned_and_confidence_knows_it(tmp_path, markov):
    llm = LLM(LOADED)
    answer = SamplingParams(max_tokens=30, ignore_eos=True)
    texts = own_answers(llm, [PROMPT], answer)
    plan = Plan(steps=200, batch=1, anchors=28, lr=5e-3, held_out=0, reports=2)
    trainer = Trainer(LOADED, network(markov), texts, plan, out=tmp_path, say=lambda _: None)
    trainer.run()
    assert trainer.acceptance().tokens_per_step > 7.5
    (done,) = llm.fork(f"dspark:{tmp_path}:7").generate([PROMPT], answer)
    assert [*PROMPT, *done.token_ids] == texts[0].tokens.tolist()
    drafts = [r for r in done.records if r.drafted == 7]
    assert sum(r.accepted for r in drafts) > 6 * len(drafts)
    # A text it has never seen: with `stop` it drafts less, and the tokens are the same.
    other = [list(range(100, 140))]
    plain = llm.generate(other, GREEDY)[0]
    (free,) = llm.fork(f"dspark:{tmp_path}:7").generate(other, GREEDY)
    (stopping,) = llm.fork(f"dspark:{tmp_path}:7,stop=0.9").generate(other, GREEDY)
    assert free.token_ids == stopping.token_ids == plain.token_ids
    assert sum(r.drafted for r in stopping.records) < sum(r.drafted for r in free.records)


def test_without_a_confidence_head(tmp_path):
    net = network(confident=False)
    assert not any("confidence" in name for name in net.shapes)
    net.save(tmp_path, net.tensors)
    llm = LLM(LOADED)
    expected = llm.generate([PROMPT], GREEDY)[0].token_ids
    arm = llm.fork(f"dspark:{tmp_path}:5,stop=0.5")
    assert arm.generate([PROMPT], GREEDY)[0].token_ids == expected
