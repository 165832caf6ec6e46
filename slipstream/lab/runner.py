"""Run a grid: warm up, gate, then measure block by block, ledger first.

A block is one cell in one repeat. Inside it the arms take turns prompt by prompt (or wave by wave)
on the same prompts, so that whatever the machine does, it does to all of them. Blocks go repeat by
repeat: when time runs out every cell has about the same number of repeats, and every arm exactly.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

from slipstream import provenance
from slipstream.errors import LedgerError
from slipstream.lab import gate_runner, ledger, traffic
from slipstream.lab.backends import open_backend
from slipstream.lab.backends.base import Backend, TargetInfo
from slipstream.lab.events import Event, Kind, OnEvent, duration, ignore
from slipstream.lab.grid import Grid
from slipstream.lab.pace import Pace
from slipstream.lab.prepared import Block, Prepared
from slipstream.lab.prompts import Prompt, copy_overlap, from_file
from slipstream.lab.samples import Request, Sample, by_unit, window
from slipstream.version import __version__


def run_grid(
    grid: Grid,
    *,
    root: Path,
    resume: bool = True,
    prompts_file: Path | None = None,
    quick: bool = False,
    on_event: OnEvent = ignore,
    backend: Backend | None = None,
) -> Path:
    """Measure `grid` and return the run's directory under `root`.

    `resume` goes on with the newest unfinished run of the same grid, model, version and machine, if
    there is one. `prompts_file`: the user's own JSONL in place of the grid's traffic. `quick`: the
    smallest run of the same shape. `backend`: what to measure, by default what `grid.target` names.
    Raises `InvalidConfig`, `ModelError` and `LedgerError`; a `KeyboardInterrupt` passes through and
    leaves a run that can be resumed.
    """
    own: list[Prompt] | None = None
    if prompts_file is not None:
        own = from_file(prompts_file)
        grid, left_out = grid.with_own_prompts(len(own))
        for sentence in left_out:
            on_event(Event(Kind.WARNING, f"Left out: {sentence}."))
    if quick:
        grid = grid.quickened()
    backend = backend or open_backend(grid)
    try:
        prepared = Prepared(grid, backend, own)
        machine = provenance.machine_key(provenance.machine())
        grid_hash = grid.hash(backend.info.fingerprint, __version__, prepared.digest)
        found = ledger.latest_unfinished(root, grid_hash=grid_hash, machine=machine)
        directory = found if found and resume else _new_directory(root, grid.name)
        with ledger.Ledger(directory) as book:
            _Run(prepared, book, on_event).run(grid_hash=grid_hash, machine=machine)
    finally:
        backend.close()
    return directory


def _new_directory(root: Path, name: str) -> Path:
    """A directory named so that names sort by start time."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = root / f"{stamp}-{name}{suffix}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise LedgerError(
                f"{path} could not be created ({error.strerror}); give another folder with --runs."
            ) from error
        return path
    raise LedgerError(f"{root} already holds a hundred runs of this second; wait a moment.")


