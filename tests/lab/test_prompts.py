"""Prompts: enough of them, all different, reproducible, and saying what they claim to say."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest

from slipstream.errors import InvalidConfig
from slipstream.lab.prompts import (
    Prompt,
    check_json,
    copy_overlap,
    edits,
    from_file,
    json_tasks,
    load,
    needle,
    pool,
    with_salt,
)
from slipstream.lab.prompts.chronicle import STYLES, Chronicle, say_date
from slipstream.lab.prompts.documents import document, document_prompt
from slipstream.lab.prompts.edits import edit_prompts


def count_tokens(text: str) -> int:
    """Words, digits, marks and line ends: near the SmolLM2 tokenizer's count."""
    return len(re.findall(r"[A-Za-z]+|\d|[^\w\s]|\n+|[ ]{2,}|_", text))


def grams(text: str, size: int) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + size]) for i in range(len(words) - size + 1)}


def jaccard(a: str, b: str, size: int = 8) -> float:
    left, right = grams(a, size), grams(b, size)
    return len(left & right) / len(left | right)


# --- chat and code ------------------------------------------------------------------------------


@pytest.mark.parametrize("traffic", ["chat", "code"])
def test_pools_hold_enough_prompts_of_the_promised_length(traffic: str) -> None:
    prompts = pool(traffic)
    assert len(prompts) >= 48
    assert [p.id for p in prompts] == [f"{traffic}-{i:03d}" for i in range(1, len(prompts) + 1)]
    for prompt in prompts:
        assert 140 <= count_tokens(prompt.content()) <= 520, prompt.id
        assert prompt.messages is not None
        assert prompt.messages[-1]["role"] == "user"


def test_no_two_written_prompts_are_alike() -> None:
    texts = [p.content() for traffic in ("chat", "code") for p in pool(traffic)]
    sets = [grams(text, 8) for text in texts]
    worst = max(len(a & b) / len(a | b) for a, b in itertools.combinations(sets, 2))
    assert worst < 0.02
    openings = {" ".join(text.split()[:6]) for text in texts}
    assert len(openings) == len(texts)


def test_pools_are_varied() -> None:
    chat = pool("chat")
    assert sum(len(p.messages or ()) > 1 for p in chat) >= 4
    code = "\n".join(p.content() for p in pool("code"))
    fences = set(re.findall(r"```(\w+)", code))
    assert len(fences) >= 10
    assert sum("```" in p.content() for p in pool("code")) >= 30


@pytest.mark.parametrize("traffic", ["chat", "code", "edit", "doc"])
def test_load_is_a_function_of_the_seed(traffic: str) -> None:
    tokens = 600 if traffic == "doc" else None

    def get(seed: int) -> list[Prompt]:
        return load(traffic, seed=seed, count=9, tokens=tokens, count_tokens=count_tokens)

    assert get(3) == get(3)
    assert get(3) != get(4)
    assert len({p.id for p in get(3)}) == 9
    assert len({p.content() for p in get(3)}) == 9


def test_load_refuses_what_it_cannot_do() -> None:
    with pytest.raises(InvalidConfig, match="chat, code, doc, edit"):
        load("chats", seed=1, count=1, count_tokens=count_tokens)
    with pytest.raises(InvalidConfig, match="1000 code prompts"):
        load("code", seed=1, count=1000, count_tokens=count_tokens)
    with pytest.raises(InvalidConfig, match="set tokens"):
        load("doc", seed=1, count=1, count_tokens=count_tokens)
    with pytest.raises(InvalidConfig, match="applies to doc only"):
        load("chat", seed=1, count=1, tokens=500, count_tokens=count_tokens)
    with pytest.raises(InvalidConfig, match="count is 0"):
        load("chat", seed=1, count=0, count_tokens=count_tokens)
    with pytest.raises(InvalidConfig, match="shortest is 300"):
        load("doc", seed=1, count=1, tokens=299, count_tokens=count_tokens)


