"""A grid: what will be measured and which bars hold, written down before the run."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from slipstream.errors import InvalidConfig
from slipstream.lab.gate_specs import (
    DegenerateGate,
    Gates,
    JsonGate,
    LosslessGate,
    NeedleGate,
    require,
)

SAMPLINGS = ("greedy", "sampled")
OWN = "own"  # traffic class of the user's own prompts

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One traffic class at one number of closed-loop users.

    `prompts` are run in every repeat: one by one where `users` is 1, else in closed-loop waves of
    `wave` prompts (default: `users`). `fresh_prompts` gives every repeat other prompts, which says
    more than repeating where prompts are plenty and runs are dear. `document_tokens` is the
    prompt's length for generated documents. `spread`: single requests may have between
    `max_tokens * (1 - spread)` and `max_tokens` tokens, drawn per prompt and alike for all arms; a
    loop in which every answer has the same limit ends all at once for plain decoding only.
    """

    traffic: str
    users: int = 1
    sampling: str = "sampled"
    prompts: int = 4
    wave: int | None = None
    max_tokens: int = 64
    spread: float = 0.0
    document_tokens: int | None = None
    fresh_prompts: bool = False

    def __post_init__(self) -> None:
        where = f"cell {self.traffic!r}"
        require(1 <= self.users <= 1024, where, "users", self.users, "1 to 1024")
        require(
            self.sampling in SAMPLINGS, where, "sampling", self.sampling, " or ".join(SAMPLINGS)
        )
        require(self.max_tokens >= 2, where, "max_tokens", self.max_tokens, "2 or more")
        require(
            self.prompts >= max(1, self.users),
            where,
            "prompts",
            self.prompts,
            f"at least as many as users ({self.users})",
        )
        require(
            self.wave is None or (self.users > 1 and self.users <= self.wave <= self.prompts),
            where,
            "wave",
            self.wave,
            f"users ({self.users}) to prompts ({self.prompts}), and only with more than one user",
        )
        require(0 <= self.spread < 1, where, "spread", self.spread, "0 up to below 1")
        tokens = self.document_tokens
        require(tokens is None or tokens >= 64, where, "document_tokens", tokens, "64 or more")

    @property
    def name(self) -> str:
        """As in tables: `code x 16 greedy`."""
        return f"{self.traffic} x {self.users} {self.sampling}"

    @property
    def slug(self) -> str:
        """As in file names: `code-x16-greedy`."""
        return f"{self.traffic}-x{self.users}-{self.sampling}"

    @property
    def unit_size(self) -> int:
        """Prompts of one interleaved unit: one prompt, or a wave."""
        return 1 if self.users == 1 else (self.wave or self.users)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What `sampled` cells use: the model's recommended settings."""

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        value = self.temperature
        require(value > 0, "sampling", "temperature", value, "above 0 (0 is a greedy cell)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Written before the run. `speedup`: an arm is worth running if its interval lies above.
    `min_repeats`: fewer keep a cell out of the headline. `length_ratio`: how far output lengths of
    an arm and its baseline may differ (factor, either way) before the pair is not matched.
    """

    speedup: float = 1.0
    min_repeats: int = 3
    length_ratio: float = 1.25

    def __post_init__(self) -> None:
        require(self.speedup > 0, "bars", "speedup", self.speedup, "above 0")
        require(self.min_repeats >= 1, "bars", "min_repeats", self.min_repeats, "1 or more")
        require(self.length_ratio >= 1, "bars", "length_ratio", self.length_ratio, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A whole grid. `budget_minutes` bounds one start: what does not fit is left for the next."""

    name: str
    title: str
    target: str
    cells: tuple[Cell, ...]
    arms: tuple[str, ...]
    baseline: str = "none"
    dtype: str = "bfloat16"
    threads: int | None = None
    repeats: int = 3
    warmup_tokens: int = 16
    seed: int = 0
    budget_minutes: float | None = None
    sampling: Sampling = field(default_factory=Sampling)
    gates: Gates = field(default_factory=Gates)
    bars: Bars = field(default_factory=Bars)
    quick: bool = False

    def __post_init__(self) -> None:
        where = f"grid {self.name!r}"
        require(bool(self.cells), where, "cells", [], "one or more [[cells]] tables")
        require(
            self.baseline in self.arms,
            where,
            "arms",
            list(self.arms),
            f"a list that holds the baseline {self.baseline!r}",
        )
        slugs = [cell.slug for cell in self.cells]
        require(len(set(slugs)) == len(slugs), where, "cells", slugs, "each cell once")
        require(len(set(self.arms)) == len(self.arms), where, "arms", list(self.arms), "each once")
        require(self.repeats >= (1 if self.quick else 3), where, "repeats", self.repeats, ">= 3")
        require(self.warmup_tokens >= 2, where, "warmup_tokens", self.warmup_tokens, "2 or more")
        budget = self.budget_minutes
        require(budget is None or budget > 0, where, "budget_minutes", budget, "above 0")

    def resolved(self) -> dict[str, Any]:
        """Every value with its default written out, as JSON types."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def hash(self, *extra: str) -> str:
        """Identity of the resolved grid and of `extra` (model fingerprint, version, ...)."""
        text = json.dumps([self.resolved(), *extra], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def quickened(self) -> Grid:
        """The smallest run of the same shape: one repeat, few prompts, 8 tokens. To see that it
        works; its rows are never publishable.
        """
        cells = tuple(
            replace(
                c,
                prompts=c.users,
                wave=None,
                max_tokens=min(8, c.max_tokens),
                document_tokens=c.document_tokens and min(1024, c.document_tokens),
            )
            for c in self.cells
        )
        gates = self.gates.quickened()
        return replace(self, cells=cells, gates=gates, repeats=1, warmup_tokens=4, quick=True)

    def with_own_prompts(self, count: int) -> tuple[Grid, tuple[str, ...]]:
        """The same users and sampling modes on `count` prompts of the user, and what was left out.

        Cells with more users than prompts are left out, because a closed loop of N users needs N
        different prompts. Raises `InvalidConfig` where none is left.
        """
        cells: dict[str, Cell] = {}
        left_out = []
        for c in self.cells:
            cell = Cell(
                traffic=OWN,
                users=c.users,
                sampling=c.sampling,
                prompts=max(c.users, min(c.prompts, count)),
                max_tokens=max(c.max_tokens, 64),
            )
            if c.users > count:
                left_out.append(f"{cell.name} needs {c.users} prompts, the file has {count}")
            else:
                cells.setdefault(cell.slug, cell)
        if not cells:
            raise InvalidConfig(f"No cell of grid {self.name!r} can run: {'; '.join(left_out)}.")
        left_out += [
            f"{count - c.prompts} of the file's {count} prompts in {c.name}, which runs {c.prompts}"
            for c in cells.values()
            if c.prompts < count
        ]
        return replace(self, cells=tuple(cells.values())), tuple(dict.fromkeys(left_out))


# --- reading ------------------------------------------------------------------------------------


def load(name: str | Path) -> Grid:
    """Read a grid by path, or by name from `bench/grids`. Raises `InvalidConfig`."""
    path = find(name)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path} is not valid TOML: {error}.") from error
    except OSError as error:
        raise InvalidConfig(f"{path} cannot be read: {error.strerror}.") from error
    return from_table(table, name=path.stem)


def from_table(table: Mapping[str, Any], *, name: str) -> Grid:
    """A grid from parsed TOML. Unknown keys and wrong types raise `InvalidConfig`."""
    return _build(Grid, {"name": name, "title": name, **table}, f"grid {name!r}")


def directories() -> tuple[Path, ...]:
    """Where named grids are looked up: `bench/grids` here, then in the checkout."""
    checkout = Path(__file__).resolve().parents[2] / "bench" / "grids"
    return tuple(dict.fromkeys((Path.cwd() / "bench" / "grids", checkout)))


def names() -> list[str]:
    """Grids that can be given by name."""
    return sorted({p.stem for d in directories() if d.is_dir() for p in d.glob("*.toml")})


def find(name: str | Path) -> Path:
    """Path of a grid. Raises `InvalidConfig` listing what exists."""
    path = Path(name)
    if path.suffix == ".toml":
        if path.is_file():
            return path
    else:
        for directory in directories():
            if (directory / f"{name}.toml").is_file():
                return directory / f"{name}.toml"
    known = ", ".join(names()) or "none here"
    raise InvalidConfig(f"There is no grid {str(name)!r}; give a .toml file or one of: {known}.")


def _build(cls: type[T], table: Any, where: str) -> T:
    """Instance of a dataclass from a TOML table, recursively, refusing what it does not know."""
    if not isinstance(table, Mapping):
        raise InvalidConfig(f"{where}: expected a table, found {table!r}.")
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in table:
        if key not in known:
            raise InvalidConfig(f"{where}: unknown key {key!r}; known: {', '.join(known)}.")
    values = {key: _convert(hints[key], value, f"{where}, {key}") for key, value in table.items()}
    try:
        return cls(**values)
    except TypeError as error:  # a required key is missing
        missing = str(error).split(":")[-1].strip()
        raise InvalidConfig(f"{where}: missing {missing}.") from error


_NESTED: dict[str, type] = {
    "Sampling": Sampling,
    "Gates": Gates,
    "Bars": Bars,
    "NeedleGate | None": NeedleGate,
    "JsonGate | None": JsonGate,
    "LosslessGate | None": LosslessGate,
    "DegenerateGate | None": DegenerateGate,
}


def _convert(hint: Any, value: Any, where: str) -> Any:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = text.replace(f"{__name__}.", "").replace(f"{NeedleGate.__module__}.", "")
    if text in _NESTED:
        return None if value is None else _build(_NESTED[text], value, where)
    if text == "tuple[Cell, ...]":
        rows = _typed(value, (list, tuple), where)
        return tuple(_build(Cell, row, f"{where} {i + 1}") for i, row in enumerate(rows))
    if text.startswith("tuple["):
        item = {"str": (str,), "int": (int,), "float": (int, float)}[text[6:].split(",")[0]]
        rows = _typed(value, (list, tuple), where)
        return tuple(_typed(row, item, where) for row in rows)
    if value is None and "None" in text:
        return None
    kinds = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}
    return _typed(value, kinds[text.split(" ")[0]], where)


def _typed(value: Any, kinds: tuple[type, ...], where: str) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise InvalidConfig(f"{where}: {value!r} is not of type {kinds[-1].__name__}.")
    return value
