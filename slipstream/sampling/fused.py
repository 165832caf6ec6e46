"""Choosing and accepting tokens on the device, without a word from the host.

The same laws as `sampling.probs` and the same keyed uniforms as `sampling.uniforms`, so that a seed
gives the same tokens on either path up to the rounding of sums. One-hot laws only: the token at
each position is drawn from the target's law as if nothing had been drafted, and a draft token holds
iff it is that token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096
"""Logits one program of the first pass looks at."""

BLOCK = 8192
"""Logits a draw looks at in one go."""

SKIPPED, BROKEN = -1, -2
"""In place of the accepted count: the row took no part; its logits have no law."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """Sampling values by slot: float32, float64, float32, int32, int64 [slots]; heat 0 is greedy.

    A float32 top_p works, but where equal tokens fill the nucleus exactly (0.8 of five), its
    rounding decides whether one more is kept.
    """

    heat: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor


@triton.jit
def _peaks_kernel(logits, peaks, ids, vocab, parts, PART: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    values = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    broken = tl.max((values != values).to(tl.int32), 0) > 0
    values = tl.where(values != values, float("-inf"), values)
    best = tl.max(values, 0)
    first = tl.min(tl.where(values == best, at, vocab), 0)
    tl.store(peaks + row * parts + part, tl.where(broken, float("inf"), best))
    tl.store(ids + row * parts + part, first)


@triton.jit
def _mix(word):
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@triton.jit
def _uniform(seed, position, salt):
    """`Uniforms` of one pair, float64."""
    weyl = tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    salt = tl.cast(salt, tl.uint64)
    a = _mix(seed.to(tl.uint64) + salt)
    b = _mix((position.to(tl.uint64) + salt) * weyl)
    word = _mix(a + weyl * b) >> 11
    return word.to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _ordered(values, SHIFT: tl.constexpr):
    """Integers that sort as the float32 values do, both zeros alike.

    SHIFT: low bits that the values never use, so that a search has fewer keys to tell apart.
    """
    bits = tl.where(values == 0, 0.0, values).to(tl.int32, bitcast=True) >> SHIFT
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))


@triton.jit
def _weights(values, peak, cold):
    """exp((value - peak) / temperature); below 2e-35, as in `sampling.probs`, none."""
    weights = tl.exp(tl.maximum((values - peak) * cold, -80.0))
    return tl.where(weights >= 2e-35, weights, 0.0).to(tl.float64)


@triton.jit
def _held(
    line, vocab, cut, peak, cold, BLOCK: tl.constexpr, SHIFT: tl.constexpr, MASS: tl.constexpr
):
    """What the tokens of at least the key `cut` hold: their weight (MASS) or their number."""
    held = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        inside = _ordered(values, SHIFT) >= cut
        if MASS:
            held += tl.where(inside, _weights(values, peak, cold), 0.0)
        else:
            held += inside.to(tl.float64)
    return tl.sum(held, 0)


@triton.jit
def _find_cut(
    line,
    vocab,
    low,
    wanted,
    peak,
    cold,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    MASS: tl.constexpr,
):
    """The highest key above `low` such that the tokens of at least that key hold `wanted`.

    `low` itself where there is none.
    """
    high = _ordered(peak, SHIFT)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up, without overflow
        reached = _held(line, vocab, middle, peak, cold, BLOCK, SHIFT, MASS) >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low


@triton.jit
def _truncate(line, vocab, k, p, peak, cold, BLOCK: tl.constexpr, SHIFT: tl.constexpr):
    """What top_k, then top_p keep: all tokens above the key `floor`, and the first `spare` at it.

    Banned tokens share the lowest floor, at which none is kept.
    """
    floor = _ordered(tl.full((), float("-inf"), tl.float32), SHIFT)
    spare = tl.zeros((), tl.float64)
    if (k > 0) & (k < vocab):
        floor = _find_cut(line, vocab, floor, k.to(tl.float64), peak, cold, BLOCK, SHIFT, False)
        spare = k.to(tl.float64) - _held(line, vocab, floor + 1, peak, cold, BLOCK, SHIFT, False)
    if p < 1.0:
        above = _held(line, vocab, floor + 1, peak, cold, BLOCK, SHIFT, True)
        wanted = p.to(tl.float64) * (above + spare * _weight_of(floor, peak, cold, SHIFT))
        cut = _find_cut(line, vocab, floor, wanted, peak, cold, BLOCK, SHIFT, True)
        above = _held(line, vocab, cut + 1, peak, cold, BLOCK, SHIFT, True)
        need = tl.ceil((wanted - above) / tl.maximum(_weight_of(cut, peak, cold, SHIFT), 2e-35))
        spare = tl.where(cut == floor, tl.minimum(spare, need), need)
        floor = cut
    return floor, spare


@triton.jit
def _weight_of(key, peak, cold, SHIFT: tl.constexpr):
    """Weight of a token with this key: `_ordered` undone."""
    bits = key ^ ((key >> 31) & (0x7FFFFFFF >> SHIFT))
    return _weights((bits << SHIFT).to(tl.float32, bitcast=True), peak, cold)


@triton.jit
def _sweep(
    line,
    vocab,
    floor,
    spare,
    least,
    goal,
    peak,
    cold,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    """The token at which the running sum of the kept weights passes `goal`, and the whole sum."""
    total = tl.zeros((), tl.float64)
    ties = tl.zeros((), tl.int32)
    first = tl.full((), 2147483647, tl.int32)
    last = tl.zeros((), tl.int32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(line + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        keys = _ordered(values, SHIFT)
        tied = (keys == floor).to(tl.int32)
        rank = (ties + tl.cumsum(tied, 0)).to(tl.float64)
        weights = _weights(values, peak, cold)
        kept = (keys > floor) | ((keys == floor) & (rank <= spare))
        kept = kept & (weights > 0) & (weights >= least)
        weights = tl.where(kept, weights, 0.0)
        passed = kept & (total + tl.cumsum(weights, 0) > goal)
        first = tl.minimum(first, tl.min(tl.where(passed, at, 2147483647), 0))
        last = tl.maximum(last, tl.max(tl.where(kept, at, 0), 0))
        total += tl.sum(weights, 0)
        ties += tl.sum(tied, 0)
    # Rounding may leave the goal past the last sum.
    return tl.minimum(first, last), total


@triton.jit
def _draw_kernel(
    logits,
    peaks,
    chosen,
    slot_of,
    row_start,
    heat,
    top_p,
    min_p,
    top_k,
    seed,
    vocab,
    parts,
    salt,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_of + row // WIDTH)
    warmth = tl.load(heat + slot)
    part = tl.arange(0, PARTS)
    at = row.to(tl.int64) * parts + part
    peak = tl.max(tl.load(peaks + at, mask=part < parts, other=float("-inf")), 0)
    sound = (peak < float("inf")) & (peak > float("-inf"))
    if (warmth > 0) & sound:
        line = logits + row.to(tl.int64) * vocab
        cold = 1.0 / tl.maximum(warmth, 1e-30)
        k, p, least = tl.load(top_k + slot), tl.load(top_p + slot), tl.load(min_p + slot)
        floor, spare = _truncate(line, vocab, k, p, peak, cold, BLOCK, SHIFT)
        uniform = _uniform(tl.load(seed + slot), tl.load(row_start + slot) + 1 + row % WIDTH, salt)
        never = tl.full((), float("inf"), tl.float64)
        _, total = _sweep(line, vocab, floor, spare, least, never, peak, cold, BLOCK, SHIFT)
        goal = uniform * total
        token, _ = _sweep(line, vocab, floor, spare, least, goal, peak, cold, BLOCK, SHIFT)
        tl.store(chosen + row, token)


@triton.jit
def _best(peaks, ids, line, mine, parts, PARTS: tl.constexpr):
    """Argmax of each of a row's positions, and whether its logits have a law."""
    part = tl.arange(0, PARTS)
    inside = mine[:, None] & (part < parts)[None, :]
    at = line[:, None] * parts + part[None, :]
    values = tl.load(peaks + at, mask=inside, other=float("-inf"))
    peak = tl.max(values, 1)
    choice = tl.load(ids + line * parts + tl.argmax(values, 1), mask=mine, other=0)
    return choice, (peak < float("inf")) & (peak > float("-inf"))


