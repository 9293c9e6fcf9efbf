import math
import os
from pathlib import Path

import msgspec
import pytest

from muster.contracts.messages.agent import RankExited, RankSaid
from muster.contracts.messages.wire import ExitRecord
from muster.contracts.rank import ProcessRecord
from muster.contracts.settings.paths import JobFiles
from muster.host.processes import identify
from muster.runtime.exit_report import (
    LAST_BYTES,
    LAST_LINES,
    TOO_LONG,
    find_exit_record,
    last_lines,
    read_exit_record,
    write_exit_record,
    write_own_record,
)
from tests.support.stories import beat

PROCESS = ProcessRecord(pid=7, start_ticks=1, boot_id="b", node="n", pid_namespace=1)
ANOTHER = ProcessRecord(pid=8, start_ticks=1, boot_id="b", node="n", pid_namespace=1)


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = JobFiles(tmp_path)
    files.exits.mkdir(parents=True)
    return files


def end_with(code: int, pid: int = PROCESS.pid) -> ExitRecord:
    exited = RankExited(rank=1, attempt=2, exit_code=code, signal=None, last_lines=())
    # A program's metrics may be infinite.
    said = RankSaid(rank=1, attempt=2, message=beat(step=9, metrics={"accuracy": math.inf}))
    return ExitRecord(pid=pid, at="", said=(said,), exited=exited)


def test_an_exit_record_is_written_once_and_read_back(files: JobFiles) -> None:
    record = end_with(137)
    write_exit_record(files, record)
    write_exit_record(files, msgspec.structs.replace(record, at="later"))
    assert read_exit_record(files, 1, 2, PROCESS) == record
    assert read_exit_record(files, 1, 2, None) == record, "the pid is not always known"
    assert read_exit_record(files, 1, 3, PROCESS) is None
    assert read_exit_record(files, 1, 2, ANOTHER) is None
    assert list(files.exits.iterdir()) == [files.exit_record(1, 2)]


def test_the_own_record_counts_until_there_is_an_agents(files: JobFiles) -> None:
    write_own_record(files, end_with(0))
    assert find_exit_record(files, 1, 2, PROCESS) == end_with(0)
    assert find_exit_record(files, 1, 2, ANOTHER) is None
    assert find_exit_record(files, 1, 2, None) is None
    write_exit_record(files, end_with(137))
    assert find_exit_record(files, 1, 2, PROCESS) == end_with(137)


def test_a_running_or_killed_writers_own_record_does_not_count(files: JobFiles) -> None:
    write_own_record(files, end_with(0, os.getpid()))
    assert find_exit_record(files, 1, 2, identify(os.getpid())) is None
    write_own_record(files, end_with(0))
    own = files.exit_report(1, 2)
    own.write_bytes(own.read_bytes()[:-1])
    assert find_exit_record(files, 1, 2, PROCESS) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", ()),
        (b"one", ("one",)),
        (b"one\n\ntwo\n", ("one", "", "two")),
        (b"\xff\xfe\n", ("\ufffd\ufffd",)),
        (b"\n".join(b"%d" % n for n in range(50)), tuple(str(n) for n in range(40, 50))),
        (b"a line\n" * (LAST_LINES + 1), ("a line",) * LAST_LINES),
        (b"x" * 100_000 + b"end", (TOO_LONG,)),
        (b"10%" + b"\r20%" * LAST_BYTES + b"\nend\n", ("20%", "end")),
        # Half of a line may hold half of a secret.
        (b"secret\n" + b"x" * (LAST_BYTES - 9) + b"\nend\n", ("x" * (LAST_BYTES - 9), "end")),
        (b"secret\n" + b"x" * (LAST_BYTES - 5) + b"\nend\n", ("end",)),
    ],
)
def test_whole_last_lines_are_quoted(
    tmp_path: Path, content: bytes, expected: tuple[str, ...]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(content)
    with path.open("rb") as log:
        assert last_lines(log.fileno()) == expected
