"""Choosing and accepting on the device: the host's laws and uniforms, in Triton's interpreter."""

import tests.interpreter  # noqa: F401, I001  first: it turns the interpreter on

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from slipstream.sampling import fused
from slipstream.sampling.fused import BROKEN, SKIPPED, Chooser, Knobs
from slipstream.sampling.probs import draw, truncate
from slipstream.sampling.uniforms import Purpose, Uniforms
from slipstream.types import SamplingParams

BLOCK = 1024  # so that laws of a few thousand tokens cross several
SALT = Purpose.NEXT.value
GREEDY = SamplingParams()
CPU = torch.device("cpu")


def knobs_of(params, seeds=None):
    def table(name, dtype):
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype)

    return Knobs(
        heat=table("temperature", torch.float32),
        top_p=table("top_p", torch.float64),
        min_p=table("min_p", torch.float32),
        top_k=table("top_k", torch.int32),
        seed=torch.tensor(seeds if seeds is not None else [0] * len(params)),
    )


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(fused, "BLOCK", BLOCK)


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


# --- uniforms ------------------------------------------------------------------------------------


@triton.jit
def _uniforms_kernel(seeds, positions, out, count, salt, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    seed = tl.load(seeds + at, mask=at < count)
    position = tl.load(positions + at, mask=at < count)
    tl.store(out + at, fused._uniform(seed, position, salt), mask=at < count)


@pytest.mark.parametrize("purpose", Purpose)
def test_uniforms_are_those_of_the_host_to_the_last_bit(purpose):
    rng = np.random.default_rng(1)
    seeds = np.concatenate([rng.integers(0, 2**63, 2000), 2**63 - 1 - np.arange(50), np.arange(50)])
    positions = rng.integers(0, 200_000, len(seeds))
    out = torch.empty(len(seeds), dtype=torch.float64)
    tables = torch.from_numpy(seeds), torch.from_numpy(positions).int()
    _uniforms_kernel[(1,)](*tables, out, len(seeds), purpose.value, BLOCK=4096)
    assert np.array_equal(out.numpy(), Uniforms()(seeds, positions, purpose))


# --- greedy rows ---------------------------------------------------------------------------------


class Table:
    """A few slots with random tokens, and what a step over them commits."""

    def __init__(self, rng, *, rows, width, vocab, capacity=40, params=None, seeds=None):
        self.rows, self.width, self.vocab = rows, width, vocab
        slots = rows + 2  # one idle, and the last is nobody's
        self.slot_of = rng.permutation(slots - 1)[:rows]
        self.start = rng.integers(0, capacity - width - 2, slots)
        self.length = np.zeros(slots, np.int64)
        self.tokens = torch.from_numpy(rng.integers(0, vocab, (slots, capacity))).int()
        self.lengths = ints(self.start + 1)
        self.knobs = knobs_of(params or [GREEDY] * slots, seeds)

    def step(self, logits, fed, *, forced=None, fed_dtype=torch.int64):
        sampled = bool((self.knobs.heat > 0).any())
        chooser = Chooser(self.rows, self.width, vocab=self.vocab, device=CPU)
        where = {"slot_of": ints(self.slot_of), "row_start": ints(self.start)}
        result = torch.full((self.rows, 2 + self.width), -7, dtype=torch.int32)
        if logits is None:  # the same for all: token 0
            chooser._peaks.zero_(), chooser._ids.zero_()
        else:
            chooser.choose(logits, **where, knobs=self.knobs, salt=SALT if sampled else 0)
        chooser.accept(
            torch.from_numpy(fed).to(fed_dtype),
            **where,
            row_length=ints(self.length),
            knobs=self.knobs,
            tokens=self.tokens,
            lengths=self.lengths,
            result=result,
            sampled=sampled,
            forced=forced,
        )
        return result.tolist()


def reference(choices, sound, draft):
    """Accepted count or `BROKEN`, and the committed tokens."""
    accepted = 0
    while accepted < len(draft) and sound[accepted] and choices[accepted] == draft[accepted]:
        accepted += 1
    if not all(sound[: accepted + 1]):
        return BROKEN, []
    return accepted, list(choices[: accepted + 1])


def half_right(rng, choices, vocab):
    """Draft tokens of which most are what will be chosen."""
    wrong = rng.integers(0, vocab, choices.shape)
    return np.where(rng.random(choices.shape) < 0.75, choices, wrong)


@pytest.mark.parametrize("width", [1, 3, 4, 8])
@pytest.mark.parametrize(("vocab", "dtype"), [(300, torch.float32), (9000, torch.bfloat16)])
def test_greedy_rows_commit_what_a_plain_loop_commits(width, vocab, dtype):
    rng = np.random.default_rng(width * vocab)
    seen = set()
    for trial in range(2):
        table = Table(rng, rows=7, width=width, vocab=vocab)
        scores = rng.normal(size=(7 * width, vocab)).astype(np.float32)
        logits = torch.from_numpy(scores).to(dtype).float()
        bad = np.append(0, rng.choice(np.arange(1, 7 * width), width, replace=False))
        where = rng.integers(0, vocab, len(bad))
        logits[bad, where] = torch.tensor(rng.choice([np.nan, np.inf], len(bad))).float()
        table.slot_of[5:] = len(table.length) - 1  # padding
        for row, slot in enumerate(table.slot_of[:5]):
            table.length[slot] = 0 if row == 1 else rng.integers(1, width + 1)
        sound = np.isfinite(logits.max(-1).values.numpy()).reshape(7, width)
        choices = logits.numpy().argmax(-1).reshape(7, width)
        fed = np.zeros((7, width), np.int64)
        fed[:, 1:] = half_right(rng, choices, vocab)[:, :-1]
        tokens, lengths = table.tokens.clone(), table.lengths.clone()
        kind = (torch.int64, torch.int32)[trial % 2]
        result = table.step(logits.to(dtype), fed.ravel(), fed_dtype=kind)
        for row, slot in enumerate(table.slot_of):
            length = table.length[slot]
            if not length:
                assert result[row][1:] == [SKIPPED] + [-1] * width
                continue
            draft = fed[row, 1:length]
            accepted, committed = reference(choices[row], sound[row], draft)
            seen.add(accepted)
            blank = [-1] * (width - len(committed))
            assert result[row] == [length - 1, accepted, *committed, *blank]
            start = table.start[slot]
            tokens[slot, start + 1 : start + 1 + len(committed)] = ints(committed)
            lengths[slot] += len(committed)
        assert torch.equal(table.tokens, tokens)
        assert torch.equal(table.lengths, lengths)
    assert BROKEN in seen
    assert width == 1 or max(seen) > 0


def test_a_nan_behind_a_rejection_harms_nobody():
    table = Table(np.random.default_rng(0), rows=1, width=4, vocab=300)
    table.length[table.slot_of[0]] = 4
    logits = torch.zeros(4, 300)
    logits[0, 5] = logits[1, 6] = 1
    logits[2:] = float("nan")
    assert table.step(logits, np.array([1, 5, 9, 9])) == [[3, 1, 5, 6, -1, -1]]
    assert table.step(logits, np.array([1, 5, 6, 9])) == [[3, BROKEN, -1, -1, -1, -1]]


def test_logits_without_a_finite_one_are_broken():
    table = Table(np.random.default_rng(0), rows=1, width=1, vocab=300)
    table.length[table.slot_of[0]] = 1
    assert table.step(torch.full((1, 300), -torch.inf), np.zeros(1, np.int64))[0][1] == BROKEN


def test_ties_go_to_the_lowest_id_within_and_across_parts():
    table = Table(np.random.default_rng(0), rows=3, width=1, vocab=9000)
    table.length[:] = 1
    logits = torch.zeros(3, 9000)
    logits[0, [700, 5000, 8999]] = 1
    logits[1, [4096, 4097, 8500]] = 1
    logits[2, :40] = -1
    result = table.step(logits, np.zeros(3, np.int64))
    assert [row[2] for row in result] == [700, 4096, 40]


# --- draws ---------------------------------------------------------------------------------------


def drawn(logits, params, seeds, positions):
    """The chooser's tokens, one a row of `logits`."""
    rows, vocab = logits.shape
    chooser = Chooser(rows, 1, vocab=vocab, device=CPU)
    chooser.choose(
        logits,
        slot_of=torch.arange(rows, dtype=torch.int32),
        row_start=ints(positions) - 1,
        knobs=knobs_of(params, seeds),
        salt=SALT,
    )
    return chooser._chosen.numpy()


LAWS = {
    "open": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.05},
    "icy": {"temperature": 1e-35},
    "k": {"top_k": 20},
    "k1": {"top_k": 1},
    "k all": {"top_k": 100_000},
    "p": {"top_p": 0.9},
    "p hot": {"top_p": 0.8, "temperature": 2.0},
    "p low": {"top_p": 0.01},
    "m": {"min_p": 0.05},
    "k p": {"top_k": 20, "top_p": 0.7},
    "k p cut at the floor": {"top_k": 20, "top_p": 0.99},
    "k m": {"top_k": 30, "min_p": 0.2},
    "p m": {"top_p": 0.95, "min_p": 0.1, "temperature": 1.5},
    "k p m": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 0.7},
}


