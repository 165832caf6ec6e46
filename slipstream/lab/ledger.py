"""The ledger: what was measured, written so that neither a kill nor a full disk loses any of it.

A run is a directory: `ledger.jsonl` (append-only, one JSON object a line) and `samples/*.jsonl`
(raw samples, written and synced before the line that names them). A block is one cell in one
repeat, all arms interleaved; its lines carry an attempt number, and it counts once the line of
every arm is there.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from slipstream.errors import LedgerError
from slipstream.lab.samples import Sample, from_json, to_json

NAME = "ledger.jsonl"
Record = dict[str, Any]


class Ledger:
    """One run's ledger, open for appending; a context manager. Only one process may hold it.

    Every method that writes raises `LedgerError` where the disk does not take it; what was written
    before stays readable and the run can be resumed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        with _disk(directory):
            (directory / "samples").mkdir(parents=True, exist_ok=True)
            # Held open for the ledger's whole life: the lock hangs on it.
            self._file: IO[bytes] = open(directory / NAME, "ab", buffering=0)  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise LedgerError(
                f"Another process is writing {directory}; wait for it or start a run of your own "
                "with --fresh."
            ) from error
        self._drop_torn_line()
        self.records: list[Record] = read(directory)

    def append(self, record: Record) -> None:
        """Add one line and sync it."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        with _disk(self.directory):
            self._write_whole(line)
            os.fsync(self._file.fileno())
        self.records.append(record)

    def write_samples(self, name: str, samples: Iterable[Sample]) -> Record:
        """Write and sync `samples/NAME.jsonl`; returns what a ledger line says about it."""
        path = self.directory / "samples" / f"{name}.jsonl"
        rows = [json.dumps(to_json(s), separators=(",", ":")).encode() + b"\n" for s in samples]
        data = b"".join(rows)
        part = path.with_suffix(".part")
        try:
            with _disk(self.directory):
                with open(part, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, path)
                _sync_directory(path.parent)
        except LedgerError:
            part.unlink(missing_ok=True)
            raise
        return {
            "samples": f"samples/{path.name}",
            "count": len(rows),
            "sha256": hashlib.sha256(data).hexdigest(),
        }

    def close(self) -> None:
        """Release the file and its lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _write_whole(self, line: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self._truncate(start)
            raise

    def _truncate(self, size: int) -> None:
        try:
            os.ftruncate(self._file.fileno(), size)
        except OSError:  # not a regular file: a torn line is dropped at the next start instead
            return

    def _drop_torn_line(self) -> None:
        """A line without its end was never whole: remove it, so that the next one starts fresh."""
        with _disk(self.directory):
            data = (self.directory / NAME).read_bytes() if self._is_regular() else b""
            if data and not data.endswith(b"\n"):
                self._truncate(data.rfind(b"\n") + 1)

    def _is_regular(self) -> bool:
        return (self.directory / NAME).is_file()


def read(directory: Path) -> list[Record]:
    """Records of a run, oldest first; an unfinished last line is ignored.

    Raises `LedgerError` where there is no ledger or a line before the last is not JSON.
    """
    path = directory / NAME
    if not path.exists():
        raise LedgerError(f"{directory} holds no {NAME}; give the directory of a grid run.")
    with _disk(directory):
        lines = path.read_bytes().split(b"\n") if path.is_file() else []
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if any(rest.strip() for rest in lines[number:]):
                raise LedgerError(f"{path}, line {number} is damaged: {error}.") from error
            break  # the last line was cut off by a kill: it is measured again
        records.append(record)
    return records


def read_samples(directory: Path, record: Record) -> list[Sample]:
    """Samples a ledger line names, also where they were packed with gzip since, as committed ones
    are. Raises `LedgerError` where the file is not the one written.
    """
    path = directory / record["samples"]
    packed = path.with_name(f"{path.name}.gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be read ({error.strerror}); the ledger names it."
        ) from error
    if hashlib.sha256(data).hexdigest() != record["sha256"]:
        raise LedgerError(f"{path} is not the file the ledger names: its SHA-256 differs.")
    return [from_json(json.loads(line)) for line in data.splitlines()]


def header(records: Iterable[Record]) -> Record:
    """The line that opens a run. Raises `LedgerError` where it is missing."""
    for record in records:
        if record["kind"] == "run":
            return record
    raise LedgerError("The ledger has no opening line; it is empty or was cut off at the start.")


def complete_blocks(
    records: Iterable[Record], arms: Iterable[str]
) -> dict[tuple[str, int], dict[str, Record]]:
    """(cell slug, repeat) -> arm -> line, for blocks in which every arm was measured.

    Of several complete attempts the last counts.
    """
    wanted = set(arms)
    attempts: dict[tuple[str, int, int], dict[str, Record]] = {}
    for r in records:
        if r["kind"] == "cell":
            attempts.setdefault((r["cell"], r["repeat"], r["attempt"]), {})[r["arm"]] = r
    done = {}
    for (cell, repeat, _), lines in sorted(attempts.items(), key=lambda item: item[0]):
        if set(lines) == wanted:
            done[cell, repeat] = lines
    return done


def latest_unfinished(root: Path, *, grid_hash: str, machine: str) -> Path | None:
    """Newest run of the same grid, model, version and machine that has cells left, if any."""
    for directory in sorted(root.glob("*/"), reverse=True):
        if not (directory / NAME).is_file():
            continue
        try:
            records = read(directory)
            first = header(records)
        except LedgerError:  # a damaged run is no candidate; reading it by name says why
            continue
        same = (first.get("grid_hash"), first.get("machine")) == (grid_hash, machine)
        if same and not any(r["kind"] == "finish" for r in records):
            return directory
    return None


@contextmanager
def _disk(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"{directory} could not be written or read ({error.strerror}); what was written before "
            "is kept. Make room, then start the same grid again to resume."
        ) from error


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
