"""Suffix decoding: continue by what mostly followed this ending, as far as it was seen often.

Source: SuffixDecoding (arXiv 2411.04975, section 4): for every length at which the text's ending
occurred before, walk the likeliest continuation while its observed frequency stays at `min_prob` or
more and its length at `factor` times the match; draft the walk with the most expected accepted
tokens (the sum of its frequencies). Its suffix trees are a suffix automaton here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slipstream.drafters.automaton import ROOT, SuffixAutomaton
from slipstream.drafters.packing import pack
from slipstream.drafters.specs import DrafterContext, DrafterSpec
from slipstream.types import Draft, IntArray, Row, Verdict

# Share of a shorter match's upper bound at which it is not looked at. In a loop every length
# matches and the longest is as good as any; this is what keeps its draft cheap.
_ENOUGH = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixRules:
    """How far to draft. `min_prob`: least share of the ending's earlier occurrences that went on
    like the draft; `factor`: draft tokens allowed per matched token; `depth`: longest match used.
    """

    min_prob: float
    factor: float
    depth: int


class Walk(NamedTuple):
    """A candidate draft and the number of its tokens expected to be accepted."""

    tokens: list[int]
    score: float


class FinishedTexts:
    """Answers of finished requests, at most about `keep` tokens of them, the oldest dropped first.

    Two automata take turns: the newer is filled to half of `keep`, then becomes the older and the
    older is dropped. An automaton cannot forget single texts.
    """

    def __init__(self, keep: int, *, reach: int) -> None:
        self._half, self._reach = keep // 2, reach
        self.generations = [SuffixAutomaton(reach)]

    def add(self, tokens: Sequence[int]) -> None:
        """Take in one text (its last half of `keep` tokens)."""
        if self.generations[0].size + len(tokens) > self._half:
            self.generations = [SuffixAutomaton(self._reach), self.generations[0]]
        self.generations[0].restart()
        self.generations[0].extend(tokens[-self._half :])


class SuffixDrafter:
    """One automaton a request; with `finished`, also one over the answers of finished requests."""

    needs: tuple[int, ...] = ()
    one_hot = True

    def __init__(
        self, draft_len: int, *, rules: SuffixRules, keep: int | None = None, name: str
    ) -> None:
        self.name, self.max_draft_len = name, draft_len
        self._rules, self._keep = rules, keep
        self._reach = rules.depth + draft_len
        self._own: dict[int, tuple[Row, SuffixAutomaton]] = {}
        self._finished: FinishedTexts | None = None
        self.reset()

    def open(self, rows: Sequence[Row]) -> None:
        """Take in the prompt and anchor."""
        for row in rows:
            automaton = SuffixAutomaton(self._reach)
            automaton.extend(row.tokens)
            self._own[row.request_id] = (row, automaton)

    def draft(self, rows: Sequence[Row], draft_lens: IntArray) -> Draft:
        """The best walk of each row; empty where its ending is new or continued too variously."""
        widths = draft_lens.clip(0, self.max_draft_len).tolist()
        return pack([self._propose(r, w) if w else () for r, w in zip(rows, widths, strict=True)])

    def advance(self, rows: Sequence[Row], verdict: Verdict) -> None:
        """Take in the tokens committed since the last call."""
        for row in rows:
            automaton = self._own[row.request_id][1]
            automaton.extend(row.tokens[automaton.size :])

    def close(self, request_ids: Sequence[int]) -> None:
        """Drop the requests' automata; their answers go to the finished texts, if these are kept.

        A preempted request is closed too: its answer so far is then kept twice in the end, which
        costs memory and a little weight, never correctness.
        """
        for request_id in request_ids:
            row, _ = self._own.pop(request_id, (None, None))
            if row is not None and self._finished is not None:
                # The prompt's end comes along so that the answer's first tokens can be found.
                self._finished.add(row.tokens[max(0, row.prompt_len - self._rules.depth) :])

    def reset(self) -> None:
        """Forget finished texts."""
        if self._keep is not None:
            self._finished = FinishedTexts(self._keep, reach=self._reach)

    def on_device(self) -> SuffixDrafter | None:
        """The same rule over token tables on an accelerator; finished texts stay on the host."""
        return self if self._keep is None else None

    def sized(self, rows: int, device: Any) -> Any:
        """Its launches for so many rows: a `drafters.suffix_device.DeviceSuffix`."""
        from slipstream.drafters.suffix_device import DeviceSuffix

        return DeviceSuffix(
            rows,
            self.max_draft_len,
            min_prob=self._rules.min_prob,
            factor=self._rules.factor,
            depth=self._rules.depth,
            device=device,
        )

    def _propose(self, row: Row, width: int) -> Sequence[int]:
        automaton = self._own[row.request_id][1]
        best = walk(automaton, automaton.current, width, ends=1, rules=self._rules)
        if self._finished is not None:
            ending = row.tokens[-self._rules.depth :]
            for texts in self._finished.generations:
                found = walk(texts, texts.locate(ending), width, ends=0, rules=self._rules)
                best = found if found.score > best.score else best
        return best.tokens


def walk(
    automaton: SuffixAutomaton,
    ending: tuple[int, int],
    width: int,
    *,
    ends: int,
    rules: SuffixRules,
) -> Walk:
    """The candidate with the most expected accepted tokens over all match lengths.

    `ending`: state and length of the longest match. `ends`: occurrences of the ending that are the
    text's own end, which nothing follows yet. The share of a path is occurrences of (ending + path)
    over earlier occurrences of the ending.
    """
    tokens: list[int] = []
    best = 0.0
    count, length, link = automaton.count, automaton.length, automaton.link
    state, longest = ending[0], min(ending[1], rules.depth)
    while state != ROOT and length[link[state]] >= rules.depth:
        state = link[state]  # holds longer matches only
    while state != ROOT:
        matched = min(length[state], longest)
        limit = min(width, max(1, int(rules.factor * matched)))
        if best >= _ENOUGH * limit:
            break  # shorter matches draft no more tokens than this one all but surely brings
        earlier = count[state] - ends
        if earlier > 0:
            found, seen = _follow(automaton, state, limit, least=rules.min_prob * earlier)
            if seen > best * earlier:
                tokens, best = found, seen / earlier
        state = link[state]
    return Walk(tokens, best)


def _follow(
    automaton: SuffixAutomaton, state: int, limit: int, *, least: float
) -> tuple[list[int], int]:
    """Likeliest continuation of `state` while it occurred `least` times; the sum of its counts."""
    best, follow, count = automaton.best, automaton.follow, automaton.count
    tokens: list[int] = []
    total = 0
    for _ in range(limit):
        token = best[state]
        if token < 0:
            break
        state = follow[state][token]
        seen = count[state]
        if seen < least:
            break
        tokens.append(token)
        total += seen
    return tokens, total


def create(spec: DrafterSpec, context: DrafterContext) -> SuffixDrafter:
    """The drafter of a spec `suffix:draft_len,global=...,min_prob=...,...`."""
    rules = SuffixRules(
        min_prob=spec.number("min_prob"), factor=spec.number("factor"), depth=spec.integer("depth")
    )
    keep = spec.integer("keep") if spec.flag("global") else None
    return SuffixDrafter(spec.draft_len, rules=rules, keep=keep, name=str(spec))