# --- documents ----------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [300, 555, 1000, 3000, 8000])
@pytest.mark.parametrize("style", STYLES)
def test_document_reaches_the_length(style: str, tokens: int) -> None:
    prompt = document_prompt(
        seed=11, index=tokens, tokens=tokens, count_tokens=count_tokens, style=style
    )
    assert 0.98 * tokens <= count_tokens(prompt.content()) <= tokens


def test_length_holds_for_a_tokenizer_whose_counts_do_not_add_up() -> None:
    def sticky(text: str) -> int:
        return len(text) // 4 + text.count("\n\n") * 3 + 5

    for tokens in (400, 2500):
        prompt = document_prompt(seed=2, index=0, tokens=tokens, count_tokens=sticky)
        assert 0.98 * tokens <= sticky(prompt.content()) <= tokens


@pytest.mark.parametrize("style", STYLES)
def test_document_is_not_degenerate(style: str) -> None:
    text = document(rng=random.Random(5), tokens=6000, count_tokens=count_tokens, style=style)
    words = text.split()
    bigrams = list(itertools.pairwise(words))
    assert len(set(bigrams)) / len(bigrams) > 0.35
    assert "{" not in text
    assert "[" not in text
    assert "|" not in text
    assert not re.search(r"\b[Aa] [aeio][a-z]{3}", text.replace("a one", ""))


@pytest.mark.parametrize("style", STYLES)
def test_two_seeds_share_little_text(style: str) -> None:
    texts = [
        document(rng=random.Random(s), tokens=4000, count_tokens=count_tokens, style=style)
        for s in (1, 2)
    ]
    assert jaccard(texts[0], texts[1]) < 0.12


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("seed", range(4))
def test_document_agrees_with_itself(style: str, seed: int) -> None:
    chronicle = Chronicle(style, random.Random(seed))
    sections = [chronicle.section() for _ in range(80)]
    assert [int(s.heading.split(".")[0]) for s in sections] == list(range(1, 81))

    left: dict[str, int] = {}
    for level in chronicle.levels:
        assert level.sentence in sections[level.section - 1].text()
        assert f"{level.left:,}" in level.sentence
        assert f"{abs(level.change):,}" in level.sentence
        assert left.get(level.stock.name, level.stock.start) + level.change == level.left
        assert level.left > 0
        left[level.stock.name] = level.left
    days = [level.day for level in chronicle.levels]
    assert days == sorted(days)

    solved = [p for p in chronicle.problems if p.closed is not None]
    assert solved
    for problem in solved:
        assert problem.closed is not None
        assert problem.closed > problem.opened
        assert problem.text.lower() in sections[problem.opened - 1].text().lower()
        assert problem.remedy in sections[problem.closed - 1].text()


@pytest.mark.parametrize("style", STYLES)
def test_cross_references_point_back_to_true_statements(style: str) -> None:
    chronicle = Chronicle(style, random.Random(9))
    sections = [chronicle.section() for _ in range(60)]
    found = 0
    pattern = re.compile(r"(?:section|entry|chapter) (\d+)[^.]*? on (\d+ [A-Z]\w+ \d{4})", re.I)
    said = {(level.section, say_date(level.day)) for level in chronicle.levels}
    for section in sections:
        here = int(section.heading.split(".")[0])
        for match in pattern.finditer(section.text()):
            found += 1
            assert int(match[1]) < here
            assert (int(match[1]), match[2]) in said
    assert found >= 5


def test_people_keep_their_roles() -> None:
    chronicle = Chronicle("voyage", random.Random(3))
    text = " ".join(chronicle.section().text() for _ in range(60))
    roles = re.findall(r"[Tt]he (captain|first mate|cook|surgeon) ([A-Z]\w+ [A-Z]\w+)", text)
    assert len({name for _, name in roles}) == len(roles) >= 3


def test_document_questions_vary_and_quotes_can_be_answered() -> None:
    questions = set()
    for seed in range(24):
        text = document_prompt(seed=seed, index=0, tokens=1500, count_tokens=count_tokens).content()
        body, question = text.rsplit("\n\n---\n", 1)
        questions.add(question.split()[0])
        if quote := re.search(r"section (\d+) that says how much .* on (\d+ \w+ \d+)\.", question):
            assert re.search(rf"^{quote[1]}\. .*{quote[2]}", body, re.M)
        if retell := re.search(r"Retell section (\d+)", question):
            assert re.search(rf"^{retell[1]}\. ", body, re.M)
    assert len(questions) == 4


