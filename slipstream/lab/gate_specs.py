"""How each gate of a grid is asked and where its bar lies."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slipstream.errors import InvalidConfig

GATES = ("needle", "json", "lossless", "degenerate")


def require(ok: bool, where: str, name: str, value: object, allowed: str) -> None:
    """Raise `InvalidConfig` in the house's words unless `ok`."""
    if not ok:
        raise InvalidConfig(f"{where}: {name} is {value!r}; allowed: {allowed}.")


def _check_bar(where: str, bar: float) -> None:
    require(0 <= bar <= 1, where, "bar", bar, "0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleGate:
    """Find one fact in `lengths` x `depths` haystacks, `per_point` of each."""

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    per_point: int = 1
    bar: float = 0.67
    max_tokens: int = 24
    users: int = 4

    def __post_init__(self) -> None:
        _check_bar("gates.needle", self.bar)
        ok = bool(self.lengths) and all(length >= 32 for length in self.lengths)
        require(ok, "gates.needle", "lengths", list(self.lengths), "one or more, each at least 32")
        ok = bool(self.depths) and all(0 <= depth <= 1 for depth in self.depths)
        require(ok, "gates.needle", "depths", list(self.depths), "one or more, each 0 to 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonGate:
    """Answer with a small JSON object; valid if the required keys have the required types."""

    prompts: int = 8
    bar: float = 0.67
    max_tokens: int = 96
    users: int = 4

    def __post_init__(self) -> None:
        _check_bar("gates.json", self.bar)
        require(self.prompts >= 1, "gates.json", "prompts", self.prompts, "1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class LosslessGate:
    """Compare an arm's tokens with the baseline's, fork by fork.

    `tolerance` is the distance (nats) from the target's likeliest token within which a greedy fork
    is numeric. The control is the baseline against itself at `control_users`, i.e. at another batch
    width.

    `measured`: compare the answers of the cells' first repeat instead of asking for more; the
    control asks the baseline `prompts` of them again, of each sampling mode. A grid without a
    greedy cell has none to compare: then it is `prompts` of `traffic` that are asked.
    """

    prompts: int = 8
    measured: bool = False
    traffic: str = "code"
    max_tokens: int = 64
    users: int = 8
    control_users: int = 4
    tolerance: float = 0.5

    def __post_init__(self) -> None:
        where = "gates.lossless"
        require(self.prompts >= 1, where, "prompts", self.prompts, "1 or more")
        require(self.tolerance >= 0, where, "tolerance", self.tolerance, "0 or more")
        require(
            self.control_users != self.users,
            where,
            "control_users",
            self.control_users,
            f"another batch width than users ({self.users})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DegenerateGate:
    """Looping answers, from the measured samples. `bar`: the most an arm may have more than the
    baseline, as a share of its answers (a larger move must also exceed the interval to fail).
    """

    bar: float = 0.0

    def __post_init__(self) -> None:
        _check_bar("gates.degenerate", self.bar)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Gates of a grid. One that is left out counts as missing: no row is publishable."""

    needle: NeedleGate | None = None
    json: JsonGate | None = None
    lossless: LosslessGate | None = None
    degenerate: DegenerateGate | None = None

    def quickened(self) -> Gates:
        """The same gates on two tasks each."""
        needle, json_gate, lossless = self.needle, self.json, self.lossless
        if needle:
            needle = replace(needle, lengths=needle.lengths[:1], depths=needle.depths[:2])
        if json_gate:
            json_gate = replace(json_gate, prompts=min(2, json_gate.prompts))
        if lossless:
            lossless = replace(lossless, prompts=min(2, lossless.prompts), max_tokens=8)
        return replace(self, needle=needle, json=json_gate, lossless=lossless)
