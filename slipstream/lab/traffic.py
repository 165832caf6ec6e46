"""From a grid's cells to requests: which prompts, which salt, which seed, in which order."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence

from slipstream.lab.backends.base import TargetInfo
from slipstream.lab.grid import OWN, Cell, Grid
from slipstream.lab.looping import DISTINCT_BIGRAMS, distinct_bigram_ratio
from slipstream.lab.prompts import Prompt, load, with_salt
from slipstream.lab.samples import Request
from slipstream.types import SamplingParams

CountTokens = Callable[[str], int]

LINT_WORDS = 50  # shorter prompts say too little about their nature
DISTINCT_WORDS = 0.95  # natural text and code repeat words; tokens drawn at random hardly ever do

WARMUP = (
    "The harbor office keeps a list of every boat that comes in, with its length, its flag and the "
    "hour of arrival. Last year the list was on paper. This year the clerk types it into a table, "
    "and the pilots read it from their phones before they leave the quay. Say in a few sentences "
    "what the pilots gain from the change, and what they might miss about the paper list."
)


def cell_prompts(
    grid: Grid, cell: Cell, *, count_tokens: CountTokens, own: Sequence[Prompt] | None = None
) -> list[list[Prompt]]:
    """Unsalted prompts of a cell, one list a repeat. `own`: the user's prompts for OWN traffic.

    The seed is the grid's, so that greedy and sampled cells of one class get the same prompts.
    """
    count = cell.prompts * (grid.repeats if cell.fresh_prompts else 1)
    if cell.traffic == OWN:
        found = list(own or ())[:count]
    else:
        found = load(
            cell.traffic,
            seed=grid.seed,
            count=count,
            tokens=cell.document_tokens,
            count_tokens=count_tokens,
        )
    if not cell.fresh_prompts:
        return [found] * grid.repeats
    return [found[i * cell.prompts : (i + 1) * cell.prompts] for i in range(grid.repeats)]


def cell_requests(
    grid: Grid, cell: Cell, repeat: int, prompts: Sequence[Prompt]
) -> list[list[Request]]:
    """Requests of one repeat, in units: single prompts, or waves of a closed loop.

    Salt and seed differ by prompt and repeat and are the same for every arm, so arms stay matched
    and no cache can help one of them.
    """
    requests = [
        Request(
            id=prompt.id,
            prompt=with_salt(prompt, salt(grid.seed, cell.slug, repeat, prompt.id)),
            params=params(
                grid,
                sampling=cell.sampling,
                max_tokens=limit(
                    cell, draw=number(grid.seed, "limit", cell.slug, repeat, prompt.id)
                ),
                seed=number(grid.seed, "seed", cell.slug, repeat, prompt.id),
            ),
        )
        for prompt in prompts
    ]
    size = cell.unit_size
    units = [requests[i : i + size] for i in range(0, len(requests), size)]
    if len(units) > 1 and len(units[-1]) < cell.users:  # a wave must keep all its users busy
        units[-2:] = [units[-2] + units[-1]]
    return units


def limit(cell: Cell, *, draw: int) -> int:
    """Most output tokens of one request; `draw`: 31 random bits (see `Cell.spread`)."""
    return max(2, round(cell.max_tokens * (1 - cell.spread * draw / 2**31)))


def params(grid: Grid, *, sampling: str, max_tokens: int, seed: int) -> SamplingParams:
    """Sampling of one request. EOS ends every request, in every arm."""
    if sampling == "greedy":
        return SamplingParams(max_tokens=max_tokens, seed=seed)
    s = grid.sampling
    return SamplingParams(
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        max_tokens=max_tokens,
        seed=seed,
    )


def warmup_requests(grid: Grid, *, users: int) -> list[Request]:
    """Short requests to be discarded: they load kernels, caches and clocks, and give a pace."""
    return [
        Request(
            id=f"warmup-{i}",
            prompt=with_salt(
                Prompt(f"warmup-{i}", ({"role": "user", "content": WARMUP},)),
                salt(grid.seed, "warmup", users, str(i)),
            ),
            params=params(grid, sampling="sampled", max_tokens=grid.warmup_tokens, seed=i),
        )
        for i in range(users)
    ]


def salt(*parts: object) -> str:
    """Eight hexadecimal digits that differ wherever `parts` do."""
    return _digest(*parts)[:8]


def number(*parts: object) -> int:
    """A seed (31 bits) that depends on all of `parts`."""
    return int(_digest(*parts)[:8], 16) >> 1


def _digest(*parts: object) -> str:
    return hashlib.sha256("/".join(map(str, parts)).encode()).hexdigest()


def arm_order(arms: Sequence[str], turn: int) -> list[str]:
    """Order of the arms in a turn: rotated, and reversed in every second turn.

    Over 2 x len(arms) turns each arm stands equally often in each place, and each arm comes equally
    often before and after each other one, so that a drift of the machine favors none.
    """
    shift = turn // 2 % len(arms)
    order = [*arms[shift:], *arms[:shift]]
    return order[::-1] if turn % 2 else order


# --- traffic that would not say anything about real traffic ---------------------------------------


def lint(prompts: Sequence[Prompt], info: TargetInfo) -> list[str]:
    """Why a row measured on `prompts` must not be published; empty where nothing is wrong."""
    reasons = []
    raw = sum(p.messages is None for p in prompts)
    if raw and info.chat_template:
        reasons.append(f"{raw} of {len(prompts)} prompts were sent without the chat template")
    noise = sum(looks_random(p.content()) for p in prompts)
    if noise:
        reasons.append(f"{noise} of {len(prompts)} prompts look like random tokens")
    loops = sum(repeats_itself(p.content()) for p in prompts)
    if loops:
        reasons.append(f"{loops} of {len(prompts)} prompts repeat themselves")
    twice = len(prompts) - len({p.content() for p in prompts})
    if twice:
        reasons.append(f"{twice} of {len(prompts)} prompts are copies of others")
    return reasons


def looks_random(text: str) -> bool:
    """True for 50 words or more of which hardly any comes twice, as in no language or code."""
    words = re.findall(r"\w+", text.casefold())
    return len(words) >= LINT_WORDS and len(set(words)) / len(words) > DISTINCT_WORDS


def repeats_itself(text: str) -> bool:
    """True for 50 words or more with under 20 % distinct neighboring pairs."""
    words = text.split()
    return len(words) >= LINT_WORDS and distinct_bigram_ratio(words) < DISTINCT_BIGRAMS