# --- edits --------------------------------------------------------------------------------------


def test_every_written_change_can_be_made() -> None:
    records = [
        json.loads(line)
        for line in (Path(edits.__file__).with_name("edits.jsonl")).read_text().splitlines()
    ]
    assert len(records) >= 24
    for record in records:
        assert 120 <= count_tokens(record["text"]) <= 400, record["id"]
        assert "{new}" not in record["text"]
        assert len(record["changes"]) == 3
        for change in record["changes"]:
            assert ("{new}" in change["instruction"]) == bool(change["new"])
            before = change["instruction"].split("{new}")[0]
            old = re.search(r"""["'`]([^"'`]+)["'`]|(?<=from )(\d+|info)|LIMIT \d+""", before)
            assert old is not None, (record["id"], change)
            assert (old[1] or old[0]) in record["text"], (record["id"], change)
            taken = set(re.findall(r"\w+", record["text"])) if "ename" in before else set()
            assert taken.isdisjoint(change["new"]), (record["id"], change)


def test_edits_never_run_out_and_never_repeat() -> None:
    prompts = edit_prompts(seed=1, count=200)
    assert len({p.id for p in prompts}) == 200
    assert len({p.content() for p in prompts}) == 200
    for prompt in prompts:
        assert prompt.source in prompt.content()
        assert 80 <= count_tokens(prompt.source) <= 480, prompt.id
    generated = [p for p in prompts if p.id.split("-")[1] in STYLES]
    assert 30 < len(generated) < 170
    for prompt in generated:
        old = re.search(r'Replace "(\w+)" with "(\w+)"', prompt.content())
        assert old is not None
        assert old[1] in prompt.source
        assert old[2] not in prompt.source


def test_copy_overlap_counts_words_in_runs_of_four() -> None:
    source = "one two three four five six seven eight"
    assert copy_overlap(source, source) == 1.0
    assert copy_overlap(source, "one two three X five six seven eight") == 0.5
    assert copy_overlap(source, "one two three X") == 0.0
    assert copy_overlap(source, "eight seven six five four") == 0.0
    assert copy_overlap(source, "") == 0.0
    assert copy_overlap("a b", "a b") == 0.0


# --- gates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [400, 700, 1500, 4000])
@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_needle_lies_at_its_depth(length: int, depth: float) -> None:
    prompt, answer = needle(length=length, depth=depth, seed=2, count_tokens=count_tokens)
    text = prompt.content()
    assert 0.98 * length <= count_tokens(text) <= length
    body, question = text.rsplit("\n\n", 1)
    assert answer not in question
    assert body.count(answer) == 1
    place = body.index(answer) / len(body)
    assert abs(place - depth) < 0.3
    assert (prompt, answer) == needle(length=length, depth=depth, seed=2, count_tokens=count_tokens)


def test_needle_seeds_differ_and_bad_values_are_refused() -> None:
    answers = {
        needle(length=500, depth=0.5, seed=s, count_tokens=count_tokens)[1] for s in range(8)
    }
    assert len(answers) > 5
    with pytest.raises(InvalidConfig, match=r"depth is 1\.5"):
        needle(length=500, depth=1.5, seed=0, count_tokens=count_tokens)
    with pytest.raises(InvalidConfig, match="length is 100"):
        needle(length=100, depth=0.5, seed=0, count_tokens=count_tokens)


