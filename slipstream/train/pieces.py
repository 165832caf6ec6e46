"""Cuts files into pieces that a person might paste: functions, blocks, settings, paragraphs."""

from __future__ import annotations

import ast
import json
import random
import re
import textwrap
import warnings
from typing import Any

LONGEST = 2200
_SHORTEST = 120
_WIDE = 160
"""Characters of a line: minified code and tables of numbers have wider ones."""
_HEAD = re.compile(r"^( *)(?:async def|def|class) (\w+)")
_GENERATED = re.compile(r"generated (?:by|from|file)|do not edit", re.IGNORECASE)
_NAMES = re.compile(
    r"\b(?:function\*?|class|interface|struct|enum|func|fn|def|impl|trait|CREATE TABLE)\s+(\w+)"
    r"|^\w[\w *&<>:]{0,60}?\b(\w+)\(",
    re.MULTILINE,
)
Piece = tuple[str, str]


def cut(text: str, fence: str) -> list[Piece]:
    """Pieces of a file of 120 to 2,200 characters and the name of what each defines, or "".

    None of a file whose beginning says that a program wrote it: nobody pastes those.
    """
    if _GENERATED.search(text[:1000]):
        return []
    if fence == "python":
        found = _python(text)
    elif fence == "json":
        found = [(piece, "") for piece in _json(text)]
    else:
        found = [(piece, _named(piece)) for piece in _blocks(text)]
    return [(piece, name) for piece, name in found if _fits(piece)]


def docstring(text: str) -> str | None:
    """A Python file's own, where it says more than a few lines."""
    lines = text.split("\n")
    at = next((i for i, line in enumerate(lines) if line.strip() and line[0] != "#"), 0)
    parts = "\n".join(lines[at:]).lstrip("rR").split('"""', 2)
    if len(parts) < 3 or parts[0] or len(parts[1]) < 400:
        return None
    return textwrap.dedent(parts[1]).strip()


def paragraphs(text: str, rng: random.Random, *, size: int) -> str | None:
    """Neighboring paragraphs of at most `size` characters, a fifth of it or more; None where what
    was tried is too short, or not prose.
    """
    parts = [part.strip("\n") for part in re.split(r"\n\s*\n", text) if part.strip()]
    if not parts:
        return None
    at = rng.randrange(len(parts))
    held = ""
    for part in parts[at:]:
        longer = f"{held}\n\n{part}" if held else part
        if len(longer) > size:
            break
        held = longer
    held = textwrap.dedent(held).strip()
    letters = sum(c.isalpha() or c == " " for c in held)
    if len(held) < max(_SHORTEST, size // 5) or letters < 0.8 * len(held):
        return None
    if held.count("```") % 2:  # a block of code was cut in two
        return None
    return held if max(map(len, held.splitlines())) <= size else None


def without_docstring(text: str) -> str:
    """A Python function or class without the docstring behind its head; as it is without one."""
    short = re.sub(r"(:\n)\s+[rRuU]?(\"\"\"|''').*?\2[ ]*\n", r"\1", text, count=1, flags=re.DOTALL)
    return short if is_python(short) else text


def is_python(text: str) -> bool:
    """Whether it parses; warnings of old escapes are its author's affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(text)
        except (SyntaxError, ValueError):
            return False
    return True


def _fits(piece: str) -> bool:
    lines = piece.splitlines()
    return (
        _SHORTEST <= len(piece) <= LONGEST
        and len(lines) > 3
        and max(map(len, lines)) <= _WIDE
        and len(set(lines)) > 0.6 * len(lines)
    )


def _python(text: str) -> list[Piece]:
    """Every function and class, methods included: its decorators, its head, what is deeper."""
    lines, found = text.split("\n"), []
    for at, line in enumerate(lines):
        head = _HEAD.match(line)
        if head is None:
            continue
        depth, first, end = len(head[1]), at, at + 1
        while first and lines[first - 1].startswith(f"{head[1]}@"):
            first -= 1
        while end < len(lines) and (not lines[end].strip() or _depth(lines[end]) > depth):
            end += 1
            if end - first > 80:
                break
        # A head over several lines closes at its own depth: ") -> int:".
        if end < len(lines) and lines[end].startswith(f"{head[1]})"):
            end += 1
            while end < len(lines) and (not lines[end].strip() or _depth(lines[end]) > depth):
                end += 1
        piece = textwrap.dedent("\n".join(lines[first:end])).rstrip()
        if _fits(piece) and is_python(piece):
            found.append((piece, head[2]))
    return found


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _blocks(text: str) -> list[str]:
    """What stands between blank lines that are followed by a line without indentation; short ones
    together.
    """
    blocks = [b.strip("\n") for b in re.split(r"\n(?:[ ]*\n)+(?=[^\s})\]])", text)]
    blocks = [b for b in blocks if not re.search(r"copyright|licen[sc]e", b, re.IGNORECASE)]
    found, held = [], ""
    for block in blocks:
        longer = f"{held}\n\n{block}" if held else block
        if len(longer) > LONGEST:
            found.append(held)
            longer = block
        held = longer
        if len(held) > LONGEST // 4:
            found.append(held)
            held = ""
    return [*found, held]


def _named(piece: str) -> str:
    found = _NAMES.search(piece)
    return (found[1] or found[2] or "") if found else ""


def _json(text: str) -> list[str]:
    """Objects and lists of it, at any depth, laid out anew."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    found: list[str] = []
    waiting: list[Any] = [value]
    while waiting and len(found) < 40:
        value = waiting.pop(0)
        if isinstance(value, (dict, list)):
            said = json.dumps(value, indent=2, ensure_ascii=False)
            if len(said) <= LONGEST:
                found.append(said)
            else:
                waiting += value.values() if isinstance(value, dict) else value
    return found
