"""A made-up record kept by one set of people: dates advance, stores add up, problems get closed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cache
from pathlib import Path

from slipstream.lab.prompts.grammar import Deck, expand, parse_sections

STYLES = ("decisions", "expedition", "municipal", "voyage")
_OLD_YEARS = (1867, 1934)


@dataclass(frozen=True, slots=True)
class Stock:
    """A store with its unit, what it held at the start and what one entry may use."""

    name: str
    unit: str
    start: int
    use: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Level:
    """What the record says of one stock in one section. `change` is negative where it was used."""

    section: int
    day: date
    stock: Stock
    change: int
    left: int
    sentence: str


@dataclass(slots=True)
class Problem:
    """A matter that stays open over several sections."""

    text: str
    remedy: str
    opened: int
    closed: int | None = None


@dataclass(frozen=True, slots=True)
class Section:
    """A numbered heading and the sentences below it."""

    heading: str
    sentences: tuple[str, ...]

    def text(self) -> str:
        """Heading, newline, one paragraph."""
        return f"{self.heading}\n{' '.join(self.sentences)}"


@cache
def _style(name: str) -> dict[str, list[str]]:
    path = Path(__file__).parent / "styles" / f"{name}.txt"
    return parse_sections(path.read_text(encoding="utf-8"))


def words(kind: str) -> list[str]:
    """The single words of one heading of styles/words.txt."""
    return [word for line in _style("words")[kind] for word in line.split()]


def say_date(day: date) -> str:
    """Day, month in words, year."""
    return f"{day.day} {words('months')[day.month - 1]} {day.year}"


def _number(value: int) -> str:
    return f"{value:,}"


@dataclass(slots=True)
class Chronicle:
    """An endless record in one style. The same style and generator state give the same text.

    `preface` is title and introduction. `levels` and `problems` hold what was written so far, for
    questions and for the tests.
    """

    style: str
    rng: random.Random
    day: date = field(init=False)
    number: int = 0
    preface: tuple[str, str] = field(init=False)
    levels: list[Level] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    _lines: dict[str, list[str]] = field(init=False)
    _decks: dict[str, Deck[str]] = field(default_factory=dict)
    _people: list[tuple[str, str]] = field(init=False)
    _met: set[str] = field(default_factory=set)
    _just_named: str = ""
    _places: list[str] = field(init=False)
    _stocks: list[Stock] = field(init=False)
    _left: dict[str, int] = field(init=False)
    _fixed: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = self.rng
        self._lines = _style(self.style)
        year = rng.randint(*_OLD_YEARS) if self.style != "decisions" else rng.randint(2009, 2021)
        self.day = date(year, rng.randint(1, 12), rng.randint(1, 28))
        roles = self._lines["people"]
        names = zip(
            rng.sample(words("first"), len(roles)),
            rng.sample(words("last"), len(roles)),
            strict=True,
        )
        self._people = [(f"{a} {b}", role) for (a, b), role in zip(names, roles, strict=True)]
        towns = [head + tail for head in words("place heads") for tail in words("place tails")]
        name, home, goal, *places = rng.sample(towns, 3 + 12)
        kinds = self._lines["places"]
        self._places = [f"{word} {rng.choice(kinds)}" for word in places]
        self._stocks = [self._parse_stock(line) for line in self._lines["stocks"]]
        self._left = {stock.name: stock.start for stock in self._stocks}
        held = [f"{_number(s.start)} {s.unit} of {s.name}" for s in self._stocks]
        self._fixed = {
            "name": name,
            "home": home,
            "goal": goal,
            "crew": str(rng.randint(14, 60)),
            "stocklist": f"{', '.join(held[:-1])} and {held[-1]}",
        }
        self.preface = (self._say("titles"), self._say("introductions"))

    def _parse_stock(self, line: str) -> Stock:
        name, unit, start, use = (part.strip() for part in line.split(";"))
        low, high = (int(part) for part in use.split("-"))
        return Stock(name, unit, int(start) + self.rng.randint(-9, 9) * low, (low, high))

    def section(self) -> Section:
        """The next section: some days later, with three to six events and the state of a store."""
        self.number += 1
        self.day += timedelta(days=self.rng.randint(1, 5 if self.style == "voyage" else 12))
        heading = f"{self.number}. {self._say('headings')}"
        sentences = [self._say("body") for _ in range(self.rng.randint(3, 6))]
        sentences.insert(self.rng.randint(1, len(sentences)), self._store())
        if matter := self._matter():
            sentences.insert(self.rng.randint(1, len(sentences)), matter)
        if len(self.levels) > 4 and self.rng.random() < 0.3:
            sentences.append(self._reference())
        return Section(heading, (self._say("openings"), *sentences))

    def _say(self, kind: str, **facts: str) -> str:
        deck = self._decks.setdefault(kind, Deck(self._lines[kind], self.rng))
        self._just_named = ""
        return expand(deck.draw(), self.rng, lambda slot: self._word(slot, facts))

    def _word(self, slot: str, facts: dict[str, str]) -> str:
        if slot in facts:
            return facts[slot]
        if slot in self._fixed:
            return self._fixed[slot]
        if slot in ("person", "other"):
            return self._person()
        if slot == "place":
            return self.rng.choice(self._places)
        if slot == "thing":
            return self.rng.choice(self._lines["things"])
        if slot == "wind":
            return self.rng.choice(words("winds"))
        if slot == "date":
            return say_date(self.day)
        raise KeyError(f"style {self.style} uses the unknown slot {slot!r}")

    def _person(self) -> str:
        name, role = self.rng.choice([p for p in self._people if p[0] != self._just_named])
        self._just_named = name
        if name in self._met:
            return name.split()[1] if self.rng.random() < 0.7 else name
        self._met.add(name)
        return f"the {role} {name}"

    def _store(self) -> str:
        stock = self.rng.choice(self._stocks)
        left = self._left[stock.name]
        used = self.rng.randint(*stock.use)
        change = -used
        if left - used < stock.start // 4:
            change = self.rng.randint(stock.start // 3, stock.start // 2)
        self._left[stock.name] = left + change
        kind, key = ("use", "used") if change < 0 else ("refill", "added")
        facts = {"stock": stock.name, "unit": stock.unit, "left": _number(left + change)}
        sentence = self._say(kind, **facts, **{key: _number(abs(change))})
        self.levels.append(Level(self.number, self.day, stock, change, left + change, sentence))
        return sentence

    def _matter(self) -> str | None:
        """Open a problem, report on one or close one; None where this section has no such news."""
        still_open = [p for p in self.problems if p.closed is None and p.opened < self.number]
        if still_open and self.rng.random() < 0.45:
            problem = self.rng.choice(still_open)
            facts = {"problem": problem.text, "ref": str(problem.opened)}
            if self.number - problem.opened > 3 and self.rng.random() < 0.6:
                problem.closed = self.number
                return self._say("close", remedy=problem.remedy, **facts)
            return self._say("progress", **facts)
        seen = {p.text for p in self.problems if p.closed is None or self.number - p.closed < 25}
        fresh = [line for line in self._lines["problems"] if line.split(";")[0] not in seen]
        if not fresh or self.rng.random() < 0.6:
            return None
        text, remedy = (part.strip() for part in self.rng.choice(fresh).split(";"))
        self.problems.append(Problem(text, remedy, self.number))
        return self._say("open", problem=text)

    def _reference(self) -> str:
        level = self.rng.choice([past for past in self.levels if past.section < self.number])
        return self._say(
            "references",
            ref=str(level.section),
            refdate=say_date(level.day),
            refleft=_number(level.left),
            unit=level.stock.unit,
            stock=level.stock.name,
        )
