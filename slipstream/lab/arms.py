"""What an arm's name says: its method and draft_len, in our specs and in the article's names."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Simplest first: nothing to load, then nothing but the target, then a second network.
METHODS = (
    "none",
    "ngram",
    "suffix",
    "mtp",
    "draft_model",
    "eagle3",
    "dflash",
    "dflash2",
    "dspark",
)
_DEPTH = re.compile(r"(?<=:)(\d+)(?=$|:|,)|\bk(\d+)\b|\bdraft_len=(\d+)")


@dataclass(frozen=True, slots=True)
class Arm:
    """`stem` is the name with the depth taken out: equal stems differ in draft_len only."""

    name: str
    method: str
    draft_len: int | None
    stem: str

    @property
    def simplicity(self) -> tuple[int, int, str]:
        """Sorts simpler methods first, shallower drafts next, then by name."""
        rank = METHODS.index(self.method) if self.method in METHODS else len(METHODS)
        return rank, self.draft_len or 0, self.name


def parse_arm(name: str) -> Arm:
    """Read `ngram:3`, `draft_model:PATH:4`, `MTP k3 · FA backend` or `suffix`.

    The last depth-like part counts, so a number inside a path does not.
    """
    method = re.split(r"[:\s]", name, maxsplit=1)[0].lower().replace("-", "")
    found = list(_DEPTH.finditer(name))
    if not found:
        return Arm(name, method, None, name)
    last = found[-1]
    depth = int(next(g for g in last.groups() if g is not None))
    return Arm(name, method, depth, f"{name[: last.start()]}k{name[last.end() :]}")
