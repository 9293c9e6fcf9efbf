"""What is known of how a process ended, and by whose account."""

import math
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from stories import beat

from muster.contracts.exit_record import ExitRecord, encode_exit_record
from muster.contracts.layout import JobFiles
from muster.contracts.messages import RankExited, RankSaid
from muster.contracts.process import ProcessRecord
from muster.exit_records import (
    known_end,
    read_exit_record,
    write_exit_record,
    write_own_account,
)
from muster.processes import identify

PROCESS = ProcessRecord(pid=7, start_ticks=1, boot_id="b", node="n")
ANOTHER = ProcessRecord(pid=8, start_ticks=1, boot_id="b", node="n")


def test_how_a_process_ended_is_on_disk_once_and_nothing_else_is(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.exits.mkdir(parents=True)
    exited = RankExited(rank=1, incarnation=2, exit_code=None, signal=9, last_lines=())
    # Numbers are a program's own, and may be none.
    said = RankSaid(rank=1, incarnation=2, message=beat(metrics={"accuracy": math.inf}))
    record = ExitRecord(pid=7, at="2026-03-01T12:00:00+00:00", said=(said,), exited=exited)
    write_exit_record(files, record)
    write_exit_record(files, msgspec.structs.replace(record, at="later"))
    assert read_exit_record(files, 1, 2, PROCESS) == record
    assert read_exit_record(files, 1, 2, None) == record, "the name of the file must do"
    assert read_exit_record(files, 1, 3, PROCESS) is None
    assert read_exit_record(files, 1, 2, ANOTHER) is None
    assert list(files.exits.iterdir()) == [files.exit_record(1, 2)]


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.exits.mkdir(parents=True)
    return files


def end_with(code: int, pid: int = PROCESS.pid) -> ExitRecord:
    exited = RankExited(rank=1, incarnation=2, exit_code=code, signal=None, last_lines=())
    return ExitRecord(
        pid=pid, at="", said=(RankSaid(rank=1, incarnation=2, message=beat(step=9)),), exited=exited
    )


def test_of_an_end_that_no_agent_saw_the_process_has_the_last_word(files: JobFiles) -> None:
    write_own_account(files, end_with(0))
    assert known_end(files, 1, 2, PROCESS) == end_with(0)
    assert known_end(files, 1, 2, ANOTHER) is None
    assert known_end(files, 1, 2, None) is None


def test_an_agent_that_saw_the_end_knows_better(files: JobFiles) -> None:
    write_own_account(files, end_with(0))
    write_exit_record(files, end_with(137))
    assert known_end(files, 1, 2, PROCESS) == end_with(137)


def test_who_still_runs_may_yet_end_otherwise(files: JobFiles) -> None:
    write_own_account(files, end_with(0, os.getpid()))
    assert known_end(files, 1, 2, identify(os.getpid())) is None


def test_half_an_account_is_none(files: JobFiles) -> None:
    write_own_account(files, end_with(0))
    own = files.own_account(1, 2)
    own.write_bytes(own.read_bytes()[:-1])
    assert known_end(files, 1, 2, PROCESS) is None


def test_an_account_speaks_for_one_incarnation_of_one_rank(files: JobFiles) -> None:
    """A program may write what it likes, of itself."""
    forged = end_with(0)
    files.own_account(0, 2).write_bytes(encode_exit_record(forged))
    files.exit_record(0, 2).write_bytes(encode_exit_record(forged))
    assert known_end(files, 0, 2, PROCESS) is None
    exited = RankExited(rank=0, incarnation=2, exit_code=0, signal=None, last_lines=())
    mixed = msgspec.structs.replace(forged, exited=exited)
    files.own_account(0, 2).write_bytes(encode_exit_record(mixed))
    assert known_end(files, 0, 2, PROCESS) is None


def fifo(path: Path) -> None:
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


@pytest.mark.parametrize("put", [fifo, endless, Path.mkdir])
def test_nobody_waits_for_what_is_no_record_or_reads_all_of_it(
    files: JobFiles, put: Callable[[Path], None]
) -> None:
    put(files.own_account(1, 2))
    put(files.exit_record(1, 2))
    assert known_end(files, 1, 2, PROCESS) is None


def test_who_has_to_account_for_itself_waits_for_no_reader(files: JobFiles) -> None:
    fifo(files.own_account(1, 2))
    with pytest.raises(OSError, match="No such device"):
        write_own_account(files, end_with(0))