@triton.jit
def _accept_kernel(
    peaks,
    ids,
    chosen,
    fed,
    slot_of,
    row_start,
    row_length,
    heat,
    tokens,
    lengths,
    result,
    parts,
    capacity,
    forced,
    forced_salt,
    WIDTH: tl.constexpr,
    WIDTH_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    SAMPLED: tl.constexpr,
    FORCED: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slot_of + row)
    start, length = tl.load(row_start + slot), tl.load(row_length + slot)
    place = tl.arange(0, WIDTH_PADDED)
    line = row * WIDTH + place
    mine = place < length
    choice, sound = _best(peaks, ids, line, mine, parts, PARTS)
    if SAMPLED:  # noqa: SIM102  (one is known to the compiler, one to the device)
        if tl.load(heat + slot) > 0:
            choice = tl.load(chosen + line, mask=mine, other=0)
    draft = tl.load(fed + line + 1, mask=place + 1 < length, other=-1).to(tl.int32)
    holds = (choice == draft) & sound
    if FORCED:
        whole = tl.floor(forced)
        more = _uniform(slot.to(tl.int64), start, forced_salt) < forced - whole
        holds = (place < whole.to(tl.int32) + more.to(tl.int32)) & (place + 1 < length)
        # Accepted tokens are the drafted ones, as they would be.
        choice = tl.where(holds, draft, choice)
    accepted = tl.min(tl.where(holds, WIDTH_PADDED, place), 0)
    taken = mine & (place <= accepted)
    broken = tl.max((taken & (sound == 0)).to(tl.int32), 0) > 0
    taken = taken & (broken == 0)
    out = result + row * (WIDTH + 2)
    tl.store(out, length - 1)
    tl.store(out + 1, tl.where(length > 0, tl.where(broken, -2, accepted), -1))
    tl.store(out + 2 + place, tl.where(taken, choice, -1), mask=place < WIDTH)
    tl.store(tokens + slot.to(tl.int64) * capacity + start + 1 + place, choice, mask=taken)
    tl.store(lengths + slot, start + 2 + accepted, mask=(length > 0) & (broken == 0))


