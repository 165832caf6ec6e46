"""From a ledger to what the report prints. Reads only: the same ledger gives the same result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream import metrics
from slipstream.lab import gate_runner, grid, ledger, stats, traffic
from slipstream.lab.gate_specs import GATES
from slipstream.lab.gates import judge_degenerate
from slipstream.lab.grid import Cell, Grid
from slipstream.lab.looping import long_enough, sample_loops
from slipstream.lab.results import CellResult, GateResult, GateStatus, GridResult
from slipstream.lab.samples import Sample, by_unit, window
from slipstream.lab.scrutiny import (
    cell_warnings,
    drafter_reasons,
    drafter_warnings,
    matched_reasons,
    record_reasons,
)
from slipstream.lab.stats import Unit
from slipstream.types import StageTimes, StepRecord

Key = tuple[int, int]  # prompt or wave, repeat
UnitsOf = Callable[[Mapping[Key, Sequence[Sample]]], list[Unit]]


@dataclass(frozen=True, slots=True)
class Measured:
    """All samples of one arm on one cell, by repeat."""

    cell: Cell
    arm: str
    repeats: Mapping[int, list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        """Every sample, repeat by repeat."""
        return [s for rows in self.repeats.values() for s in rows]

    @property
    def units(self) -> dict[Key, list[Sample]]:
        """Samples of each prompt or wave in each repeat."""
        return {
            (unit, repeat): rows
            for repeat, every in sorted(self.repeats.items())
            for unit, rows in sorted(by_unit(every).items())
        }


def analyze(directory: Path) -> GridResult:
    """The result of a run, finished or not. Raises `LedgerError` where it cannot be read."""
    records = ledger.read(directory)
    head = ledger.header(records)
    plan = grid.from_table(head["grid"], name=head["grid"]["name"])
    measured = _measured(directory, records, plan)
    gates = _gates(records, plan, measured)
    cells: list[CellResult] = []
    warnings: list[str] = []
    for cell in plan.cells:
        arms = measured.get(cell.slug)
        if not arms:
            warnings.append(f"{cell.name}: not measured; start the same grid again to go on.")
            continue
        found = [_cell(plan, head, m, arms[plan.baseline], gates) for m in arms.values()]
        cells += found
        warnings += cell_warnings(plan, cell, found, arms[plan.baseline].units)
        warnings += [w for m in arms.values() for w in drafter_warnings(cell, m.arm, m.samples)]
    return GridResult(
        run=head["run"],
        title=plan.title,
        meta=_meta(head, records, plan),
        cells=tuple(cells),
        gates=tuple(gates),
        warnings=(*warnings, *_few(plan, measured), *_run_warnings(head, records, plan)),
    )


def _measured(
    directory: Path, records: Sequence[ledger.Record], plan: Grid
) -> dict[str, dict[str, Measured]]:
    """Cell slug -> arm -> samples, from complete blocks only, so that repeats are equal."""
    blocks = ledger.complete_blocks(records, plan.arms)
    found: dict[str, dict[str, Measured]] = {}
    for cell in plan.cells:
        repeats = sorted(r for slug, r in blocks if slug == cell.slug)
        if repeats:
            found[cell.slug] = {
                arm: Measured(
                    cell,
                    arm,
                    {r: ledger.read_samples(directory, blocks[cell.slug, r][arm]) for r in repeats},
                )
                for arm in plan.arms
            }
    return found


# --- gates ----------------------------------------------------------------------------------------


def _gates(
    records: Sequence[ledger.Record], plan: Grid, measured: Mapping[str, Mapping[str, Measured]]
) -> list[GateResult]:
    """Every gate on every arm, what is missing included."""
    found = [gate_runner.from_record(r) for r in records if r["kind"] == "gate"]
    if plan.gates.degenerate is not None and measured:
        loops = {arm: _loops(arms[arm] for arms in measured.values()) for arm in plan.arms}
        found += [
            judge_degenerate(
                arm, loops[arm], baseline=loops[plan.baseline], bar=plan.gates.degenerate.bar
            )
            for arm in plan.arms
        ]
    there = {(g.arm, g.gate) for g in found}
    for gate in GATES:
        why = "has not run yet" if getattr(plan.gates, gate) else "is not part of this grid"
        found += [
            GateResult(arm, gate, GateStatus.MISSING, None, None, None, None, f"The gate {why}.")
            for arm in plan.arms
            if (arm, gate) not in there
        ]
    order = {(arm, gate): i for i, (gate, arm) in enumerate(_pairs(GATES, plan.arms))}
    return sorted(found, key=lambda g: order[g.arm, g.gate])


def _pairs(first: Iterable[str], second: Sequence[str]) -> Iterable[tuple[str, str]]:
    return ((a, b) for a in first for b in second)


def _loops(cells: Iterable[Measured]) -> dict[tuple[str, str], bool]:
    """(cell, prompt) -> did any repeat loop?"""
    found: dict[tuple[str, str], bool] = {}
    for measured in cells:
        for sample in measured.samples:
            key = measured.cell.slug, sample.id
            found[key] = found.get(key, False) or sample_loops(sample)
    return found


# --- one row --------------------------------------------------------------------------------------


def _cell(
    plan: Grid,
    head: ledger.Record,
    m: Measured,
    baseline: Measured,
    gates: Sequence[GateResult],
) -> CellResult:
    seed = traffic.number(plan.seed, "bootstrap", m.cell.slug)
    samples, units = m.samples, m.units
    records = [r for s in samples for r in s.records or ()]
    accepted = metrics.acceptance(records) if records else None
    is_baseline = m.arm == plan.baseline
    headline = decode_units if m.cell.users == 1 else total_units
    ratio = None if is_baseline else stats.speedup(*_paired(baseline, m, headline), seed=seed)
    decode = None
    if headline is total_units and not is_baseline:
        decode = stats.speedup(*_paired(baseline, m, decode_units), seed=seed)
    copied = [s.copied for s in samples if s.copied is not None]
    steps = accepted.tokens_per_step if accepted else None
    length_ratio = _length_ratio(samples, baseline.samples)
    reasons = [
        *_gate_reasons(gates, m.arm),
        *_run_reasons(plan, head, m),
        *record_reasons(samples),
        *drafter_reasons(samples),
        *([] if is_baseline else matched_reasons(samples, baseline.samples, bars=plan.bars)),
        *([] if is_baseline else _baseline_reasons(gates, baseline)),
    ]
    return CellResult(
        target=head["target"]["target"],
        arm=m.arm,
        traffic=m.cell.traffic,
        users=m.cell.users,
        sampling=m.cell.sampling,
        baseline=is_baseline,
        batch=head["run"],
        ms_per_token=stats.mean_cost(decode_units(units), seed=seed, scale=1e3),
        user_tok_s=stats.mean_rate(decode_units(units), seed=seed),
        total_tok_s=stats.mean_rate(total_units(units), seed=seed),
        ttft_ms=stats.median(first_units(units), seed=seed, scale=1e3),
        tokens_per_step=steps,
        acceptance_length=accepted.acceptance_length if accepted else None,
        acceptance_rate=accepted.acceptance_rate if accepted else None,
        by_position=accepted.by_position if accepted else (),
        speedup=ratio,
        efficiency=metrics.efficiency(ratio.value, steps) if ratio and steps else None,
        stage_ms=stage_ms(units),
        repeats=len(m.repeats),
        prompts=len({s.id for s in samples}),
        tokens=sum(s.tokens for s in samples),
        looping=sum(map(sample_loops, samples)),
        judged_for_loops=sum(map(long_enough, samples)),
        output_length_ratio=None if is_baseline else length_ratio,
        publishable=not reasons,
        reasons=tuple(reasons),
        label=head["target"]["label"],
        decode_speedup=decode,
        copied=sum(copied) / len(copied) if copied else None,
    )


def _paired(baseline: Measured, arm: Measured, units_of: UnitsOf) -> tuple[list[Unit], list[Unit]]:
    """Units of both that line up; one that is undefined in either is left out of both."""
    first = {(u.prompt, u.repeat): u for u in units_of(baseline.units)}
    second = {(u.prompt, u.repeat): u for u in units_of(arm.units)}
    keys = sorted(first.keys() & second.keys())
    return [first[k] for k in keys], [second[k] for k in keys]


def decode_units(units: Mapping[Key, Sequence[Sample]]) -> list[Unit]:
    """Seconds after the first chunk, over the tokens after it, of all requests of a unit."""
    found = []
    for (prompt, repeat), rows in units.items():
        timed = [(metrics.tpot(s.timings), sum(s.timings.chunk_tokens[1:])) for s in rows]
        pairs = [(each, tokens) for each, tokens in timed if each is not None]
        seconds = sum(each * tokens for each, tokens in pairs)
        if seconds > 0:
            found.append(Unit(prompt, repeat, seconds, sum(tokens for _, tokens in pairs)))
    return found


def total_units(units: Mapping[Key, Sequence[Sample]]) -> list[Unit]:
    """The unit's window, over all tokens that came out in it."""
    found = []
    for (prompt, repeat), rows in units.items():
        seconds, tokens = window(rows), sum(s.tokens for s in rows)
        if seconds > 0 and tokens:
            found.append(Unit(prompt, repeat, seconds, tokens))
    return found


