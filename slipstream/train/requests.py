"""Training prompts around what people wrote: questions about pasted code and documents, and edits.

Composed of the lists in `requests.toml`; the same generator state makes the same prompt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from slipstream.train.changes import broken, change
from slipstream.train.pieces import without_docstring
from slipstream.train.quotes import Quote, Shelf
from slipstream.train.wording import Message, listed, lists, put, say, user

_EDITED = 900
"""Characters of what is to be returned whole: more would not fit into an answer."""
_SHOWN = {
    "js": "JavaScript", "jsx": "React", "ts": "TypeScript", "tsx": "React", "cpp": "C++", "c": "C",
    "csharp": "C#", "php": "PHP", "sql": "SQL", "css": "CSS", "html": "HTML", "cmake": "CMake",
    "r": "R", "powershell": "PowerShell",
}  # fmt: skip
"""Languages whose name is more than the tag with a capital."""


def quoted(rng: random.Random, shelf: Shelf) -> list[Message]:
    """A question about code, or one time in six about data, that somebody pasted."""
    if rng.random() < 1 / 6:
        return _about(rng, shelf.data(rng), lists()["ask"]["data"], sort="data")
    quote = shelf.code(rng)
    if quote.fence == "python" and rng.random() < 0.4:
        quote = Quote(without_docstring(quote.text), "code", "python", quote.name)
    what = rng.choice(_WHAT)
    complaint = ""
    if what == "bug":
        if rng.random() < 0.7:
            quote = Quote(broken(rng, quote.text), "code", quote.fence, quote.name)
        complaint = say(rng, rng.choice(lists()["before"]["complaint"]))
    if quote.fence != "python":
        what = {"types": "refactor", "tests": "other_tests"}.get(what, what)
    return _about(rng, quote, lists()["ask"][what], sort="code", complaint=complaint)


def document(rng: random.Random, shelf: Shelf, *, size: int) -> list[Message]:
    """A question about at most `size` characters of prose."""
    return _about(rng, shelf.document(rng, size=size), lists()["ask"]["prose"], sort="prose")


def edit(rng: random.Random, shelf: Shelf) -> list[Message]:
    """An order to return code, data or prose with one thing changed."""
    draw = rng.choice((shelf.code, shelf.code, shelf.data, _prose(shelf)))
    quote = draw(rng)
    while len(quote.text) > _EDITED:
        quote = draw(rng)
    own = lists()["edit"]
    order = say(rng, rng.choice(own["order"]), keep=("change", "quote", "bare"))
    done = change(rng, quote.text, own)
    return user(put(order, change=done, quote=_block(rng, quote), bare=quote.text))


_WHAT = (
    "explain", "explain", "bug", "bug", "bug", "types", "tests", "tests", "refactor", "refactor",
    "convert", "convert", "document", "parameter", "review", "review", "similar", "speed", "errors",
)  # fmt: skip
"""Kinds of request, as often as people seem to make them."""
_LEADS = ("Please note:", "Conditions:", "What I need:", "Some wishes:", "")
_NEW = (
    "limit", "verbose", "default", "strict", "timeout", "encoding", "key", "reverse", "dry_run",
    "start", "prefix", "logger", "max_items", "locale", "retries", "callback",
)  # fmt: skip


def _about(
    rng: random.Random, quote: Quote, asks: list[str], *, sort: str, complaint: str = ""
) -> list[Message]:
    """Short ones ask and quote; long ones tell a story, ask several things and make conditions."""
    lang = _SHOWN.get(quote.fence, quote.fence.capitalize())
    name = f"`{quote.name}`" if quote.name and rng.random() < 0.8 else "this code"
    words = {"name": name, "new": rng.choice(_NEW)} | ({"lang": lang} if lang else {})
    pick = _picker(rng, words)
    block = _block(rng, quote)
    ask = pick(asks, 1)
    if rng.random() < 0.2:
        first = f"{complaint} {ask}".strip()
        return user(f"{first}\n\n{block}" if rng.random() < 0.7 else f"{block}\n\n{first}")
    opening = f"{pick(lists()['before'][sort], 1)} {complaint}".strip()
    if sort == "code" and rng.random() < 0.6:
        others = lists()["ask"]
        further = [others[k] for k in ("explain", "review", "speed", "errors", "document")]
        ask = f"{ask} {pick(rng.choice(further), 1)}"
    wishes = [
        say(rng, w, words)
        for w in rng.sample(lists()["demand"][sort], rng.choice((0, 2, 3, 4, 5, 7)))
    ]
    rules = listed(rng, wishes, rng.choice(_LEADS))
    last = pick(lists()["after"][sort], rng.choice((0, 1, 1, 2)))
    before = rng.random() < 0.5
    head, tail = (f"{opening} {ask}".strip(), "") if before else (opening, ask)
    return user("\n\n".join(filter(None, (head, block, tail, rules, last))))


def _picker(rng: random.Random, words: Mapping[str, str]) -> Callable[[list[str], int], str]:
    def pick(some: list[str], count: int) -> str:
        return " ".join(say(rng, one, words) for one in rng.sample(some, count))

    return pick


def _prose(shelf: Shelf) -> Callable[[random.Random], Quote]:
    return lambda rng: shelf.document(rng, size=_EDITED)


def _block(rng: random.Random, quote: Quote) -> str:
    """As people paste it: mostly fenced, prose mostly as it is or in quotation marks."""
    how = rng.random()
    if quote.sort == "prose":
        if how < 0.2:
            return f'"{quote.text}"'
        return f"---\n{quote.text}\n---" if how < 0.35 else quote.text
    if how < 0.84:
        return f"```{quote.fence}\n{quote.text}\n```"
    if how < 0.92:
        return f"```\n{quote.text}\n```"
    return quote.text
