"""The fair write lock beside an SQLite file: writers of several processes take turns."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from database.engine import Database
from database.jobs import Jobs
from database.sqlite import WriteLock
from tests.support.database_samples import submit
from tests.support.installation import await_value

WAIT_SECONDS = 30.0


@pytest.fixture
def lock(sqlite_url: str, tmp_path: Path) -> Iterator[WriteLock]:
    """The lock of an existing database, as another process holds it."""
    Database.open(sqlite_url).close()
    with closing(WriteLock(tmp_path / "muster.db.turn")) as lock:
        yield lock


def is_free(lock: WriteLock) -> bool:
    if not lock.acquire(0.0):
        return False
    lock.release()
    return True


def test_a_waiting_writer_goes_before_one_that_writes_again(
    sqlite_url: str, lock: WriteLock
) -> None:
    served: list[str] = []

    def write(name: str, database: Database) -> None:
        with database.writing():
            served.append(name)

    with closing(Database.open(sqlite_url)) as busy, closing(Database.open(sqlite_url)) as patient:
        waiting = threading.Thread(target=write, args=("patient", patient))
        with busy.writing():
            waiting.start()
            await_value(lambda: not is_free(lock), lambda: "no writer waits")
        write("busy", busy)
        waiting.join(WAIT_SECONDS)
    assert served == ["patient", "busy"]


def test_the_lock_is_released_when_the_transaction_begins(sqlite_url: str, lock: WriteLock) -> None:
    with closing(Database.open(sqlite_url)) as database, database.writing():
        assert is_free(lock)


def test_a_stuck_holder_blocks_no_writer(sqlite_url: str, lock: WriteLock) -> None:
    path = Path(f"{sqlite_url.removeprefix('sqlite:///')}.turn")
    with (
        closing(Database.open(sqlite_url, busy_timeout_seconds=0.1)) as database,
        closing(WriteLock(path)) as another,
    ):
        assert lock.acquire(0.0)
        assert submit(Jobs(database), "a").job_id == "a"
        assert not another.acquire(0.0), "the writer went on without the lock"


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_file_locks_writers_go_on(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str, reason: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(reason, os.strerror(reason))

    with closing(Database.open(sqlite_url)) as database:
        monkeypatch.setattr("database.sqlite.fcntl.flock", refuse)
        assert submit(Jobs(database), "a").job_id == "a"