def normal(rng, rows, vocab):
    return torch.from_numpy(rng.normal(size=(rows, vocab)) * 3).float()


def tied(rng, rows, vocab):
    """Few values, so that every cut falls among ties; zeros of both signs; some banned."""
    logits = torch.from_numpy(rng.integers(-6, 3, (rows, vocab)) / 2.0).float()
    logits[:, ::7] = -torch.inf
    logits[logits == 0] *= torch.from_numpy(
        rng.choice([-1.0, 1.0], int((logits == 0).sum()))
    ).float()
    return logits.bfloat16()


def flat(rng, rows, vocab):
    return torch.full((rows, vocab), float(rng.normal())).bfloat16()


SHAPES = {
    "normal 300": (normal, 300),
    "bf16 2500": (lambda *a: normal(*a).bfloat16(), 2500),
    "tied 300": (tied, 300),
    "tied 2049": (tied, 2049),
    "flat 1000": (flat, 1000),
}


def is_neighbor(scores, one, uniform, token):
    """Whether rounding may have moved the draw there: the uniform is at an end of its slice."""
    ids, probs = truncate(scores, one)
    at = np.searchsorted(ids, token)
    if at == len(ids) or ids[at] != token:
        return False
    ends = np.concatenate([[0.0], np.cumsum(probs)])
    return ends[at] - 1e-6 < uniform < ends[at + 1] + 1e-6


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_are_those_of_the_host(shape):
    make, vocab = SHAPES[shape]
    rng = np.random.default_rng(vocab)
    rows = 2 if vocab <= 1000 else 1
    wrong = total = 0
    for law in LAWS.values():
        params = [SamplingParams(**{"temperature": 1.0, **law})] * rows
        logits = make(rng, rows, vocab)
        seeds, positions = rng.integers(0, 2**63, rows), rng.integers(1, 10**5, rows)
        uniforms = Uniforms()(seeds, positions, Purpose.NEXT)
        got = drawn(logits, params, seeds.tolist(), positions)
        expected = draw(logits.float(), params, uniforms)
        for row in np.flatnonzero(got != expected):
            scores = logits[row].float().numpy()
            assert is_neighbor(scores, params[row], uniforms[row], got[row]), (law, row)
            wrong += 1
        total += rows
    assert wrong <= max(1, total / 500)


