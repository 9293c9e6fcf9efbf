"""Writers of several processes take turns, and nobody who is stuck keeps the others out."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from installation import await_value
from store_samples import submit

from store.database import Database
from store.jobs import Jobs
from store.turnstile import Turnstile, try_lock

WAIT_SECONDS = 30.0
PATIENCE_SECONDS = 30.0


@pytest.fixture
def turns(sqlite_url: str, tmp_path: Path) -> Path:
    """The file beside a database that says whose turn it is."""
    with closing(Database.open(sqlite_url)) as database:
        submit(Jobs(database), "first")
    return tmp_path / "muster.db.turn"


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The file, as another process has it open."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def is_taken(path: Path) -> bool:
    with opened(path) as descriptor:
        return not try_lock(descriptor)


def test_who_waits_is_served_before_one_who_writes_again_and_again(
    sqlite_url: str, turns: Path
) -> None:
    served: list[str] = []

    def write(name: str, database: Database) -> None:
        with database.writing():
            served.append(name)

    with closing(Database.open(sqlite_url)) as busy, closing(Database.open(sqlite_url)) as patient:
        waiting = threading.Thread(target=write, args=("patient", patient))
        with busy.writing():
            waiting.start()
            await_value(lambda: is_taken(turns), lambda: "nobody waits for a turn")
        write("busy", busy)
        waiting.join(WAIT_SECONDS)
    assert served == ["patient", "busy"]


def test_a_turn_ends_when_its_transaction_has_begun(sqlite_url: str, turns: Path) -> None:
    with closing(Database.open(sqlite_url)) as database, database.writing():
        assert not is_taken(turns)


def test_a_turn_ends_with_an_attempt_that_fails(turns: Path) -> None:
    with closing(Turnstile(turns, PATIENCE_SECONDS)) as turnstile:
        with pytest.raises(KeyError), turnstile.turn():
            raise KeyError
        assert not is_taken(turns)


def test_one_who_never_gives_the_turn_back_keeps_nobody_out(turns: Path) -> None:
    with closing(Turnstile(turns, 0.0)) as turnstile, opened(turns) as descriptor:
        assert try_lock(descriptor)
        with turnstile.turn():
            pass
        assert is_taken(turns), "it goes without, and leaves the turn where it is"


def test_without_a_file_there_are_no_turns_and_writers_go_on(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "turn"
    with closing(Turnstile(nowhere, PATIENCE_SECONDS)) as turnstile, turnstile.turn():
        pass


@pytest.mark.parametrize("reason", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_where_files_have_no_locks_there_are_no_turns_and_writers_go_on(
    monkeypatch: pytest.MonkeyPatch, sqlite_url: str, turns: Path, reason: int
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(reason, os.strerror(reason))

    with closing(Database.open(sqlite_url)) as database, opened(turns) as descriptor:
        monkeypatch.setattr("store.turnstile.fcntl.flock", refuse)
        assert submit(Jobs(database), "second").job_id == "second"
        with pytest.raises(OSError, match=os.strerror(reason)):
            try_lock(descriptor)
