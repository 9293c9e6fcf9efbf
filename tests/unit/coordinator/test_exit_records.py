"""What a successor makes of ends that nobody had heard of."""

from pathlib import Path

import msgspec
import pytest

from coordinator.exit_records import as_recorded
from muster.contracts.exit_record import ExitRecord
from muster.contracts.layout import JobFiles
from muster.contracts.rank import ProcessState
from store.records import Worker

LIVE = Worker(rank=1, incarnation=2, state=ProcessState.LIVE, process=None)


def recorded(files: JobFiles, **facts: object) -> Worker:
    record = ExitRecord(
        **{"pid": 7, "exit_code": None, "signal": None, "stopping": False, "at": "", **facts}
    )
    files.exits.mkdir(parents=True)
    files.exit_record(1, 2).write_bytes(msgspec.json.encode(record))
    return as_recorded(LIVE, files)


@pytest.mark.parametrize(
    ("facts", "finished"),
    [
        ({"exit_code": 0}, True),
        ({"exit_code": 0, "stopping": True}, False),
        ({"exit_code": 3}, False),
        ({"signal": 9}, False),
    ],
)
def test_only_code_0_of_a_rank_nobody_asked_finishes_it(
    tmp_path: Path, facts: dict[str, object], *, finished: bool
) -> None:
    worker = recorded(JobFiles(tmp_path), **facts)
    assert worker.state == ProcessState.EXITED
    assert worker.finished is finished
    assert (worker.exit_code, worker.exit_signal) == (facts.get("exit_code"), facts.get("signal"))


def test_what_nobody_has_seen_is_left_open(tmp_path: Path) -> None:
    assert as_recorded(LIVE, JobFiles(tmp_path)) == LIVE


def test_a_torn_record_says_nothing(tmp_path: Path) -> None:
    files = JobFiles(tmp_path)
    files.exits.mkdir(parents=True)
    files.exit_record(1, 2).write_bytes(b'{"pid": 7, "exi')
    assert as_recorded(LIVE, files) == LIVE