CUTS = {
    "k": {"top_k": 5},
    "p": {"top_p": 0.8},
    "m": {"min_p": 0.2},
    "k p": {"top_k": 5, "top_p": 0.7},
    "k p cut at the floor": {"top_k": 5, "top_p": 0.99},
    "k m": {"top_k": 8, "min_p": 0.2},
    "k p m": {"top_k": 8, "top_p": 0.9, "min_p": 0.05},
}


@pytest.mark.parametrize("law", CUTS)
@pytest.mark.parametrize("make", [normal, tied, flat], ids=lambda f: f.__name__)
def test_the_kept_set_is_that_of_truncate(law, make, monkeypatch):
    """Uniforms all over the law, in place of the seeds: every kept token is drawn, no other."""
    monkeypatch.setattr(fused, "_uniform", _given_uniform)
    one = SamplingParams(temperature=1.0, **CUTS[law])
    logits = make(np.random.default_rng(5), 1, 13).bfloat16()
    ids, probs = truncate(logits[0].float().numpy(), one)
    # The middle of each kept token's slice, and both ends of them all.
    grid = np.array([*(np.cumsum(probs) - probs / 2), 0.0, 1 - 2.0**-53])
    seeds, count = (grid * 2.0**53).astype(np.int64), len(grid)
    got = drawn(logits.repeat(count, 1), [one] * count, seeds.tolist(), np.ones(count))
    assert got.tolist() == [*ids, ids[0], ids[-1]]