class _Run:
    """One start of a grid, from the first warm-up to the last block that fits."""

    def __init__(self, prepared: Prepared, book: ledger.Ledger, on_event: OnEvent) -> None:
        self.prepared, self.book, self.on_event = prepared, book, on_event
        self.grid, self.backend = prepared.grid, prepared.backend
        self.started = time.monotonic()
        self.pace = Pace(arms=len(self.grid.arms))
        done = ledger.complete_blocks(book.records, self.grid.arms)
        for (slug, _), lines in done.items():
            self.pace.measured(slug, sum(line["wall_s"] for line in lines.values()))
        every = [(c.slug, r) for r in range(self.grid.repeats) for c in self.grid.cells]
        self.todo: list[Block] = [block for block in every if block not in done]
        self.total = sum(self._arm_runs(block) for block in every)
        self.done = self.total - sum(self._arm_runs(block) for block in self.todo)
        self.share = 0.0  # of the first block of `todo`, already measured

    def run(self, *, grid_hash: str, machine: str) -> None:
        """Everything that is left, within the budget."""
        settings = self.backend.open(
            self.grid.arms, users=self.prepared.users, kv_tokens=self.prepared.kv_tokens
        )
        self._open_book(settings, grid_hash=grid_hash, machine=machine)
        if self.todo:
            self._warm_up()
        gate_runner.run_gates(
            self.grid,
            self.prepared.gate_tasks,
            backend=self.backend,
            book=self.book,
            on_event=self._progress_text,
        )
        self._announce()
        left = self._measure_all()
        if left:
            self.book.append({"kind": "stop", "time": provenance.now(), "left": left})
            names = len({slug for slug, _ in left})
            text = (
                f"The budget of {self.grid.budget_minutes:g} min is used up; {len(left)} blocks of "
                f"{names} cells are left. Start the same grid again to measure them."
            )
            self.on_event(Event(Kind.WARNING, text, self.done, self.total))
        else:
            self.book.append({"kind": "finish", "time": provenance.now()})
        self.on_event(Event(Kind.DONE, str(self.book.directory), self.done, self.total, 0.0))

    # --- opening -------------------------------------------------------------------------------

    def _open_book(
        self, settings: dict[str, dict[str, object]], *, grid_hash: str, machine: str
    ) -> None:
        info = self.backend.info
        known = [r for r in self.book.records if r["kind"] == "run"]
        if not known:
            self.book.append(
                {
                    "kind": "run",
                    "run": self.book.directory.name,
                    "grid": self.grid.resolved(),
                    "grid_hash": grid_hash,
                    "machine": machine,
                    "target": _plain_info(info),
                    "settings": settings,
                    "lint": self.prepared.lint(),
                }
            )
        elif known[0]["settings"] != settings:
            changed = sorted(a for a in settings if known[0]["settings"].get(a) != settings[a])
            raise LedgerError(
                f"{self.book.directory} was measured with other settings of {', '.join(changed)}; "
                "start a new run with --fresh."
            )
        facts = provenance.collect(
            dtype=info.dtype, threads=info.threads, fingerprint=info.fingerprint
        )
        self.book.append({"kind": "session", **facts})

    def _warm_up(self) -> None:
        """Every arm at every number of users that is left; thrown away, but for the pace.

        Gates that are still to be asked warm the arms they ask; then only the baseline is left, for
        the pace.
        """
        asked = gate_runner.to_be_asked(self.grid, self.book.records)
        arms = [arm for arm in self.grid.arms if arm == self.grid.baseline or arm not in asked]
        for users in sorted({self.prepared.cells[slug].users for slug, _ in self.todo}):
            requests = traffic.warmup_requests(self.grid, users=users)
            for arm in arms:
                self._progress_text(f"warm-up: {arm}, {users} users")
                self.backend.reset(arm)
                samples = self.backend.run(arm, requests, users=users)
                if arm == self.grid.baseline:
                    self.pace.warmed_up(users, samples)
                self.backend.reset(arm)

    def _announce(self) -> None:
        seconds = sum(map(self._estimate, self.todo))
        text = f"{len(self.todo)} blocks to measure, about {duration(seconds)}"
        budget = self._budget_left()
        if budget is not None and seconds > budget:
            text += f"; the budget has {duration(max(0.0, budget))} left, what fits is measured"
        self.on_event(Event(Kind.PLAN, f"{text}.", self.done, self.total, seconds))

    # --- measuring -----------------------------------------------------------------------------

    def _measure_all(self) -> list[Block]:
        """Measure what fits; returns the blocks that did not."""
        left = []
        for block in list(self.todo):
            if block[1]:
                self._audit()
            budget = self._budget_left()
            if budget is not None and self._estimate(block) > budget:
                left.append(block)
                self.todo.remove(block)
                continue
            self._measure(block)
            self.todo.remove(block)
            self.share = 0.0
        self._audit()
        return left

    def _audit(self) -> None:
        """The lossless gate on the answers of the first repeat, as soon as all cells have one."""
        gate_runner.audit_measured(
            self.grid,
            self.prepared.gate_tasks,
            backend=self.backend,
            book=self.book,
            on_event=self._progress_text,
        )

    def _measure(self, block: Block) -> None:
        slug, repeat = block
        cell, units = self.prepared.cells[slug], self.prepared.units(block)
        samples: dict[str, list[Sample]] = {arm: [] for arm in self.grid.arms}
        start = time.monotonic()
        for index, unit in enumerate(units):
            order = traffic.arm_order(self.grid.arms, repeat * len(units) + index)
            self.share = index / len(units)
            self._progress_text(f"{cell.name}, repeat {repeat + 1}")
            for arm in order:
                self.backend.reset(arm)
            number = self._unit_number(block, index)
            together = self.backend.run_together(order, unit, users=cell.users)
            for arm, rows in together.items():
                samples[arm] += [
                    replace(row, unit=number, copied=_copied(request, row))
                    for request, row in zip(unit, rows, strict=True)
                ]
            self.done += len(order)
        self._write(block, samples)
        self.pace.measured(slug, time.monotonic() - start)

    def _write(self, block: Block, samples: dict[str, list[Sample]]) -> None:
        slug, repeat = block
        attempt = sum(
            r["kind"] == "cell" and (r["cell"], r["repeat"]) == block for r in self.book.records
        )
        files = {
            arm: self.book.write_samples(f"{slug}.r{repeat}.a{attempt}.{_file_name(arm)}", rows)
            for arm, rows in samples.items()
        }
        for arm, written in files.items():
            self.book.append(
                {
                    "kind": "cell",
                    "cell": slug,
                    "arm": arm,
                    "repeat": repeat,
                    "attempt": attempt,
                    "time": provenance.now(),
                    "wall_s": round(sum(map(window, by_unit(samples[arm]).values())), 4),
                    **written,
                }
            )

    def _unit_number(self, block: Block, index: int) -> int:
        """The same prompts have the same number in every repeat; fresh ones have their own."""
        slug, repeat = block
        cell = self.prepared.cells[slug]
        per_repeat = len(self.prepared.units(block)) if cell.fresh_prompts else 0
        return repeat * per_repeat + index

    # --- time ----------------------------------------------------------------------------------

    def _arm_runs(self, block: Block) -> int:
        return len(self.prepared.units(block)) * len(self.grid.arms)

    def _estimate(self, block: Block) -> float:
        slug = block[0]
        tokens = self.prepared.prompt_tokens[slug]
        return self.pace.block(self.prepared.cells[slug], prompt_tokens=tokens)

    def _seconds_left(self) -> float:
        """Gates and blocks that are left, at most what the budget allows."""
        blocks = [self._estimate(block) for block in self.todo]
        started = self.share * blocks[0] if blocks else 0.0
        left = self._gate_seconds() + sum(blocks) - started
        budget = self._budget_left()
        return left if budget is None else min(left, max(0.0, budget))

    def _gate_seconds(self) -> float:
        """Estimate of the gate requests that have no answers yet."""
        left = gate_runner.unasked(self.grid, self.prepared.gate_tasks, self.book.records)
        return sum(
            self.pace.requests(
                len(requests),
                users=users,
                prompt_tokens=self.prepared.tokens_of(requests),
                max_tokens=requests[0].params.max_tokens,
            )
            for requests, users in left
        )

    def _budget_left(self) -> float | None:
        minutes = self.grid.budget_minutes
        return None if minutes is None else minutes * 60 - (time.monotonic() - self.started)

    def _progress_text(self, text: str) -> None:
        self.on_event(Event(Kind.PROGRESS, text, self.done, self.total, self._seconds_left()))


def _copied(request: Request, sample: Sample) -> float | None:
    source = request.prompt.source
    return round(copy_overlap(source, sample.text), 4) if source else None


def _plain_info(info: TargetInfo) -> dict[str, object]:
    return {name: getattr(info, name) for name in info.__slots__}


def _file_name(arm: str) -> str:
    """An arm's spec as part of a file name; a digest keeps two specs apart."""
    plain = "".join(c if c.isalnum() or c in "-_" else "-" for c in arm)[:40]
    return f"{plain}.{hashlib.sha256(arm.encode()).hexdigest()[:6]}"