def test_json_tasks_name_their_keys_and_can_be_answered() -> None:
    tasks = json_tasks(seed=4, count=30)
    assert tasks == json_tasks(seed=4, count=30)
    assert len({p.id for p, _ in tasks}) == 30
    sample: dict[str, object] = {
        "string": "x",
        "integer": 3,
        "number": 1.5,
        "boolean": True,
        "array": ["a", "b"],
    }
    for prompt, schema in tasks:
        good = {key: sample[kind["type"]] for key, kind in schema["properties"].items()}
        assert check_json(json.dumps(good), schema)
        for key in schema["required"]:
            assert f'"{key}"' in prompt.content()
            assert not check_json(json.dumps({k: v for k, v in good.items() if k != key}), schema)
            assert not check_json(json.dumps({**good, key: {}}), schema)


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"name": "Ada", "age": 3}', True),
        ('  {"name": "Ada", "age": 3, "more": null}\n', True),
        ('```json\n{"name": "Ada", "age": 3}\n```', True),
        ('```\n{"name": "Ada", "age": 3}\n```\n', True),
        ('Here it is: {"name": "Ada", "age": 3}', False),
        ('{"name": "Ada", "age": 3', False),
        ('{"name": "Ada", "age": "3"}', False),
        ('{"name": "Ada", "age": true}', False),
        ('{"name": "Ada", "age": 3.5}', False),
        ('{"name": 7, "age": 3}', False),
        ('[{"name": "Ada", "age": 3}]', False),
        ("{'name': 'Ada', 'age': 3}", False),
        ('{"name": "Ada", "age": NaN}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_check_json(text: str, ok: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    assert check_json(text, schema) is ok


# --- a user's own file, and the salt ------------------------------------------------------------


def test_from_file_reads_the_three_shapes(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(
        '\ufeff{"messages": [{"role": "user", "content": "hi\u2028there"}], "id": "a"}\n'
        "\n"
        '{"prompt": "Once upon"}\r\n'
        '{"text": "a time"}',
        encoding="utf-8",
    )
    first, second, third = from_file(path)
    assert first == Prompt("a", ({"role": "user", "content": "hi\u2028there"},))
    assert second == Prompt("mine.jsonl:3", None, text="Once upon")
    assert third.text == "a time"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "x"', "invalid JSON"),
        ("[1]", "list found"),
        ('{"prompt": "x", "temprature": 1}', "'temprature'"),
        ('{"prompt": "x", "text": "y"}', "prompt and text"),
        ('{"id": "x"}', "found none"),
        ('{"prompt": "  "}', "non-empty string"),
        ('{"prompt": 5}', "prompt is 5"),
        ('{"prompt": "x", "id": 3}', "id is 3"),
        ('{"messages": []}', "non-empty list"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\]"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "'robot'"),
        ('{"messages": [{"role": "user", "content": ""}]}', "content is ''"),
    ],
)
def test_from_file_names_the_line(tmp_path: Path, line: str, complaint: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InvalidConfig, match=complaint) as caught:
        from_file(path)
    assert f"{path}:2" in str(caught.value)


def test_from_file_refuses_files_that_hold_nothing(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    with pytest.raises(InvalidConfig, match="cannot be read"):
        from_file(path)
    path.write_text("\n  \n", encoding="utf-8")
    with pytest.raises(InvalidConfig, match="holds no prompts"):
        from_file(path)
    path.write_bytes(b'{"prompt": "\xff\xfe"}')
    with pytest.raises(InvalidConfig, match="UTF-8"):
        from_file(path)
    path.write_text('{"id": "a", "text": "x"}\n{"id": "a", "text": "y"}\n', encoding="utf-8")
    with pytest.raises(InvalidConfig, match="used on line 1"):
        from_file(path)


def test_salt_comes_first_and_changes_nothing_else() -> None:
    chat = next(p for p in pool("chat") if p.messages and p.messages[0]["role"] == "system")
    salted = with_salt(chat, "7f3a91")
    assert salted.content() == "[ticket 7f3a91]\n" + chat.content()
    assert salted.id == chat.id
    assert [m["role"] for m in salted.messages or ()] == [m["role"] for m in chat.messages or ()]
    plain = with_salt(Prompt("x", None, text="hello"), "00")
    assert plain.text == "[ticket 00]\nhello"
    edit = edit_prompts(seed=0, count=1)[0]
    assert with_salt(edit, "1").source == edit.source
    for bad in ("", " ", "a\nb"):
        with pytest.raises(InvalidConfig, match="salt"):
            with_salt(chat, bad)
