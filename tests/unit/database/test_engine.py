"""`Database`: transactions, timeouts, refusals, and errors that say what to do."""

import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Connection, bindparam, event, func, insert, make_url, select, update
from sqlalchemy.exc import OperationalError

from database import HEAD, postgres
from database.engine import POOL_OVERFLOW, POOL_SIZE, Database, existing
from database.errors import CommitInDoubt, DatabaseError, DatabaseLocked, DatabaseUnavailable
from database.jobs import Jobs
from database.sqlite import SqliteBackend, journal_mode
from database.tables import EVENTS, JOBS, UtcTime
from muster.contracts.job.status import JobId
from tests.support.database_samples import NOON, nothing_moves, submit
from tests.support.installation import DEADLINE_SECONDS

BRIEF_SECONDS = 0.05


def refused(url: str) -> str:
    """Return the error with which `url` is not opened."""
    with pytest.raises(DatabaseUnavailable) as caught:
        Database.open(url, busy_timeout_seconds=BRIEF_SECONDS)
    return str(caught.value)


def test_a_new_database_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "muster.db"
    with existing(f"sqlite:///{path}") as found:
        assert found is None
    assert not path.exists(), "an inspection creates nothing"
    Database.open(f"sqlite:///{path}").close()
    assert path.stat().st_mode & 0o777 == 0o600
    with existing(f"sqlite:///{path}") as found:
        assert found is not None
        assert found.revision() == HEAD


def test_the_path_of_a_database_is_not_read_as_a_url(tmp_path: Path) -> None:
    paths = [tmp_path / name / "muster.db" for name in ("q?1", "q?2", "a%20b", "#")]
    for path in paths:
        Database.open(path).close()
        with existing(path) as found:
            assert found is not None
    assert sorted(tmp_path.rglob("muster.db")) == sorted(paths)


def test_rows_survive_a_reopening(url: str) -> None:
    with closing(Database.open(url)) as first:
        job = submit(Jobs(first), "a")
    with closing(Database.open(url)) as second:
        assert Jobs(second).get(job.job_id) == job