@triton.jit
def _given_uniform(seed, position, salt):
    return seed.to(tl.float64) * (1.0 / 9007199254740992.0)


def test_top_k_ties_are_cut_before_top_p_weighs_them():
    """Three of five ties survive top_k; 0.6 of their mass is two, where 0.6 of five were three."""
    logits = torch.tensor([[-9.0, 1.0, 1.0, -9.0, 1.0, 1.0, 1.0]]).repeat(12, 1)
    one = SamplingParams(temperature=1.0, top_k=3, top_p=0.6)
    got = drawn(logits.bfloat16(), [one] * 12, list(range(12)), np.ones(12))
    assert set(got.tolist()) == {1, 2}


def test_sampled_and_greedy_rows_share_a_step():
    rng = np.random.default_rng(3)
    rows, width, vocab = 4, 3, 500
    hot = SamplingParams(temperature=0.9, top_p=0.9)
    params = [hot, GREEDY, hot, GREEDY, hot, GREEDY]
    seeds = rng.integers(0, 2**63, len(params))
    for _ in range(2):
        table = Table(rng, rows=rows, width=width, vocab=vocab, params=params, seeds=seeds.tolist())
        table.length[table.slot_of] = width
        logits = normal(rng, rows * width, vocab)
        logits[1, 4] = torch.nan
        choices = np.empty((rows, width), np.int64)
        for row, slot in enumerate(table.slot_of):
            positions = table.start[slot] + 1 + np.arange(width)
            uniforms = Uniforms()(np.repeat(seeds[slot], width), positions, Purpose.NEXT)
            own = logits[row * width : (row + 1) * width].nan_to_num(0)
            choices[row] = draw(own, [params[slot]] * width, uniforms)
        fed = np.zeros((rows, width), np.int64)
        fed[:, 1:] = half_right(rng, choices, vocab)[:, :-1]
        sound = np.isfinite(logits.max(-1).values.numpy()).reshape(rows, width)
        for row, values in enumerate(table.step(logits, fed.ravel())):
            accepted, committed = reference(choices[row], sound[row], fed[row, 1:])
            assert values == [width - 1, accepted, *committed, *[-1] * (width - len(committed))]


# --- synthetic acceptance ------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [1.3, 3.0])
def test_forced_acceptance_has_the_mean_asked_for(forced):
    rng = np.random.default_rng(7)
    rows, width = 120, 4
    table = Table(rng, rows=rows, width=width, vocab=300)
    table.length[table.slot_of] = width
    fed = rng.integers(300, 400, rows * width)  # never what the target would choose
    result = np.array(table.step(None, fed, forced=forced))
    accepted = result[:, 1]
    assert set(accepted) <= {int(forced), int(np.ceil(forced))}
    assert abs(accepted.mean() - forced) < 4 * 0.5 / np.sqrt(rows)
    for row in range(rows):
        drafted = fed.reshape(rows, width)[row, 1 : 1 + accepted[row]]
        assert np.array_equal(result[row, 2 : 2 + accepted[row]], drafted)
        assert result[row, 2 + accepted[row] :].tolist() == [0] + [-1] * (3 - accepted[row])


def test_forced_acceptance_stops_at_what_was_drafted():
    table = Table(np.random.default_rng(7), rows=2, width=4, vocab=300)
    table.length[table.slot_of] = [2, 0]
    result = table.step(None, np.full(8, 9), forced=3.0)
    assert [row[:2] for row in result] == [[1, 1], [-1, SKIPPED]]
