"""Suffix decoding on the device follows the host's rule, in Triton's interpreter."""

import tests.interpreter  # noqa: F401, I001  first: it turns the interpreter on

import numpy as np
import pytest
import torch

from slipstream.drafters import suffix_device
from slipstream.drafters.automaton import SuffixAutomaton
from slipstream.drafters.suffix import SuffixRules, walk
from slipstream.drafters.suffix_device import DeviceSuffix

CPU = torch.device("cpu")
RULES = [
    SuffixRules(min_prob=0.2, factor=1.5, depth=16),
    SuffixRules(min_prob=0.5, factor=8.0, depth=4),
    SuffixRules(min_prob=0.0, factor=0.4, depth=24),
]


def expected(text, draft, rules):
    """Expected accepted tokens of a draft by the rule of the host: the best over match lengths.

    None if no match length allows the draft.
    """
    best = None
    for matched in range(1, min(rules.depth, len(text) - 1) + 1):
        ending = text[-matched:]
        places = [i for i in range(matched, len(text)) if text[i - matched : i] == ending]
        if not places or len(draft) > max(1, int(rules.factor * matched)):
            continue
        seen = [sum(text[i : i + n] == draft[:n] for i in places) for n in range(1, len(draft) + 1)]
        if all(n and n >= rules.min_prob * len(places) for n in seen):
            score = sum(seen) / len(places)
            best = score if best is None else max(best, score)
    return best


def drafted(texts, rules, draft_len, *, capacity):
    """Drafts of all texts and of a row that is nobody's, slots in any order; launched twice."""
    rng = np.random.default_rng(0)
    rows = len(texts) + 1
    tokens = torch.from_numpy(rng.integers(0, 3, (rows, capacity))).int()
    lengths = torch.zeros(rows, dtype=torch.int32)
    order = rng.permutation(len(texts))
    for slot, text in zip(order, texts):
        tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        lengths[slot] = len(text)
    slot_of = torch.tensor([*order, rows - 1], dtype=torch.int32)
    form = DeviceSuffix(
        rows,
        draft_len,
        min_prob=rules.min_prob,
        factor=rules.factor,
        depth=rules.depth,
        device=CPU,
    )
    drafts = torch.full((rows, draft_len), -7, dtype=torch.int32)
    counts = torch.full((rows,), -7, dtype=torch.int32)
    found = []
    for _ in range(2):  # the second finds what the first left behind
        form.find(tokens, lengths, slot_of, drafts=drafts, counts=counts)
        found.append([drafts[i, :n].tolist() for i, n in enumerate(counts.tolist())])
    assert found[0] == found[1]
    assert found[0].pop() == []
    return found[0]


def on_host(text, rules, draft_len):
    automaton = SuffixAutomaton(rules.depth + draft_len)
    automaton.extend(text)
    return walk(automaton, automaton.current, draft_len, ends=1, rules=rules)


def some_texts(alphabet):
    rng = np.random.default_rng(alphabet)
    texts = [rng.integers(0, alphabet, n).tolist() for n in (1, 2, 3, 5, 20, 60, 120)]
    for n in (30, 80):  # long matches, one of them with two ways to go on
        text = rng.integers(0, 10**6, n).tolist()
        texts.append(text + text[: n // 2])
        texts.append(text + text[:8] + [1, 2, 3] + text[:8] + [1, 2, 4] + text[:8])
    return texts


@pytest.mark.parametrize("rules", RULES, ids=lambda r: f"{r.min_prob}-{r.factor}-{r.depth}")
@pytest.mark.parametrize("alphabet", [2, 6, 40])
def test_a_draft_promises_no_less_than_the_hosts(rules, alphabet):
    texts = some_texts(alphabet)
    for text, draft in zip(texts, drafted(texts, rules, 8, capacity=140), strict=True):
        host = on_host(text, rules, 8)
        if not draft:
            assert host.tokens == [], text
            continue
        promised = expected(text, draft, rules)
        assert promised is not None, (text, draft)
        # The host stops at a walk that is all but sure (`_ENOUGH`), here all are compared.
        assert promised >= host.score - 1e-4, (text, draft, host)


def test_where_one_way_is_best_both_take_it():
    rules, rng = RULES[0], np.random.default_rng(3)
    text = rng.integers(0, 10**6, 60).tolist()
    copied = text + text[10:20]
    assert drafted([copied], rules, 8, capacity=80) == [text[20:28]]
    assert on_host(copied, rules, 8).tokens == text[20:28]


def test_a_loop_of_many_occurrences_keeps_the_most_recent(monkeypatch):
    monkeypatch.setattr(suffix_device, "CHUNK", 64)
    rules = RULES[0]
    loop = [5, 6, 7] * 80
    (draft,) = drafted([loop], rules, 8, capacity=260)
    assert draft == [5, 6, 7, 5, 6, 7, 5, 6]
    # 240 old occurrences go on with 8, the last 140 with 9: what is recent is looked at.
    changed = [3, 8] * 240 + [3, 9] * 140 + [3]
    (draft,) = drafted([changed], SuffixRules(min_prob=0.2, factor=1.0, depth=1), 4, capacity=800)
    assert draft == [9]


def test_texts_longer_than_a_chunk(monkeypatch):
    monkeypatch.setattr(suffix_device, "CHUNK", 64)
    rng = np.random.default_rng(1)
    texts = []
    for n in (63, 64, 65, 127, 128, 129, 300):
        text = rng.integers(0, 10**6, n).tolist()
        texts.append(text + text[5:15])
    drafts = drafted(texts, RULES[0], 8, capacity=320)
    assert drafts == [t[15:23] for t in texts]