class Chooser:
    """Buffers and launches for `rows` rows of up to `width` positions (1 + draft tokens)."""

    def __init__(self, rows: int, width: int, *, vocab: int, device: torch.device) -> None:
        self._rows, self._width, self._vocab = rows, width, vocab
        self._parts = triton.cdiv(vocab, PART)
        count = rows * width
        self._peaks = torch.empty(count, self._parts, dtype=torch.float32, device=device)
        self._ids = torch.empty(count, self._parts, dtype=torch.int32, device=device)
        self._chosen = torch.empty(count, dtype=torch.int32, device=device)

    def choose(
        self, logits: Tensor, *, slot_of: Tensor, row_start: Tensor, knobs: Knobs, salt: int
    ) -> None:
        """First pass over `logits` [rows * width, vocab]; a draw for every row with heat.

        `salt`: the key of `Purpose.NEXT`. Skip the draw with `salt` 0, where all rows are greedy.
        """
        self.parts(logits)
        if salt:
            _draw_kernel[(self._rows * self._width,)](
                logits,
                self._peaks,
                self._chosen,
                slot_of,
                row_start,
                knobs.heat,
                knobs.top_p,
                knobs.min_p,
                knobs.top_k,
                knobs.seed,
                self._vocab,
                self._parts,
                salt,
                WIDTH=self._width,
                PARTS=triton.next_power_of_2(self._parts),
                BLOCK=BLOCK,
                SHIFT=16 if logits.dtype == torch.bfloat16 else 0,
                num_warps=16,
            )

    def best(self, logits: Tensor) -> Tensor:
        """Likeliest token of each row of `logits`, int32 [rows * width]."""
        peaks, ids = self.parts(logits)
        return ids.gather(1, peaks.argmax(1, keepdim=True)).squeeze(1)

    def parts(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Highest logit, float32, and its token, int32, of each part of a row, [rows * width,
        parts] each; good until the next pass. A part with a NaN has a logit of infinity.
        """
        _peaks_kernel[(self._rows * self._width, self._parts)](
            logits, self._peaks, self._ids, self._vocab, self._parts, PART=PART
        )
        return self._peaks, self._ids

    def accept(
        self,
        fed: Tensor,
        *,
        slot_of: Tensor,
        row_start: Tensor,
        row_length: Tensor,
        knobs: Knobs,
        tokens: Tensor,
        lengths: Tensor,
        result: Tensor,
        sampled: bool,
        forced: float | None = None,
    ) -> None:
        """Decide and commit. `fed` int [rows * width]: anchor and draft tokens of each row.

        `tokens` int32 [slots, capacity] and `lengths` int32 [slots] grow by what was committed.
        `result` int32 [rows, 2 + width]: drafted, accepted (or `SKIPPED`, `BROKEN`), the committed
        tokens, -1 behind them. `forced`: synthetic acceptance, mean accepted tokens a row-step.
        """
        _accept_kernel[(self._rows,)](
            self._peaks,
            self._ids,
            self._chosen,
            fed,
            slot_of,
            row_start,
            row_length,
            knobs.heat,
            tokens,
            lengths,
            result,
            self._parts,
            tokens.shape[1],
            forced or 0.0,
            0x5EED,
            WIDTH=self._width,
            WIDTH_PADDED=triton.next_power_of_2(self._width),
            PARTS=triton.next_power_of_2(self._parts),
            SAMPLED=sampled,
            FORCED=forced is not None,
        )