def first_units(units: Mapping[Key, Sequence[Sample]]) -> list[Unit]:
    """Seconds to the first token, one unit a request."""
    return [
        Unit(prompt, repeat, seconds, 1)
        for (prompt, repeat), rows in units.items()
        for seconds in (metrics.ttft(s.timings) for s in rows)
        if seconds is not None
    ]


def stage_ms(units: Mapping[Key, Sequence[Sample]]) -> StageTimes | None:
    """Milliseconds of a decode step by stage, over steps without prompt chunks.

    Falls back to all decode steps where every step carried a chunk; None without records.
    """
    every = [[r for s in rows for r in s.records or () if not r.prefill] for rows in units.values()]
    pure = [[r for r in rows if not r.prefill_tokens] for rows in every]
    return _mean_stages(pure) or _mean_stages(every)


def _mean_stages(groups: Sequence[Sequence[StepRecord]]) -> StageTimes | None:
    steps = sum(len({r.step for r in rows}) for rows in groups)
    if not steps:
        return None
    totals = [metrics.stage_totals(rows) for rows in groups]
    return StageTimes(
        draft=1e3 * sum(t.draft for t in totals) / steps,
        verify=1e3 * sum(t.verify for t in totals) / steps,
        sample=1e3 * sum(t.sample for t in totals) / steps,
        host=1e3 * sum(t.host for t in totals) / steps,
    )


