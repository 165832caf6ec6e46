"""Does a made prompt hold a piece of a text that drafters are measured with?"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_WINDOW = 8
"""Words in a row that two texts only share where one was taken from the other."""


class Held:
    """Remembers texts by every run of eight words, and finds those that share one.

    The usual check of training data for what a model is measured with; 8 to 13 words are common
    (GPT-3, arXiv 2005.14165, appendix C, took 13). Words are letters, digits and underscores, in
    any case, so that a changed comma or line break hides nothing. Texts under eight words are
    remembered whole, and found only where they are all there is.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._held = {hash(run) for text in texts for run in _runs(text)}

    def __len__(self) -> int:
        return len(self._held)

    def shares(self, text: str) -> bool:
        """Whether eight words in a row, or all of fewer, are those of a held text."""
        return any(hash(run) in self._held for run in _runs(text))


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    if 0 < len(words) < _WINDOW:
        yield tuple(words)
    for i in range(len(words) - _WINDOW + 1):
        yield tuple(words[i : i + _WINDOW])
