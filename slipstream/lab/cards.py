"""Cards of the drafters that ship, and their table in docs/drafters.md, made from two JSON records.

`training.json` says what the weights were made of (who trains writes it), `acceptance.json` what
they do in the engine (`bench/drafter_cards.py` writes it). Nothing else is claimed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import InvalidConfig
from slipstream.lab.prompts import TRAFFIC

TRAINING, ACCEPTANCE, CARD = "training.json", "acceptance.json", "README.md"
NEEDED = ("data", "tokens", "recipe", "command", "seed", "hardware")
"""What `training.json` must say: what the texts were, how many tokens, the recipe's settings (a
sentence or a table), the command, its seed, and what it ran on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """A drafter's folder as far as a card tells of it. `parameters`: weights of its own; `size`:
    bytes on disk; `digest`: of config and weights; `acceptance` None where it was not measured.
    """

    method: str
    target: str
    parameters: int
    size: int
    digest: str
    training: Mapping[str, Any]
    acceptance: Mapping[str, Any] | None


def read_record(path: Path, needed: Sequence[str] = ()) -> dict[str, Any] | None:
    """A JSON record, None where there is none. Raises `InvalidConfig` where it is not a table, or
    lacks a key of `needed`.
    """
    if not path.is_file():
        return None
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig(f"{path} is not JSON ({error}); write it again.") from error
    missing = [k for k in needed if k not in record] if isinstance(record, dict) else ["a table"]
    if missing:
        raise InvalidConfig(f"{path} lacks {', '.join(missing)}; a card says all of it.")
    found: dict[str, Any] = record
    return found


def card(drafter: Shipped) -> str:
    """The folder's README.md."""
    record = drafter.training
    spec = drafter.acceptance["drafter"] if drafter.acceptance else drafter.method
    return f"""# {drafter.method} drafter for {drafter.target}

Ships with Slipstream: `--drafter {spec}` finds it. `slipstream export {spec} --out DIR` writes it
in bfloat16, in the layout that vLLM and SGLang read.

- {drafter.parameters:,} parameters of its own, {megabytes(drafter.size)} on disk (int8 rows)
- data: {record["data"]}; {record["tokens"]:,} tokens
- recipe: {_settings(record["recipe"])}
- command: `{record["command"]}`, seed {record["seed"]}
- hardware: {record["hardware"]}
- license: Apache-2.0
- digest of config and weights: `{drafter.digest}`

## Acceptance

{_acceptance(drafter)}"""


def table(drafters: Sequence[Shipped]) -> str:
    """One row a drafter: tokens per step by traffic, size on disk. A dash means not measured."""
    if not drafters:
        return "No drafter ships in this version.\n"
    heads = ["drafter", "parameters", "on disk", *(f"tokens per step, {t}" for t in TRAFFIC)]
    rows = []
    for drafter in drafters:
        found = drafter.acceptance or {"drafter": drafter.method, "classes": {}}
        figures = [_rounded(found["classes"].get(t, {}).get("tokens_per_step")) for t in TRAFFIC]
        millions = f"{drafter.parameters / 1e6:.1f} M"
        rows.append([f"`{found['drafter']}`", millions, megabytes(drafter.size), *figures])
    return _markdown(heads, rows)


def megabytes(size: int) -> str:
    """Bytes for people."""
    return f"{size / 1e6:.1f} MB"


def _acceptance(drafter: Shipped) -> str:
    found = drafter.acceptance
    if found is None:
        return "Not measured yet.\n"
    width = max(len(c["by_position"]) for c in found["classes"].values())
    heads = ["traffic", "tokens per step", "acceptance rate", *map(str, range(1, width + 1))]
    heads.append("answers that loop")
    rows = []
    for name, values in found["classes"].items():
        shares = [*values["by_position"], *[None] * width][:width]
        rows.append(
            [
                name,
                _rounded(values["tokens_per_step"]),
                _rounded(values["acceptance_rate"]),
                *map(_rounded, shares),
                f"{values['looping']} of {values['answers']}",
            ]
        )

    how = f"greedy, {found['dtype']}, {found['users']} users, {found['device']}"
    return f"""Measured in the engine by `{found["command"]}`
({how}; {found["time"]}):
answers of up to {found["max_tokens"]} tokens to the lab's own prompts. Columns 1 to {width}: of the
draft tokens whose predecessors were all kept, the share that was kept. Text that loops is easy.

{_markdown(heads, rows)}"""


def _settings(recipe: Any) -> str:
    if isinstance(recipe, Mapping):
        return ", ".join(f"{key} {value}" for key, value in recipe.items() if value is not None)
    return str(recipe)


def _rounded(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
