"""What was written survives kills, full disks and second writers; what was torn is noticed."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from slipstream.errors import LedgerError
from slipstream.lab import ledger
from slipstream.lab.ledger import Ledger
from slipstream.lab.samples import Sample, from_json, to_json
from slipstream.types import StageTimes, StepRecord, Timings

RECORD = StepRecord(3, 1, False, 40, 3, 2, 3, 4, 0, StageTimes(0.001, 0.02, 0.003, 0.0004))
SAMPLE = Sample(
    id="chat-001",
    text="zwölf\u2028\n",
    finish="stop",
    timings=Timings(1.5, (2.0, 2.25), (1, 3)),
    unit=2,
    seed=9,
    prompt_tokens=40,
    token_ids=(1, 2, 3, 4),
    records=(RECORD,),
)


def cell_line(arm: str, repeat: int, attempt: int = 0) -> ledger.Record:
    return {"kind": "cell", "cell": "c", "arm": arm, "repeat": repeat, "attempt": attempt}


def test_samples_come_back_as_they_were(tmp_path: Path) -> None:
    bare = Sample(id="b", text="", finish="error", timings=Timings(0.0, (), ()), error="Why.")
    assert from_json(to_json(SAMPLE)) == SAMPLE
    with Ledger(tmp_path) as book:
        line = book.write_samples("one", [SAMPLE, bare])
        book.append({"kind": "cell", **line})
    assert ledger.read_samples(tmp_path, ledger.read(tmp_path)[0]) == [SAMPLE, bare]
    plain = tmp_path / line["samples"]
    plain.with_name(f"{plain.name}.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()  # as committed results are kept
    assert ledger.read_samples(tmp_path, ledger.read(tmp_path)[0]) == [SAMPLE, bare]


def test_changed_samples_are_noticed(tmp_path: Path) -> None:
    with Ledger(tmp_path) as book:
        line = book.write_samples("one", [SAMPLE])
    (tmp_path / line["samples"]).write_text("")
    with pytest.raises(LedgerError, match="SHA-256 differs"):
        ledger.read_samples(tmp_path, line)
    (tmp_path / line["samples"]).unlink()
    with pytest.raises(LedgerError, match="cannot be read"):
        ledger.read_samples(tmp_path, line)


@pytest.mark.parametrize("torn", [b'{"kind":"ce', b'{"kind":"cell"}', b"\x00\x00"])
def test_a_torn_last_line_is_ignored_and_removed(tmp_path: Path, torn: bytes) -> None:
    with Ledger(tmp_path) as book:
        book.append({"kind": "run"})
    with open(tmp_path / ledger.NAME, "ab") as file:
        file.write(torn)
    with Ledger(tmp_path) as book:
        assert book.records == [{"kind": "run"}]
        book.append({"kind": "next"})
    assert [r["kind"] for r in ledger.read(tmp_path)] == ["run", "next"]


def test_reading_a_torn_run_does_not_write_to_it(tmp_path: Path) -> None:
    path = tmp_path / ledger.NAME
    path.write_bytes(b'{"kind":"run"}\n{"ki')
    assert ledger.read(tmp_path) == [{"kind": "run"}]
    assert path.read_bytes() == b'{"kind":"run"}\n{"ki'


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    (tmp_path / ledger.NAME).write_bytes(b'{"kind":"run"}\nrubbish\n{"kind":"x"}\n')
    with pytest.raises(LedgerError, match="line 2 is damaged"):
        ledger.read(tmp_path)
    with pytest.raises(LedgerError, match="holds no"):
        ledger.read(tmp_path / "nowhere")


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    """/dev/full is a real disk without room."""
    (tmp_path / ledger.NAME).symlink_to("/dev/full")
    with Ledger(tmp_path) as book, pytest.raises(LedgerError, match="No space left") as caught:
        book.append({"kind": "run"})
    assert str(caught.value).count(". ") == 1  # what happened; what to do


def test_a_disk_that_fills_up_midway_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Ledger(tmp_path) as book:
        book.append({"kind": "run"})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(LedgerError, match="No space left"):
                book.write_samples("two", [SAMPLE])
        assert list((tmp_path / "samples").iterdir()) == []
        book.append({"kind": "next"})
    assert [r["kind"] for r in ledger.read(tmp_path)] == ["run", "next"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Ledger(tmp_path), pytest.raises(LedgerError, match="Another process"):
        Ledger(tmp_path)
    Ledger(tmp_path).close()


def test_a_block_counts_when_every_arm_is_there() -> None:
    lines = [cell_line("none", 0), cell_line("ngram", 0), cell_line("none", 1)]
    assert set(ledger.complete_blocks(lines, ["none", "ngram"])) == {("c", 0)}
    again = [*lines, cell_line("none", 1, 1), cell_line("ngram", 1, 1)]
    done = ledger.complete_blocks(again, ["none", "ngram"])
    assert done["c", 1]["none"]["attempt"] == 1


def test_latest_unfinished_run_of_the_same_grid(tmp_path: Path) -> None:
    def run(name: str, *records: ledger.Record, grid_hash: str = "g", machine: str = "m") -> None:
        with Ledger(tmp_path / name) as book:
            book.append({"kind": "run", "grid_hash": grid_hash, "machine": machine})
            for record in records:
                book.append(record)

    run("1", {"kind": "stop"})
    run("2")
    run("3", {"kind": "finish"})
    run("4", grid_hash="other")
    run("5", machine="other")
    (tmp_path / "6").mkdir()
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / ledger.NAME).write_text("")
    found = ledger.latest_unfinished(tmp_path, grid_hash="g", machine="m")
    assert found == tmp_path / "2"
    assert ledger.latest_unfinished(tmp_path / "none", grid_hash="g", machine="m") is None
