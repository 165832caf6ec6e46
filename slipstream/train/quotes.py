"""Code, data and prose that people wrote, found on the machine, for training prompts to quote.

Python's standard library is always there: its functions and classes are code, its module docstrings
and `pydoc_data.topics` prose. Other languages come from `snippets.toml`, and from folders that a
user names. Nothing is downloaded, and nothing quoted ends up in a drafter but what it says of the
target's answers.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from pydoc_data import topics

from slipstream.errors import InvalidConfig
from slipstream.train import pieces

FENCES = {
    ".py": "python", ".js": "js", ".mjs": "js", ".jsx": "jsx", ".ts": "ts", ".tsx": "tsx",
    ".go": "go", ".rs": "rust", ".c": "c", ".h": "c", ".cc": "cpp", ".cpp": "cpp", ".hpp": "cpp",
    ".cu": "cpp", ".java": "java", ".kt": "kotlin", ".cs": "csharp", ".php": "php", ".rb": "ruby",
    ".swift": "swift", ".scala": "scala", ".sh": "bash", ".sql": "sql", ".lua": "lua",
    ".pl": "perl", ".css": "css", ".cmake": "cmake",
    ".json": "json", ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".ini": "ini", ".cfg": "ini",
    ".md": "", ".rst": "", ".txt": "",
}  # fmt: skip
"""What is quoted, by the end of a file's name, and how a block of it is tagged."""
_DATA = {"json", "toml", "yaml", "ini", "csv", "text", "nginx", "dockerfile", "makefile"}
_LEFT_OUT = {"test", "tests", "site-packages", "__pycache__", "encodings", "pydoc_data", "idlelib"}
_LEAST, _MOST = 200, 300_000
"""Bytes of a file: shorter ones say nothing, longer ones are mostly generated."""
_SNIPPETS = 0.3
"""Of the quoted code: about as much as is written in other languages where people ask."""
_TRIES, _ENOUGH = 200, 1000


@dataclass(frozen=True, slots=True)
class Quote:
    """`sort`: code, data or prose; `fence`: its language as in Markdown; `name`: of what it
    defines, "" where it defines nothing that has one.
    """

    text: str
    sort: str
    fence: str = ""
    name: str = ""


@dataclass(slots=True)
class Shelf:
    """What can be quoted. `files` by language, `prose`: texts and files; `digest` tells two shelves
    apart that would quote differently.
    """

    files: dict[str, list[Path]]
    prose: list[str | Path]
    digest: str
    _cut: dict[Path, tuple[Quote, ...]] = field(default_factory=dict)

    def code(self, rng: random.Random) -> Quote:
        """A function, a class or a few neighbors of 120 to 2,200 characters, of any language."""
        kinds = [fence for fence in self.files if fence not in _DATA]
        if rng.random() < _SNIPPETS:
            return _snippet(rng, data=False)
        return self._drawn(rng, kinds) or _snippet(rng, data=False)

    def data(self, rng: random.Random) -> Quote:
        """A piece of JSON, a configuration, a log or a table."""
        kinds = [fence for fence in self.files if fence in _DATA]
        found = self._drawn(rng, kinds) if kinds and rng.random() < 0.5 else None
        return found or _snippet(rng, data=True)

    def document(self, rng: random.Random, *, size: int) -> Quote:
        """Paragraphs of prose, at most `size` characters and a fifth of that or more."""
        for _ in range(_TRIES):
            source = rng.choice(self.prose)
            text = source if isinstance(source, str) else read(source)
            found = pieces.paragraphs(text or "", rng, size=size)
            if found is not None:
                return Quote(found, "prose")
        raise InvalidConfig(
            f"No text of {size // 5} to {size} characters was found to quote; name a folder with "
            "longer ones."
        )

    def _drawn(self, rng: random.Random, fences: Sequence[str]) -> Quote | None:
        # A root and a limit: a folder full of one language leaves room for the others.
        weights = [min(len(self.files[fence]), _ENOUGH) ** 0.5 for fence in fences]
        for _ in range(_TRIES):
            fence = rng.choices(list(fences), weights)[0]
            found = self._quotes(rng.choice(self.files[fence]), fence)
            if found:
                return _whole(rng, found)
        return None

    def _quotes(self, path: Path, fence: str) -> tuple[Quote, ...]:
        if path not in self._cut:
            sort = "data" if fence in _DATA else "code"
            found = pieces.cut(read(path) or "", fence)
            self._cut[path] = tuple(Quote(piece, sort, fence, name) for piece, name in found)
        return self._cut[path]