def _length_ratio(samples: Sequence[Sample], baseline: Sequence[Sample]) -> float | None:
    total = sum(s.tokens for s in baseline)
    return sum(s.tokens for s in samples) / total if total else None


# --- why a row is not published -------------------------------------------------------------------


def _gate_reasons(gates: Sequence[GateResult], arm: str) -> list[str]:
    words = {GateStatus.FAIL: "failed", GateStatus.MISSING: "is missing"}
    return [
        f"gate {g.gate} {words[g.status]}: {g.evidence}"
        for g in gates
        if g.arm == arm and g.status in words
    ]


def _baseline_reasons(gates: Sequence[GateResult], baseline: Measured) -> list[str]:
    """Why nothing can be compared with this baseline; gates that are missing, every arm misses."""
    failed = [g for g in gates if g.arm == baseline.arm and g.status is GateStatus.FAIL]
    found = [*_gate_reasons(failed, baseline.arm), *record_reasons(baseline.samples)]
    return [f"the baseline cannot be compared with: {reason}" for reason in found]


def _run_reasons(plan: Grid, head: ledger.Record, m: Measured) -> list[str]:
    reasons = list(head["lint"].get(m.cell.slug, ()))
    if plan.quick:
        reasons.append("a quick run shows that it works, not how fast")
    elif len(m.repeats) < plan.bars.min_repeats:
        reasons.append(
            f"measured {len(m.repeats)} of {plan.repeats} repeats, the bar is "
            f"{plan.bars.min_repeats}; start the same grid again to go on"
        )
    if head["target"]["random_weights"]:
        reasons.append("random weights: acceptance says nothing about a real model")
    return reasons


# --- the run --------------------------------------------------------------------------------------


def _few(plan: Grid, measured: Mapping[str, Mapping[str, Measured]]) -> list[str]:
    """One sentence on the cells that have too few prompts to speak for others like them."""
    names = []
    for cell in plan.cells:
        arms = measured.get(cell.slug)
        units = {unit for unit, _ in arms[plan.baseline].units} if arms else set()
        if units and len(units) < stats.CLUSTER_FROM:
            names.append(cell.name)
    if not names:
        return []
    return [
        f"Fewer than {stats.CLUSTER_FROM} prompts (or waves of prompts) of {'; '.join(names)}: "
        "their intervals speak for these prompts, not for others like them."
    ]


def _run_warnings(head: ledger.Record, records: Sequence[ledger.Record], plan: Grid) -> list[str]:
    warnings = []
    sessions = [r for r in records if r["kind"] == "session"]
    if len(sessions) > 1:
        warnings.append(f"Measured in {len(sessions)} sessions; pairs never span two of them.")
    changed = {repr(s["versions"]) for s in sessions}
    if len(changed) > 1:
        warnings.append("Package versions differ between the sessions of this run.")
    done = ledger.complete_blocks(records, plan.arms)
    total = len(plan.cells) * plan.repeats
    if len(done) < total:
        warnings.append(
            f"{len(done)} of {total} blocks are measured; start the same grid again to go on."
        )
    return warnings


def _meta(head: ledger.Record, records: Sequence[ledger.Record], plan: Grid) -> dict[str, Any]:
    sessions = [r for r in records if r["kind"] == "session"]
    facts = {k: v for k, v in (sessions[-1] if sessions else {}).items() if k != "kind"}
    return {
        **facts,
        "grid": plan.name,
        "grid_hash": head["grid_hash"],
        "repeats": plan.repeats,
        "seed": plan.seed,
        "sampled": {k: v for k, v in head["grid"]["sampling"].items() if v is not None},
        "bars": head["grid"]["bars"],
        "arms": head["settings"],
        "cells": {c.name: f"{c.prompts} prompts, {c.max_tokens} tokens" for c in plan.cells},
    }
