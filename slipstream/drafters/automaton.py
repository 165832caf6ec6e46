"""A suffix automaton with counts: every substring seen, how often, and what mostly followed it.

Source: Blumer et al. 1985 (online construction, amortized constant time a token). Counts and the
likeliest continuations are exact for substrings of up to `reach` tokens, as in the depth-limited
suffix trees of SuffixDecoding (arXiv 2411.04975, section 4), in memory linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

ROOT = 0


class SuffixAutomaton:
    """States stand for sets of substrings that end at the same places.

    `length[s]` is the longest substring of state s, `link[s]` the state of its longest suffix that
    occurs elsewhere too, `follow[s]` token -> state, `count[s]` occurrences (exact where the
    state's shortest substring has at most `reach` tokens) and `best[s]` the token that followed
    most often, the most recent among equals (-1 where nothing followed).
    """

    __slots__ = ("_recent", "_whole", "best", "count", "follow", "length", "link", "reach", "size")

    def __init__(self, reach: int) -> None:
        self.reach = reach
        self.size = 0
        self.length, self.link, self.count, self.best = [0], [-1], [0], [-1]
        self.follow: list[dict[int, int]] = [{}]
        self._whole = ROOT  # state of the whole text
        self._recent = ROOT  # state of its last `reach` tokens

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self._append(token)
            self._count(token)
        self.size += len(tokens)

    def restart(self) -> None:
        """Begin another text: what follows is not a continuation of what came before."""
        self._whole = self._recent = ROOT

    def locate(self, tokens: Sequence[int]) -> tuple[int, int]:
        """State and length of the longest suffix of `tokens` that occurs in the text."""
        state, matched = ROOT, 0
        for token in tokens:
            while token not in self.follow[state] and state != ROOT:
                state = self.link[state]
                matched = self.length[state]
            if token in self.follow[state]:
                state, matched = self.follow[state][token], matched + 1
        return state, matched

    @property
    def current(self) -> tuple[int, int]:
        """State and length of the text's own last tokens, at most `reach` of them."""
        state = self._within(self._recent)
        return state, min(self.length[state], self.reach)

    def _append(self, token: int) -> None:
        follow, link, length = self.follow, self.link, self.length
        known = follow[self._whole].get(token)
        if known is not None:  # only after a restart: the text repeats an earlier one's beginning
            self._whole = self._split(self._whole, token, known)
            return
        new = self._state(length[self._whole] + 1)
        state = self._whole
        while state != -1 and token not in follow[state]:
            follow[state][token] = new
            state = link[state]
        link[new] = ROOT if state == -1 else self._split(state, token, follow[state][token])
        self._whole = new

    def _split(self, state: int, token: int, known: int) -> int:
        """The state that holds exactly the substrings of `state` followed by `token`."""
        follow, link, length = self.follow, self.link, self.length
        if length[known] == length[state] + 1:
            return known
        clone = self._state(length[state] + 1)
        follow[clone] = dict(follow[known])
        self.count[clone], self.best[clone] = self.count[known], self.best[known]
        link[clone], link[known] = link[known], clone
        while state != -1 and follow[state].get(token) == known:
            follow[state][token] = clone
            state = link[state]
        return clone

    def _state(self, length: int) -> int:
        self.length.append(length)
        self.link.append(ROOT)
        self.count.append(0)
        self.best.append(-1)
        self.follow.append({})
        return len(self.length) - 1

    def _count(self, token: int) -> None:
        """One more occurrence for each of the text's last 1 to `reach` tokens.

        Only the continuation `token` of the previous endings gained an occurrence, so comparing it
        with each ending's best keeps the best exact.
        """
        follow, link, count, best = self.follow, self.link, self.count, self.best
        # Appending may have split the state of the previous ending; step to the part that holds it.
        before = self._within(self._recent)
        self._recent = self._within(follow[before][token])
        state = self._recent
        while state != ROOT:
            count[state] += 1
            state = link[state]
        state = before
        while state != -1:
            rival = best[state]
            if rival != token:
                after = follow[state]
                if rival < 0 or count[after[token]] >= count[after[rival]]:
                    best[state] = token
            state = link[state]

    def _within(self, state: int) -> int:
        """The state of the suffix of at most `reach` tokens of a state on the text's ending."""
        while state != ROOT and self.length[self.link[state]] >= self.reach:
            state = self.link[state]
        return state