@pytest.mark.slow
def test_a_current_database_is_opened_without_alembic(migrated_file: Path) -> None:
    program = (
        "import sys; from database.engine import Database\n"
        f"Database.open({f'sqlite:///{migrated_file}'!r}).revision()\n"
        "assert 'alembic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_read_then_write_loses_no_update(url: str) -> None:
    databases = [Database.open(url), Database.open(url)]
    job = submit(Jobs(databases[0]), "a")
    stamp = update(JOBS).values(group_round=bindparam("new"))

    def count_up(database: Database) -> None:
        for _ in range(100):
            with database.writing() as connection:
                seen = connection.execute(select(JOBS.c.group_round)).scalar_one()
                connection.execute(stamp, {"new": seen + 1})

    threads = [threading.Thread(target=count_up, args=(each,)) for each in databases * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Jobs(databases[0]).get(job.job_id).group_round == 400
    for each in databases:
        each.close()


@pytest.mark.postgres
def test_one_read_transaction_sees_one_snapshot(migrated_postgres: str) -> None:
    count = select(func.count()).select_from(JOBS)
    with (
        closing(Database.open(migrated_postgres)) as reader,
        closing(Database.open(migrated_postgres)) as writer,
    ):
        with reader.reading() as connection:
            before = connection.execute(count).scalar_one()
            submit(Jobs(writer), "meanwhile")
            assert connection.execute(count).scalar_one() == before
        with reader.reading() as connection:
            assert connection.execute(count).scalar_one() == before + 1


def test_any_commit_changes_the_token(sqlite_url: str) -> None:
    with (
        closing(Database.open(sqlite_url)) as ours,
        closing(Database.open(sqlite_url)) as other,
    ):
        tokens = [ours.changes()]
        for number, database in enumerate((ours, other)):
            submit(Jobs(database), f"job-{number}")
            tokens += [ours.changes(), ours.changes()]
    assert tokens[0] != tokens[1] == tokens[2] != tokens[3] == tokens[4]


def test_changes_never_waits_for_a_writer(sqlite_url: str, tmp_path: Path) -> None:
    with closing(Database.open(sqlite_url)) as database:
        token = database.changes()
        with closing(sqlite3.connect(tmp_path / "muster.db", isolation_level=None)) as blocker:
            blocker.execute("BEGIN EXCLUSIVE")
            assert database.changes() == token


@pytest.mark.postgres
def test_postgres_notifies_of_commits_only(migrated_postgres: str) -> None:
    notified = threading.Semaphore(0)
    with (
        closing(Database.open(migrated_postgres)) as ours,
        closing(Database.open(migrated_postgres)) as other,
    ):
        assert ours.changes() is None
        assert ours.listen(notified.release)
        assert notified.acquire(timeout=DEADLINE_SECONDS), "at first"
        tokens = [ours.changes()]
        other.revision()
        with pytest.raises(KeyError), other.writing():
            raise KeyError
        tokens += [ours.changes()]
        for number, database in enumerate((ours, other)):
            submit(Jobs(database), f"job-{number}")
            assert notified.acquire(timeout=DEADLINE_SECONDS)
            tokens += [ours.changes()]
    assert tokens[0] == tokens[1] != tokens[2] != tokens[3]


@pytest.mark.postgres
def test_a_server_that_is_too_old_is_refused(
    migrated_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "MINIMUM_VERSION", 99)
    assert "Muster needs 99 or newer" in refused(migrated_postgres)


# Timeouts


@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_a_foreign_lock_is_reported(sqlite_url: str, tmp_path: Path, lock: str) -> None:
    Database.open(sqlite_url).close()
    with closing(Database.open(sqlite_url, busy_timeout_seconds=BRIEF_SECONDS)) as database:
        with closing(sqlite3.connect(tmp_path / "muster.db", isolation_level=None)) as blocker:
            blocker.execute(lock)
            with pytest.raises(DatabaseLocked, match=r"muster\.db has been locked by another"):
                submit(Jobs(database), "a")
        assert submit(Jobs(database), "a") is not None


@pytest.mark.postgres
def test_another_process_that_writes_too_long_is_reported(migrated_postgres: str) -> None:
    with (
        closing(Database.open(migrated_postgres)) as holder,
        # The server also cuts a transaction of its own that pauses for so long.
        closing(Database.open(migrated_postgres, busy_timeout_seconds=0.5)) as database,
        holder.writing(),
        pytest.raises(DatabaseUnavailable, match="lock timeout"),
    ):
        submit(Jobs(database), "a")


def test_another_thread_that_writes_too_long_is_reported(sqlite_url: str) -> None:
    errors: list[str] = []

    def write() -> None:
        try:
            submit(Jobs(database), "a")
        except DatabaseUnavailable as error:
            errors.append(str(error))

    database = Database.open(sqlite_url, busy_timeout_seconds=BRIEF_SECONDS)
    with closing(database), database.writing():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert "another thread has been writing" in errors[0]


def test_an_exhausted_pool_is_reported(sqlite_url: str) -> None:
    with closing(Database.open(sqlite_url, busy_timeout_seconds=BRIEF_SECONDS)) as database:
        with ExitStack() as readers:
            for _ in range(POOL_SIZE + POOL_OVERFLOW):
                readers.enter_context(database.reading())
            with pytest.raises(DatabaseUnavailable, match="every connection"):
                database.revision()
        database.revision()


@pytest.mark.parametrize(
    ("code", "kind"),
    [(sqlite3.SQLITE_IOERR, CommitInDoubt), (sqlite3.SQLITE_BUSY, DatabaseLocked)],
    ids=["lost", "locked out"],
)
def test_only_a_lost_commit_is_in_doubt(
    migrated_file: Path, tmp_path: Path, code: int, kind: type[DatabaseError]
) -> None:
    shutil.copy(migrated_file, tmp_path / "muster.db")
    backend = SqliteBackend(make_url(f"sqlite:///{tmp_path}/muster.db"), BRIEF_SECONDS)

    def lose(_: object) -> None:
        cause = sqlite3.OperationalError("lost")
        cause.sqlite_errorcode = code
        raise OperationalError("COMMIT", None, cause)

    with closing(Database(backend, BRIEF_SECONDS)) as database:
        event.listen(backend.engine, "commit", lose)
        with pytest.raises(DatabaseUnavailable) as caught:
            submit(Jobs(database), "a")
        assert type(caught.value) is kind
        event.remove(backend.engine, "commit", lose)
        assert submit(Jobs(database), "a") is not None, "no transaction was left open"


# Databases that cannot be opened


def test_a_file_that_is_not_a_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 100)
    assert "is not an SQLite database" in refused(f"sqlite:///{path}")
    assert path.read_text() == "Dear diary, " * 100


def test_a_damaged_file_is_reported(sqlite_url: str, tmp_path: Path) -> None:
    Database.open(sqlite_url).close()
    path, page = tmp_path / "muster.db", 4096
    path.write_bytes(path.read_bytes()[:page] + b"\xff" * (path.stat().st_size - page))
    with pytest.raises(DatabaseUnavailable, match="is damaged"):
        Jobs(Database.open(sqlite_url)).unfinished()


def test_a_place_without_room_for_a_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    error = refused(f"sqlite:///{tmp_path}/file/muster.db")
    assert "cannot create the database" in error
    assert "MUSTER_DATA_DIR" in error
    assert f"{tmp_path} cannot be opened" in refused(f"sqlite:///{tmp_path}")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    assert "not shared between processes" in refused(url)


# Values and statements that are refused

REFUSED: dict[str, Callable[[Connection], object]] = {
    "half a surrogate pair": lambda on: on.execute(update(JOBS).values(message="\ud800")),
    "beyond 64 bits": lambda on: on.execute(update(JOBS).values(group_round=2**63)),
    "no time zone": lambda on: on.execute(
        update(JOBS).values(started_at=NOON.replace(tzinfo=None))
    ),
    "no such job": lambda on: on.execute(
        insert(EVENTS), {"job_id": "none", "at": NOON, "kind": "k", "message": "m"}
    ),
    "the caller's own error": lambda _: {}["key"],
}


@pytest.mark.parametrize("write", REFUSED.values(), ids=REFUSED)
def test_a_failing_transaction_leaves_no_trace(
    database: Database, write: Callable[[Connection], object]
) -> None:
    def write_twice() -> None:
        with database.writing() as connection:
            connection.execute(update(JOBS).values(reason="first"))
            write(connection)

    submit(Jobs(database), "a")
    errors = (ValueError, ArithmeticError, KeyError, DatabaseError)
    with nothing_moves(database), pytest.raises(errors):
        write_twice()


def test_a_spec_of_a_later_version_is_reported(database: Database) -> None:
    submit(Jobs(database), "a")
    with database.writing() as connection:
        connection.exec_driver_sql("UPDATE jobs SET spec = '{\"warp\": 9}'")
    with pytest.raises(DatabaseError, match="JobSpec that this version of Muster cannot read"):
        Jobs(database).unfinished()


def test_a_nul_is_kept_or_refused_but_never_cuts_a_text(database: Database) -> None:
    submit(Jobs(database), "a")
    expected = "a\0b"
    try:
        with database.writing() as connection:
            connection.execute(update(JOBS).values(message=expected))
    except DatabaseError:
        expected = None
    assert Jobs(database).get(JobId("a")).message == expected


# SQLite's settings


@pytest.mark.parametrize(
    ("version", "mode"),
    [((3, 40, 1), "truncate"), ((3, 51, 2), "truncate"), ((3, 51, 3), "wal"), ((4, 0, 0), "wal")],
)
def test_wal_is_used_only_where_it_is_safe(version: tuple[int, ...], mode: str) -> None:
    assert journal_mode(version) == mode


def test_an_open_changes_the_file_to_the_safe_journal(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later_sqlite:
        later_sqlite.setattr("database.sqlite.SAFE_WAL", (3, 0, 0))
        modern = Database.open(sqlite_url)
        before = modern.changes()
        submit(Jobs(modern), "a")
        assert modern.changes() != before
        assert (tmp_path / "muster.db-wal").exists()
    monkeypatch.setattr("database.sqlite.SAFE_WAL", (9, 0, 0))
    assert "locked by another process" in refused(sqlite_url)
    modern.close()
    with closing(Database.open(sqlite_url)) as careful:
        assert Jobs(careful).find(JobId("a")) is not None
        assert not (tmp_path / "muster.db-wal").exists()


def test_connections_are_durable_and_check_references(sqlite_url: str) -> None:
    names = ("foreign_keys", "synchronous", "journal_mode", "busy_timeout")
    with closing(Database.open(sqlite_url)) as database, database.writing() as connection:
        settings = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]
    assert settings == [1, 2, journal_mode(sqlite3.sqlite_version_info), 10_000]


ZONES = st.sampled_from([UTC, timezone(timedelta(hours=-7, minutes=3))])


@given(st.datetimes(timezones=ZONES), st.datetimes(timezones=ZONES))
def test_stored_times_are_exact_ordered_and_in_utc(one: datetime, other: datetime) -> None:
    stored = [UtcTime().process_bind_param(each, None) for each in (one, other)]
    found = UtcTime().process_result_value(stored[0], None)
    assert found == one
    assert found.tzinfo is UTC
    assert (stored[0] < stored[1]) == (one < other)
