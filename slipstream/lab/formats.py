"""Numbers and names as the report prints them. Absent is a dash, never zero."""

from __future__ import annotations

from slipstream.lab.results import CellResult, Interval

DASH = "-"


def number(value: float | None) -> str:
    """One or two decimals below 10, one below 100, thousands separators above."""
    if value is None:
        return DASH
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return text[:-1] if abs(value) < 10 and text.endswith("0") else text


def fixed(value: float | None) -> str:
    """Two decimals, for rates, lengths and shares."""
    return DASH if value is None else f"{value:.2f}"


def ratio(value: float | None) -> str:
    """A speedup such as `1.21×`."""
    return DASH if value is None else f"{_bound(value)}×"


def bounds(interval: Interval) -> str:
    """`[low, high]` of a ratio, or nothing where no interval was measured."""
    if interval.low is None or interval.high is None:
        return ""
    return f"[{_bound(interval.low)}, {_bound(interval.high)}]"


def speedup_text(interval: Interval | None) -> str:
    """`1.21× [1.15, 1.27]`, `2.42×` without an interval, a dash without a measurement."""
    if interval is None:
        return DASH
    return f"{ratio(interval.value)} {bounds(interval)}".rstrip()


def measured(interval: Interval | None) -> str:
    """A measurement with its interval in its own unit: `22.3 [21.8, 22.9]`."""
    if interval is None:
        return DASH
    if interval.low is None or interval.high is None:
        return number(interval.value)
    return f"{number(interval.value)} [{number(interval.low)}, {number(interval.high)}]"


def _bound(value: float) -> str:
    """Two decimals; one more where two would print 1.00 for a value that is not 1."""
    text = f"{value:.2f}"
    return f"{value:.3f}" if text == "1.00" and abs(value - 1) >= 0.0005 else text


def users_text(users: int) -> str:
    """`1 user`, `16 users`."""
    return "1 user" if users == 1 else f"{users} users"


def cell_title(cell: CellResult) -> str:
    """`Code, 16 users, greedy`."""
    traffic = cell.traffic[:1].upper() + cell.traffic[1:]
    return ", ".join(part for part in (traffic, users_text(cell.users), cell.sampling) if part)


def arm_name(cell: CellResult) -> str:
    """The arm as rows show it: the baseline and any label (simulated, reference) marked."""
    name = plain_arm_name(cell)
    return f"{name} [{cell.label}]" if cell.label else name


def plain_arm_name(cell: CellResult) -> str:
    """The arm without its label, for places that show the label beside it."""
    return f"{cell.arm} (baseline)" if cell.baseline else cell.arm


def headline_value(cell: CellResult) -> Interval | None:
    """The cell's headline metric: ms/token for one user, total tok/s for more."""
    return cell.ms_per_token if cell.users == 1 else cell.total_tok_s


def headline_unit(cell: CellResult) -> str:
    """Unit of `headline_value`."""
    return "ms/token" if cell.users == 1 else "tok/s"
