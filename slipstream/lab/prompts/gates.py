"""Tasks whose answers can be checked: a needle in a long text, and small JSON objects."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidConfig
from slipstream.lab.prompts.chronicle import words
from slipstream.lab.prompts.documents import document
from slipstream.lab.prompts.grammar import Deck
from slipstream.lab.prompts.prompt import CountTokens, Prompt, user_prompt

Schema = dict[str, Any]

_SCALARS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (),
}
_SAY_TYPE = {
    "string": "a string",
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "array": "a list of strings",
}


def needle(
    *, length: int, depth: float, seed: int, count_tokens: CountTokens
) -> tuple[Prompt, str]:
    """A text of `length` tokens that holds one fact, a question about it, and the answer.

    The prompt (text, fact and question) has `length` tokens to within 2 % below. `depth` 0 puts the
    fact before everything else, 1 after it. An answer passes if it contains the returned string.
    Raises `InvalidConfig` for a depth outside 0 to 1 or a length below 400.
    """
    if not 0 <= depth <= 1:
        raise InvalidConfig(f"The needle depth is {depth}; it must be between 0 and 1.")
    if length < 400:
        raise InvalidConfig(f"The needle length is {length}; the shortest is 400 tokens.")
    rng = random.Random(f"needle/{seed}/{length}/{depth}")
    name = f"{rng.choice(words('keepers'))} {rng.choice(words('kept'))}"
    answer = str(rng.randint(1000, 9999))
    fact = f"The access code for the {name} is {answer}."
    question = f"What is the access code for the {name}?"
    tail = f"\n\n{question}"
    room = length - count_tokens(fact + "\n\n" + tail) - 2
    lines = document(rng=rng, tokens=room, count_tokens=count_tokens).split("\n\n")
    lines.insert(round(depth * len(lines)), fact)
    prompt = user_prompt(f"needle-{length}-{depth:g}-{seed}", "\n\n".join(lines) + tail)
    return prompt, answer


def json_tasks(*, seed: int, count: int) -> list[tuple[Prompt, Schema]]:
    """`count` requests for a small JSON object, each with the JSON schema it must satisfy."""
    rng = random.Random(f"json/{seed}")
    deck = Deck(list(_json_records()), rng)
    return [_json_task(deck.draw(), rng, f"json-{seed}-{index}") for index in range(count)]


@cache
def _json_records() -> tuple[dict[str, Any], ...]:
    lines = Path(__file__).with_name("json_tasks.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(json.loads(line) for line in lines)


def _json_task(record: dict[str, Any], rng: random.Random, prompt_id: str) -> tuple[Prompt, Schema]:
    fact = record["fact"].format(
        first=rng.choice(words("first")),
        last=rng.choice(words("last")),
        town=rng.choice(words("place heads")) + rng.choice(words("place tails")),
        word=rng.choice(words("keepers")),
        n1=rng.randint(*record["number"]),
    )
    keys: dict[str, str] = record["keys"]
    properties: dict[str, Schema] = {key: {"type": kind} for key, kind in keys.items()}
    for kind in properties.values():
        if kind["type"] == "array":
            kind["items"] = {"type": "string"}
    schema = {"type": "object", "properties": properties, "required": list(keys)}
    messages = (*_JSON_EXAMPLE, {"role": "user", "content": _ask_json(fact, keys)})
    return Prompt(prompt_id, messages), schema


def _ask_json(fact: str, keys: dict[str, str]) -> str:
    listed = ", ".join(f'"{key}" ({_SAY_TYPE[kind]})' for key, kind in keys.items())
    return (
        f"{fact}\n\nWrite this as one JSON object with the keys {listed}. "
        "Answer with the JSON object and nothing else."
    )


# A small model asked without an example talks on after the object.
_JSON_EXAMPLE = (
    {
        "role": "user",
        "content": _ask_json(
            "The blue sofa costs 350 euros and is not sold. It comes in wool or linen.",
            {"item": "string", "euros": "number", "sold": "boolean", "fabrics": "array"},
        ),
    },
    {
        "role": "assistant",
        "content": '{"item": "sofa", "euros": 350, "sold": false, "fabrics": ["wool", "linen"]}',
    },
)


def check_json(text: str, schema: Schema) -> bool:
    """True if `text` is one JSON object with every required key, of the right types.

    A Markdown code fence around the object is tolerated, other words around it are not. Keys that
    the schema does not name are allowed.
    """
    fenced = re.fullmatch(r"\s*```[a-zA-Z]*\n(.*?)```\s*", text, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return False
    return _matches(value, schema)


def _matches(value: Any, schema: Schema) -> bool:
    kind = schema["type"]
    if kind == "array":
        return isinstance(value, list) and all(_matches(item, schema["items"]) for item in value)
    if kind == "object":
        fields = schema["properties"]
        return (
            isinstance(value, dict)
            and all(key in value for key in schema["required"])
            and all(_matches(value[key], fields[key]) for key in fields if key in value)
        )
    if isinstance(value, bool):  # a bool is an int to Python, not to JSON
        return bool(kind == "boolean")
    return isinstance(value, _SCALARS[kind])
