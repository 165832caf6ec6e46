"""Which prompts a round asks and how: shares of kinds and of greedy answers, and what is kept."""

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from slipstream import texts_maker
from slipstream.lab.prompts import load
from slipstream.texts_maker import Maker, Wish
from slipstream.train.quotes import shelf

SHELF = shelf()
CODE = {"quote", "brief", "task", "edit", "code"}
LOOP = [1, 2, 3] + [4, 5] * 60


@pytest.fixture
def maker(tmp_path, monkeypatch):
    """A maker whose target makes up one prompt for each it is asked, and answers in circles, or
    with `said`.
    """

    def made_up(_, count, *, openings, **__):
        return [[{"role": "user", "content": f"{openings[0]} {i}"}] for i in range(count)]

    monkeypatch.setattr(texts_maker, "self_prompts", made_up)

    said = []

    def generate(asked, params):
        assert len(asked) == len(params)
        return [SimpleNamespace(token_ids=said, text="a ```python\nx = 1\n``` b") for _ in asked]

    config = SimpleNamespace(max_context=8192)
    llm = SimpleNamespace(
        loaded=SimpleNamespace(config=config), encode=lambda _: [7, 8, 9], generate=generate
    )

    def make(answer=LOOP, **more):
        said[:] = answer
        sizes = {"tokens": 10, "max_tokens": 64, "minutes": None, "users": 64, "seed": 3}
        wish = Wish(target="t", out=tmp_path, device=None, **sizes, **more)
        return Maker(llm, wish, SHELF)

    return make


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_code_has_its_share(share, maker):
    asked = maker(code=share)._first(random.Random(1), 1000, 0)
    kinds = Counter(kind for kind, _ in asked)
    about = sum(kinds[kind] for kind in CODE)
    assert about / len(asked) == pytest.approx(share, abs=0.01)
    assert len(asked) == pytest.approx(880, abs=8)
    if share == 0.6:
        assert kinds["quote"] > kinds["brief"] > kinds["task"] > 0
        assert min(kinds[k] for k in ("edit", "prose", "doc", "chat", "code")) > 0


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_greedy_answers_have_their_share(share, maker):
    own, rng = maker(greedy=share), random.Random(0)
    params = [own._params(rng) for _ in range(2000)]
    found = Counter(p.temperature for p in params)
    assert found[0.0] / 2000 == pytest.approx(share, abs=0.03)
    if share < 1:
        assert found[0.2] == pytest.approx(2 * found[0.8], rel=0.2)
    assert len({p.seed for p in params}) == 2000


def test_a_round_is_the_same_again_and_its_loops_are_cut(maker):
    first, again = maker().round(0), maker().round(0)
    assert [t.kind for t in first] == [t.kind for t in again]
    assert all(len(t.tokens) == 3 + 3 + 32 for t in first)
    assert len(first) == pytest.approx(0.88 * 256, abs=6)  # nobody asks about a loop
    assert [t.kind for t in maker().round(1)] != [t.kind for t in first]


def test_answers_that_do_not_loop_are_asked_about(maker):
    texts = maker(answer=range(40)).round(0)
    assert all(len(t.tokens) == 3 + 40 for t in texts)
    assert len(texts) == pytest.approx(256, abs=6)
    assert {t.kind for t in texts[-20:]} == {"code"}  # what was said is short, and holds a block


def test_what_the_lab_asks_is_not_asked(maker):
    own = maker()
    lab = load("code", seed=0, count=3, count_tokens=len)
    prompt = [dict(m) for m in lab[0].messages]
    assert not own._fresh(prompt)
    hidden = " ".join(prompt[-1]["content"].split()[4:20])
    assert not own._fresh([{"role": "user", "content": f"Hello. {hidden} Thanks."}])
    assert own._fresh([{"role": "user", "content": "Explain how a hash map works."}])
    assert own._answers([("code", prompt)], random.Random(0)) == ([], [])


def test_many_users_have_prompts_made_up_for_four_rounds_at_once(maker, monkeypatch):
    asked, real = [], texts_maker.self_prompts

    def counted(llm, count, **more):
        asked.append(count)
        return real(llm, count, **more)

    monkeypatch.setattr(texts_maker, "self_prompts", counted)
    own = maker()
    texts = [own.round(turn) for turn in range(4)]
    assert len(asked) == 4  # own and long, chat and code
    assert sum(asked) > 100
    own.round(4)
    assert len(asked) == 8
    # Gone on with in the middle, a run makes what it would have made.
    again = maker().round(2)
    assert [(t.kind, *t.tokens) for t in again] == [(t.kind, *t.tokens) for t in texts[2]]
