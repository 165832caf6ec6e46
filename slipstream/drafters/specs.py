"""Drafter specs: `name[:path][:draft_len][,key=value...]` read, checked, written out and built.

One table, `METHODS`, says which drafters exist. Adding one is a file beside this one with a
`create(spec, context)` function and an entry here. Nothing here imports torch: a method's file is
imported when a drafter of it is built, so that the lab can read and check specs without it.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from slipstream.drafters.base import Drafter
from slipstream.errors import InvalidConfig

MAX_DRAFT_LEN = 32

OptionValue = bool | int | float | str


@dataclass(frozen=True, slots=True)
class Option:
    """One `key=value` of a method. The default's type (bool, int, float, str) is the value's type;
    `low` and `high` are inclusive bounds of numbers, `choices` what a str may be.
    """

    key: str
    default: OptionValue
    low: float = 0
    high: float = 1
    choices: tuple[str, ...] = ()

    @property
    def allowed(self) -> str:
        """The values a user may write, for error sentences."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return ", ".join(self.choices)
        kind = "a whole number" if isinstance(self.default, int) else "a number"
        return f"{kind} from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A registered drafter. `factory` is `module:function` with the signature
    `(DrafterSpec, DrafterContext) -> Drafter`. `draft_len` 0 means that the method takes none.
    `ships`: without a path the weights are those that ship for the target (`drafters.weights`).
    `ordered` names pairs of options whose first may not exceed its second.
    """

    name: str
    factory: str
    draft_len: int
    takes_path: bool = False
    ships: bool = False
    options: tuple[Option, ...] = ()
    ordered: tuple[tuple[str, str], ...] = ()

    @property
    def usage(self) -> str:
        """The spec's shape, for error sentences."""
        path = ("[:PATH]" if self.ships else ":PATH") if self.takes_path else ""
        length = "[:draft_len]" if self.draft_len else ""
        options = "".join(f"[,{o.key}=...]" for o in self.options)
        return f"{self.name}{path}{length}{options}"


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="none", factory="slipstream.drafters.none:create", draft_len=0),
        Method(
            name="ngram",
            factory="slipstream.drafters.ngram:create",
            draft_len=4,
            options=(
                Option("min", 2, 1, 16),
                Option("max", 4, 1, 16),
                Option("factor", 1.5, 0.1, 32.0),
            ),
            ordered=(("min", "max"),),
        ),
        Method(
            name="suffix",
            factory="slipstream.drafters.suffix:create",
            draft_len=8,
            options=(
                Option("global", False),
                Option("min_prob", 0.2, 0.0, 1.0),
                Option("factor", 1.5, 0.1, 32.0),
                Option("depth", 16, 1, 64),
                Option("keep", 100_000, 1_000, 10_000_000),
            ),
        ),
        Method(
            name="draft_model",
            factory="slipstream.drafters.draft_model:create",
            draft_len=4,
            takes_path=True,
        ),
        Method(
            name="mtp",
            factory="slipstream.drafters.mtp:create",
            draft_len=2,
            takes_path=True,
            ships=True,
        ),
        Method(
            name="eagle3",
            factory="slipstream.drafters.eagle3:create",
            draft_len=4,
            takes_path=True,
            ships=True,
            options=(Option("layer_ids", "auto", choices=("auto", "boundaries", "outputs")),),
        ),
        Method(
            name="dflash",
            factory="slipstream.drafters.dflash:create",
            draft_len=7,
            takes_path=True,
            ships=True,
        ),
        Method(
            name="dflash2",
            factory="slipstream.drafters.dflash2:create",
            draft_len=7,
            takes_path=True,
            ships=True,
        ),
        Method(
            name="dspark",
            factory="slipstream.drafters.dspark:create",
            draft_len=7,
            takes_path=True,
            ships=True,
            options=(Option("stop", 0.0, 0.0, 1.0),),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A checked spec with every default filled in. `str(spec)` is its canonical text, and
    `parse(str(spec)) == spec`. `path` is None for methods without weights and for the weights that
    ship.
    """

    method: str
    path: str | None
    draft_len: int
    options: tuple[tuple[str, OptionValue], ...] = ()

    def __str__(self) -> str:
        path = f":{self.path}" if self.path is not None else ""
        length = f":{self.draft_len}" if self.draft_len else ""
        return self.method + path + length + "".join(f",{k}={_text(v)}" for k, v in self.options)

    def integer(self, key: str) -> int:
        """Value of a whole-number option."""
        return int(dict(self.options)[key])

    def number(self, key: str) -> float:
        """Value of a real-number option."""
        return float(dict(self.options)[key])

    def flag(self, key: str) -> bool:
        """Value of a true-or-false option."""
        return bool(dict(self.options)[key])

    def choice(self, key: str) -> str:
        """Value of an option that is one of several words."""
        return str(dict(self.options)[key])


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """What a drafter may know of the engine that builds it. `vocab_size` is the target's logit
    width, `max_context` its limit in tokens, `max_users` the most rows of a batch. Drafters with
    weights also read `tokenizer` (a Hugging Face fast one), `dtype` (torch), `device` and
    `prefix_cache` (whether prompts may reuse what other requests computed). Drafters on the
    target's features also read `target`, its `models.loading.LoadedModel`, and the size of its
    cache, `pages` of `page_size` positions.
    """

    vocab_size: int
    max_context: int
    max_users: int
    tokenizer: Any = None
    dtype: Any = None
    device: str = "cpu"
    prefix_cache: bool = True
    target: Any = None
    pages: int = 0
    page_size: int = 16


def parse(spec: str) -> DrafterSpec:
    """Read a spec; raises `InvalidConfig` with one sentence that lists what exists."""
    text = spec.strip()
    name = re.split("[:,]", text, maxsplit=1)[0]
    method = METHODS.get(name)
    if method is None:
        raise InvalidConfig(
            f"Unknown drafter {name!r} in {spec!r}; there are: {', '.join(METHODS)}."
        )
    head, pairs = _split(method, text[len(name) :], spec)
    path, draft_len = _path_and_length(method, head, spec)
    return DrafterSpec(method.name, path, draft_len, _options(method, pairs, spec))


def build(spec: str | DrafterSpec, *, context: DrafterContext) -> Drafter:
    """Make the drafter a spec names. Raises `InvalidConfig` for a bad spec and `ModelError` where
    its weights are missing or do not fit the target.
    """
    resolved = parse(spec) if isinstance(spec, str) else spec
    module, _, function = METHODS[resolved.method].factory.partition(":")
    factory = cast(
        "Callable[[DrafterSpec, DrafterContext], Drafter]",
        getattr(importlib.import_module(module), function),
    )
    return factory(resolved, context)


def _text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool | str) else repr(value)


# A path may hold commas and colons, so options are what ends the text in the form `,key=value`.
_TRAILING_OPTIONS = re.compile(r"(?:,[A-Za-z_]\w*=[^,:/]*)*$")


def _split(method: Method, rest: str, spec: str) -> tuple[str, list[tuple[str, str]]]:
    """Head (path and draft_len) and the option pairs of what follows `name`."""
    if method.takes_path:
        match = _TRAILING_OPTIONS.search(rest)
        start = match.start() if match else len(rest)
    else:
        start = rest.find(",") if "," in rest else len(rest)
    pairs = []
    for part in rest[start:].split(",")[1:]:
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidConfig(
                f"{part!r} in drafter {spec!r} is no key=value; write {method.usage}."
            )
        pairs.append((key, value))
    return rest[:start], pairs


def _path_and_length(method: Method, head: str, spec: str) -> tuple[str | None, int]:
    """`head` is empty or begins with a colon."""
    if not method.takes_path or (method.ships and re.fullmatch(r"(?::[+-]?\d+)?", head)):
        return None, _draft_len(method, head, spec)
    path, colon, last = head[1:].rpartition(":")
    if not colon or not re.fullmatch(r"[+-]?\d+", last):
        path, colon, last = head[1:], "", ""
    if not path or re.fullmatch(r"[+-]?\d+", path):
        raise InvalidConfig(f"Drafter {spec!r} names no model path; write {method.usage}.")
    return path, _draft_len(method, colon + last, spec)


def _draft_len(method: Method, head: str, spec: str) -> int:
    if not head:
        return method.draft_len
    if not method.draft_len:
        raise InvalidConfig(f"Drafter {spec!r} takes no draft_len; write {method.usage}.")
    text = head[1:]
    value = int(text) if re.fullmatch(r"[+-]?\d{1,9}", text) else 0
    if not 1 <= value <= MAX_DRAFT_LEN:
        raise InvalidConfig(
            f"draft_len is {text!r} in drafter {spec!r}; "
            f"allowed: a whole number from 1 to {MAX_DRAFT_LEN}, as in {method.usage}."
        )
    return value


def _options(
    method: Method, pairs: list[tuple[str, str]], spec: str
) -> tuple[tuple[str, OptionValue], ...]:
    known = {option.key: option for option in method.options}
    values: dict[str, OptionValue] = {o.key: o.default for o in method.options}
    given: set[str] = set()
    for key, text in pairs:
        if key not in known:
            exist = ", ".join(known) or "none"
            raise InvalidConfig(
                f"Unknown key {key!r} in drafter {spec!r}; keys of {method.name}: {exist}."
            )
        if key in given:
            raise InvalidConfig(f"Key {key!r} is given twice in drafter {spec!r}; keep one.")
        given.add(key)
        values[key] = _value(known[key], text, spec)
    for low, high in method.ordered:
        _settle_order(values, given, (low, high), spec)
    return tuple(values.items())


def _settle_order(
    values: dict[str, OptionValue], given: set[str], pair: tuple[str, str], spec: str
) -> None:
    """`min=5` alone raises a default max of 4 to 5 (and the like); two given values must agree."""
    low, high = pair
    if float(values[low]) <= float(values[high]):
        return
    if low in given and high in given:
        raise InvalidConfig(
            f"{low} is {values[low]} and {high} is {values[high]} in drafter {spec!r}; "
            f"{low} may not exceed {high}."
        )
    if low in given:
        values[high] = values[low]
    else:
        values[low] = values[high]


def _value(option: Option, text: str, spec: str) -> OptionValue:
    value: OptionValue | None = None
    if isinstance(option.default, bool):
        value = {"true": True, "false": False}.get(text.lower())
    elif option.choices:
        value = text if text in option.choices else None
    else:
        try:
            value = int(text) if isinstance(option.default, int) else float(text)
        except ValueError:
            value = None
        if value is not None and not option.low <= value <= option.high:
            value = None
    if value is None:
        raise InvalidConfig(
            f"{option.key} is {text!r} in drafter {spec!r}; allowed: {option.allowed}."
        )
    return value
