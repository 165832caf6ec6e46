"""Training prompts around real code and documents: repeatable, distinct, well formed, and apart
from what drafters are measured with.
"""

import ast
import random
import re
from itertools import chain

import pytest

from slipstream.lab.prompts import load
from slipstream.texts_maker import lab_texts
from slipstream.train import orders, prompts, requests
from slipstream.train.changes import broken, change
from slipstream.train.overlap import Held
from slipstream.train.quotes import shelf
from slipstream.train.wording import lists, say

SHELF = shelf()
MAKERS = {
    "quote": lambda rng: requests.quoted(rng, SHELF),
    "edit": lambda rng: requests.edit(rng, SHELF),
    "prose": lambda rng: requests.document(rng, SHELF, size=rng.randint(400, 2000)),
    "brief": orders.brief,
    "task": orders.task,
    "code": prompts.code,
    "chat": prompts.chat,
}


def made(kind, count, seed=0):
    rng = random.Random(f"{kind}/{seed}")
    return [MAKERS[kind](rng)[-1]["content"] for _ in range(count)]


@pytest.mark.parametrize("kind", MAKERS)
def test_the_same_seed_makes_the_same_prompts_and_another_one_others(kind):
    first, again, other = made(kind, 40), made(kind, 40), made(kind, 40, seed=1)
    assert first == again
    assert len(set(first) & set(other)) < 10


@pytest.mark.parametrize(("kind", "least"), [("quote", 998), ("edit", 998), ("brief", 1000)])
def test_hardly_any_prompt_comes_twice(kind, least):
    assert len(set(made(kind, 1000))) >= least


def test_short_tasks_are_many_thousands():
    assert len(set(made("task", 5000))) > 4000


@pytest.mark.parametrize("kind", ["quote", "edit", "brief", "task", "prose"])
def test_prompts_are_well_formed(kind):
    for text in made(kind, 400):
        assert 20 < len(text) < 5000
        assert text == text.strip()
        assert "\n\n\n\n" not in text.split("```")[0]
        fences = [line for line in text.splitlines() if line.startswith("```")]
        assert kind == "prose" or len(fences) in (0, 2, 4)
        before = text.split("```")[0] if kind in ("quote", "brief", "task") else ""
        assert not re.search(r"\{(name|lang|other|noun|field|place|new|change|quote)\}", before)


def test_every_template_has_only_slots_that_are_known():
    rng = random.Random(0)
    own = {"name": "`f`", "new": "limit", "verb": "sorts", "goal": "sort"}
    for section, some in lists().items():
        keep = {"edit": ("change", "quote", "bare", "old", "new"), "task": ("error",)}
        for template in chain.from_iterable(some.values()):
            said = say(rng, template, own, keep=keep.get(section, ()))
            left = set(re.findall(r"\{(\w+)\}", said))
            assert left <= set(keep.get(section, ())), template
            assert not re.search(r"\[[^\]]*\|", said), template
    with pytest.raises(KeyError, match="nobody"):
        say(rng, "what {nobody} knows")


def test_long_requests_have_the_length_of_what_people_write():
    """The lab's, written by hand, have 1,200 characters; short ones are among ours on purpose."""
    lengths = sorted(map(len, made("quote", 1000)))
    assert lengths[100] > 250
    assert 500 < lengths[500] < 1200
    assert lengths[900] > 1200


def test_code_is_quoted_in_many_languages():
    tags = re.findall(r"^```(\w+)$", "\n".join(made("quote", 2000)), re.MULTILINE)
    share = tags.count("python") / len(tags)
    assert 0.4 < share < 0.75
    assert len(set(tags)) > 25


def test_quoted_python_is_whole():
    """What was not broken on purpose parses."""
    rng = random.Random(3)
    seen = 0
    for _ in range(300):
        quote = SHELF.code(rng)
        if quote.fence == "python":
            ast.parse(quote.text)
            assert quote.name in quote.text
            seen += 1
    assert seen > 150


def test_changes_are_of_what_is_there():
    rng = random.Random(1)
    own, kinds = lists()["edit"], set()
    for _ in range(400):
        text = SHELF.code(rng).text
        order = change(rng, text, own)
        for kind in ("rename", "number", "drop", "add"):
            for template in own[kind]:
                parts = re.split(r"\{old\}|\{new\}", template)
                if not all(part in order for part in parts):
                    continue
                found = re.fullmatch("(.+)".join(map(re.escape, parts)), order, re.DOTALL)
                if found and template.find("{old}") in range(len(template)):
                    names = re.findall(r"\{(old|new)\}", template)
                    old = found[names.index("old") + 1]
                    kinds.add(kind if old in text else "missing")
    assert {"rename", "number", "drop", "add"} <= kinds


def test_mistakes_are_small_and_real():
    rng = random.Random(2)
    differ = 0
    for _ in range(200):
        code = SHELF.code(rng).text
        bad = broken(rng, code)
        differ += bad != code
        assert abs(len(bad.splitlines()) - len(code.splitlines())) <= 1
    assert differ > 180
    assert broken(rng, "x = 1") == "x = 1"
    assert broken(rng, "if a < b:\n    c()") == "if a <= b:\n    c()"


def test_no_made_prompt_holds_eight_words_of_a_lab_prompt():
    """Quoted sources and templates alike, before anything is filtered."""
    held = Held(lab_texts())
    assert len(held) > 40_000
    for kind, count in {"quote": 1500, "edit": 800, "prose": 500}.items():
        assert not [text for text in made(kind, count) if held.shares(text)]
    for kind in ("brief", "task", "code", "chat"):
        assert not [text for text in made(kind, 1500) if held.shares(text)]


def test_what_the_lab_asks_is_found_in_any_shape():
    held = Held(lab_texts())
    for traffic in ("chat", "code", "edit"):
        for prompt in load(traffic, seed=3, count=20, count_tokens=len):
            if traffic == "edit" and not re.match(r"edit-\d", prompt.id):
                continue  # generated anew by every seed
            words = prompt.messages[-1]["content"].split()
            piece = " ".join(words[10:30]).upper()
            assert held.shares(f"My own words. {piece}\nand more of them.")
    assert held.shares("\n".join(words[:12]))
    assert not held.shares(
        "Write a function that adds two numbers, please, and nothing else today."
    )
    assert Held(["One two three."]).shares("one, two\nTHREE")
    assert not Held(["One two three."]).shares("one two three four")
