"""Token ids to text as they arrive, and stop strings, which may span tokens."""

from __future__ import annotations

from typing import Any, Protocol

from tokenizers.decoders import DecodeStream


class TextStream(Protocol):
    """Text of one request's output."""

    def push(self, token: int, *, may_stop: bool) -> bool:
        """Take in one token; True when it completed a stop string (only looked for if allowed)."""
        ...

    def delta(self, *, finished: bool) -> str:
        """Text not handed out before, holding back what may still become a stop string."""
        ...

    def final(self) -> str:
        """The whole text, cut before a stop string."""
        ...


class TokenText:
    """Incremental decoding with the tokenizer's own stream, special tokens left out.

    `tokenizer`: a `tokenizers.Tokenizer`. A character split over tokens appears once it is whole;
    bytes that never become one appear as U+FFFD at the end, as a plain decode would show them.
    """

    def __init__(self, tokenizer: Any, stops: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._hold = max((len(s) for s in stops), default=1) - 1
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._text = ""
        self._sent = 0
        self._cut: int | None = None

    def push(self, token: int, *, may_stop: bool) -> bool:
        """See `TextStream`."""
        self._ids.append(token)
        piece = self._decoder.step(self._tokenizer, token)
        if not piece:
            return False
        self._text += piece
        if not (self._stops and may_stop):
            return False
        before = len(self._text) - len(piece)
        found = [
            at
            for s in self._stops  # only a match that ends in the new piece is new
            if (at := self._text.find(s, max(0, before - len(s) + 1))) >= 0
        ]
        if found:
            self._cut = min(found)
        return bool(found)

    def delta(self, *, finished: bool) -> str:
        """See `TextStream`."""
        text = self.final() if finished else self._text[: max(0, len(self._text) - self._hold)]
        new = text[self._sent :]
        self._sent = max(self._sent, len(text))
        return new

    def final(self) -> str:
        """See `TextStream`."""
        if self._cut is not None:
            return self._text[: self._cut]
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))


class NoText:
    """For targets without a tokenizer (tests): no text, so no stop strings."""

    def push(self, token: int, *, may_stop: bool) -> bool:
        """Never stops."""
        return False

    def delta(self, *, finished: bool) -> str:
        """Nothing."""
        return ""

    def final(self) -> str:
        """Nothing."""
        return ""