def shelf(folders: Sequence[Path] = ()) -> Shelf:
    """The standard library, the snippets, and what `folders` hold.

    Raises `InvalidConfig` for a folder that is none, or that holds nothing to quote.
    """
    own = _listed(Path(os.__file__).parent, only={".py"}, left_out=_LEFT_OUT)
    files: dict[str, list[Path]] = {"python": own}
    prose: list[str | Path] = [text for text in topics.topics.values() if len(text) > _LEAST]
    prose += [said for path in own if (said := pieces.docstring(read(path) or ""))]
    parts = [hashlib.sha256("".join(map(str, prose)).encode()).hexdigest()]
    for folder in folders:
        if not folder.is_dir():
            raise InvalidConfig(f"{folder} is no folder to quote from; name one that exists.")
        found = _listed(folder, only=set(FENCES), left_out={"__pycache__"})
        if not any(_usable(path) for path in found):
            raise InvalidConfig(
                f"{folder} holds nothing to quote (functions, paragraphs, settings in UTF-8 files "
                f"that end in {' '.join(FENCES)}); name another folder."
            )
        for path in found:
            fence = FENCES[path.suffix]
            if fence:
                files.setdefault(fence, []).append(path)
            else:
                prose.append(path)
        parts += [f"{path.relative_to(folder)}:{path.stat().st_size}" for path in found]
    return Shelf(files, prose, hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16])


@cache
def snippets() -> dict[str, list[str] | list[dict[str, str]]]:
    """The hand-written pieces of code, and the words that go into them."""
    text = Path(__file__).with_name("snippets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def read(path: Path) -> str | None:
    """A file's text with plain line ends; None where it cannot be read, or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8").expandtabs(4)
    except (OSError, UnicodeDecodeError):
        return None


def _usable(path: Path) -> bool:
    text, fence = read(path) or "", FENCES[path.suffix]
    if fence:
        return bool(pieces.cut(text, fence))
    return pieces.paragraphs(text, random.Random(0), size=1200) is not None


def _listed(folder: Path, *, only: set[str], left_out: set[str]) -> list[Path]:
    """Files in an order that every machine would give them."""
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in left_out and not f.startswith("."))
        for name in sorted(names):
            path = Path(at, name)
            # Not a link that leads nowhere, nor a pipe.
            if path.suffix in only and path.is_file() and _LEAST <= path.stat().st_size <= _MOST:
                found.append(path)
    return found


def _whole(rng: random.Random, found: Sequence[Quote]) -> Quote:
    """One of a file's pieces, the longer the likelier, in one of four cases with the next one."""
    at = rng.choices(range(len(found)), [len(quote.text) ** 1.5 for quote in found])[0]
    one, both = found[at], found[at : at + 2]
    joined = "\n\n".join(quote.text for quote in both)
    if rng.random() < 0.25 and len(both) == 2 and len(joined) <= pieces.LONGEST:
        return Quote(joined, one.sort, one.fence, one.name)
    return one


def _snippet(rng: random.Random, *, data: bool) -> Quote:
    own = snippets()
    some = [s for s in own["snippets"] if isinstance(s, dict) and (s["fence"] in _DATA) == data]
    picked = rng.choice(some)
    noun, nouns = str(rng.choice(own["nouns"])).split()
    first, second = rng.sample([str(f) for f in own["fields"]], 2)
    words = {
        "n": noun, "ns": nouns, "N": noun.capitalize(), "Ns": nouns.capitalize(),
        "f": first, "g": second, "Fc": first.capitalize(), "Gc": second.capitalize(),
        "k": str(rng.randint(10, 99)), "m": str(rng.randint(2, 60)),
    }  # fmt: skip
    text = re.sub(r"@(\w+?)@", lambda slot: words[slot[1]], picked["text"].strip("\n"))
    name = re.search(r"(?:function|class|def|func|fn|struct|interface) (\w+)", text)
    sort = "data" if data else "code"
    return Quote(text.expandtabs(4), sort, picked["fence"], name[1] if name else "")
