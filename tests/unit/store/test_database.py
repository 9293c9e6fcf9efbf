"""The door to the rows: transactions, refusals, and what is noticed from outside."""

import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scarcity import no_descriptors
from sqlalchemy import Connection, bindparam, event, func, insert, make_url, select, update
from sqlalchemy.exc import OperationalError
from store_samples import NOON, nothing_moves, submit

from muster.contracts.job import JobId
from store.backend import POOLED, POOLED_BURST
from store.columns import Moment
from store.database import Database
from store.errors import CommitInDoubt, StoreError, StoreLocked, StoreUnavailable
from store.jobs import Jobs
from store.sqlite import SqliteBackend, journal_mode
from store.tables import EVENTS, JOBS

BRIEF_SECONDS = 0.05


def test_a_database_is_made_with_its_directory_and_only_for_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "muster.db"
    Database.open(f"sqlite:///{path}").close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_what_was_written_is_there_after_a_reopening(url: str) -> None:
    first = Database.open(url)
    job = submit(Jobs(first), "a")
    first.close()
    second = Database.open(url)
    assert Jobs(second).get(job.job_id) == job
    second.close()


def test_a_current_database_is_opened_without_alembic(migrated_file: Path) -> None:
    program = (
        "import sys; from store.database import Database\n"
        f"Database.open({f'sqlite:///{migrated_file}'!r}).check()\n"
        "assert 'alembic' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.slow
def test_four_threads_on_two_doors_that_read_and_then_write_lose_nothing(url: str) -> None:
    doors = [Database.open(url), Database.open(url)]
    job = submit(Jobs(doors[0]), "a")
    stamp = update(JOBS).values(generation=bindparam("new"))

    def count_up(database: Database) -> None:
        for _ in range(100):
            with database.writing() as connection:
                seen = connection.execute(select(JOBS.c.generation)).scalar_one()
                connection.execute(stamp, {"new": seen + 1})

    threads = [threading.Thread(target=count_up, args=(door,)) for door in doors * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Jobs(doors[0]).get(job.job_id).generation == 400
    for door in doors:
        door.close()


def test_a_block_that_raises_leaves_no_trace(database: Database) -> None:
    submit(Jobs(database), "a")

    def fail() -> None:
        with database.writing() as connection:
            connection.execute(update(JOBS).values(message="half done"))
            raise KeyError

    with nothing_moves(database), pytest.raises(KeyError):
        fail()


def test_a_commit_of_anybody_changes_the_token(sqlite_url: str) -> None:
    ours, theirs = Database.open(sqlite_url), Database.open(sqlite_url)
    tokens = [ours.changes()]
    for number, database in enumerate((ours, theirs)):
        submit(Jobs(database), f"job-{number}")
        tokens += [ours.changes(), ours.changes()]
    assert tokens[0] != tokens[1] == tokens[2] != tokens[3] == tokens[4]
    ours.close()
    theirs.close()


@pytest.mark.postgres
def test_postgres_has_no_token(migrated_postgres: str) -> None:
    database = Database.open(migrated_postgres)
    assert database.changes() is None
    database.close()


def test_to_look_for_changes_never_waits_for_a_writer(sqlite_url: str, tmp_path: Path) -> None:
    database = Database.open(sqlite_url)
    token = database.changes()
    blocker = sqlite3.connect(tmp_path / "muster.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    assert database.changes() == token
    blocker.close()
    database.close()


@pytest.mark.parametrize("lock", ["BEGIN EXCLUSIVE", "BEGIN IMMEDIATE"])
def test_a_lock_held_for_too_long_is_a_sentence(sqlite_url: str, tmp_path: Path, lock: str) -> None:
    Database.open(sqlite_url).close()
    database = Database.open(sqlite_url, busy_timeout_seconds=BRIEF_SECONDS)
    blocker = sqlite3.connect(tmp_path / "muster.db", isolation_level=None)
    blocker.execute(lock)
    with pytest.raises(StoreLocked, match=r"muster\.db has been locked by another process"):
        submit(Jobs(database), "a")
    blocker.execute("ROLLBACK")
    blocker.close()
    assert submit(Jobs(database), "a") is not None
    database.close()


@pytest.mark.parametrize(
    ("code", "told"),
    [(sqlite3.SQLITE_IOERR, CommitInDoubt), (sqlite3.SQLITE_BUSY, StoreLocked)],
    ids=["lost", "not let in"],
)
def test_only_what_is_lost_at_its_commit_is_in_doubt(
    migrated_file: Path, tmp_path: Path, code: int, told: type[StoreError]
) -> None:
    shutil.copy(migrated_file, tmp_path / "muster.db")
    backend = SqliteBackend(make_url(f"sqlite:///{tmp_path}/muster.db"), BRIEF_SECONDS)
    database = Database(backend, BRIEF_SECONDS)

    def lose(_: object) -> None:
        cause = sqlite3.OperationalError("lost")
        cause.sqlite_errorcode = code
        raise OperationalError("COMMIT", None, cause)

    event.listen(backend.engine, "commit", lose)
    with pytest.raises(StoreUnavailable) as caught:
        submit(Jobs(database), "a")
    assert type(caught.value) is told
    event.remove(backend.engine, "commit", lose)
    assert submit(Jobs(database), "a") is not None  # nothing of it was kept open
    database.close()


def test_a_thread_that_writes_for_too_long_is_a_sentence_for_the_others(sqlite_url: str) -> None:
    database = Database.open(sqlite_url, busy_timeout_seconds=BRIEF_SECONDS)
    refused: list[str] = []

    def write() -> None:
        try:
            submit(Jobs(database), "a")
        except StoreUnavailable as error:
            refused.append(str(error))

    with database.writing():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "another thread has been writing" in refused[0]
    database.close()


@pytest.mark.postgres
def test_what_is_read_together_is_of_one_moment_whoever_writes_meanwhile(
    migrated_postgres: str,
) -> None:
    reader, writer = Database.open(migrated_postgres), Database.open(migrated_postgres)
    count = select(func.count()).select_from(JOBS)
    with reader.reading() as connection:
        before = connection.execute(count).scalar_one()
        submit(Jobs(writer), "meanwhile")
        assert connection.execute(count).scalar_one() == before
    with reader.reading() as connection:
        assert connection.execute(count).scalar_one() == before + 1
    reader.close()
    writer.close()


@pytest.mark.postgres
def test_another_process_that_writes_for_too_long_is_a_sentence(migrated_postgres: str) -> None:
    holder = Database.open(migrated_postgres)
    database = Database.open(migrated_postgres, busy_timeout_seconds=BRIEF_SECONDS)
    with holder.writing(), pytest.raises(StoreUnavailable, match="lock timeout"):
        submit(Jobs(database), "a")
    holder.close()
    database.close()


def test_a_connection_that_does_not_come_free_is_a_sentence(sqlite_url: str) -> None:
    database = Database.open(sqlite_url, busy_timeout_seconds=BRIEF_SECONDS)
    with ExitStack() as readers:
        for _ in range(POOLED + POOLED_BURST):
            readers.enter_context(database.reading())
        with pytest.raises(StoreUnavailable, match="every connection"):
            database.check()
    database.check()
    database.close()


def refused(url: str) -> str:
    """Return the sentence with which `url` is not opened."""
    with pytest.raises(StoreUnavailable) as caught:
        Database.open(url, busy_timeout_seconds=BRIEF_SECONDS)
    return str(caught.value)


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("Dear diary, " * 100)
    assert "is no SQLite database" in refused(f"sqlite:///{path}")
    assert path.read_text() == "Dear diary, " * 100


def test_where_too_many_files_are_open_that_is_said_and_not_the_path(sqlite_url: str) -> None:
    database = Database.open(sqlite_url)
    database.close()
    with no_descriptors(), pytest.raises(StoreUnavailable, match="too many open files"):
        database.check()


def test_a_file_that_was_removed_or_moved_is_neither_read_nor_written(
    sqlite_url: str, tmp_path: Path
) -> None:
    database = Database.open(sqlite_url)
    job = submit(Jobs(database), "before")
    path = Path(tmp_path, "muster.db")
    path.rename(tmp_path / "elsewhere.db")
    for use in (database.check, lambda: submit(Jobs(database), "after")):
        with pytest.raises(StoreUnavailable, match="is gone") as refused:
            use()
        assert not isinstance(refused.value, CommitInDoubt)
    assert "permissions" not in str(refused.value)
    path.with_name("elsewhere.db").rename(path)
    assert Jobs(database).get(job.job_id) == job
    submit(Jobs(database), "back")
    database.close()


def test_a_file_that_is_lost_within_a_transaction_is_not_one_of_wrong_permissions(
    sqlite_url: str, tmp_path: Path
) -> None:
    def write_what_is_gone(connection: Connection) -> None:
        Path(tmp_path, "muster.db").unlink()
        connection.exec_driver_sql("CREATE TABLE more (one)")

    database = Database.open(sqlite_url)
    with pytest.raises(StoreUnavailable, match="is gone"), database.writing() as connection:
        write_what_is_gone(connection)
    database.close()


def test_another_file_in_the_place_of_the_one_that_is_open_is_not_taken_for_it(
    sqlite_url: str, tmp_path: Path, migrated_file: Path
) -> None:
    database = Database.open(sqlite_url)
    shutil.copy(migrated_file, tmp_path / "copy.db")
    (tmp_path / "copy.db").rename(tmp_path / "muster.db")
    with pytest.raises(StoreUnavailable, match="start the services again"):
        database.check()
    database.close()


def test_a_directory_is_no_database(tmp_path: Path) -> None:
    assert f"{tmp_path} cannot be opened" in refused(f"sqlite:///{tmp_path}")


def test_a_place_where_nothing_can_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sentence = refused(f"sqlite:///{tmp_path}/file/muster.db")
    assert "there can be no database at" in sentence
    assert "MUSTER_DATA_DIR" in sentence


@pytest.mark.parametrize(
    "url", ["", "nonsense", "mysql://root:hunter2@host/db", "postgresql+asyncpg://host/db"]
)
def test_an_unknown_kind_of_database_is_refused_without_repeating_a_password(url: str) -> None:
    sentence = refused(url)
    assert "use sqlite:///<path> or postgresql://" in sentence
    assert "hunter2" not in sentence


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(url: str) -> None:
    assert "not shared between processes" in refused(url)


def test_a_server_that_is_not_there_is_a_sentence_without_the_password() -> None:
    sentence = refused("postgresql://ada:hunter2@127.0.0.1:1/muster")
    assert "cannot be used now" in sentence
    assert "hunter2" not in sentence


def test_a_damaged_file_is_a_sentence(sqlite_url: str, tmp_path: Path) -> None:
    Database.open(sqlite_url).close()
    path = tmp_path / "muster.db"
    page = 4096
    path.write_bytes(path.read_bytes()[:page] + b"\xff" * (path.stat().st_size - page))
    with pytest.raises(StoreUnavailable, match="is damaged"):
        Jobs(Database.open(sqlite_url)).unfinished()


UNSTORABLE = {
    "half a surrogate pair": "\ud800",
    "an integer beyond 64 bits": 2**63,
}


@pytest.mark.parametrize("value", list(UNSTORABLE.values()), ids=list(UNSTORABLE))
def test_a_value_no_row_can_hold_leaves_no_trace(database: Database, value: str | int) -> None:
    submit(Jobs(database), "a")
    column = "message" if isinstance(value, str) else "generation"

    def write() -> None:
        with database.writing() as connection:
            connection.execute(update(JOBS).values(reason="first"))
            connection.execute(update(JOBS).values({column: value}))

    with nothing_moves(database), pytest.raises((ValueError, ArithmeticError, StoreError)):
        write()


def test_a_time_without_a_zone_leaves_no_trace(database: Database) -> None:
    submit(Jobs(database), "a")

    def write() -> None:
        with database.writing() as connection:
            connection.execute(update(JOBS).values(started_at=NOON.replace(tzinfo=None)))

    with nothing_moves(database), pytest.raises(StoreError, match="offset-naive"):
        write()


def test_a_spec_from_a_later_version_is_a_sentence(database: Database) -> None:
    submit(Jobs(database), "a")
    with database.writing() as connection:
        connection.exec_driver_sql("UPDATE jobs SET spec = '{\"warp\": 9}'")
    with pytest.raises(StoreError, match="JobSpec that this version of Muster cannot read"):
        Jobs(database).unfinished()


def test_a_nul_is_kept_or_refused_but_never_cuts_a_text(database: Database) -> None:
    submit(Jobs(database), "a")
    try:
        with database.writing() as connection:
            connection.execute(update(JOBS).values(message="a\0b"))
    except StoreError:
        assert Jobs(database).get(JobId("a")).message is None
    else:
        assert Jobs(database).get(JobId("a")).message == "a\0b"


def test_a_row_of_an_unknown_job_is_refused(database: Database) -> None:
    def write() -> None:
        with database.writing() as connection:
            row = {"job_id": "nobody", "at": datetime.now(UTC), "kind": "k", "message": "m"}
            connection.execute(insert(EVENTS), row)

    with nothing_moves(database), pytest.raises(StoreError, match="nothing is written"):
        write()


@pytest.mark.parametrize(
    ("version", "mode"),
    [((3, 40, 1), "delete"), ((3, 51, 2), "delete"), ((3, 51, 3), "wal"), ((4, 0, 0), "wal")],
)
def test_a_write_ahead_log_is_used_only_where_it_is_safe(
    version: tuple[int, ...], mode: str
) -> None:
    assert journal_mode(version) == mode


def test_a_file_changes_to_the_safe_journal_when_it_is_opened(
    sqlite_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later_sqlite:
        later_sqlite.setattr("store.sqlite.SAFE_WAL", (3, 0, 0))
        modern = Database.open(sqlite_url)
        before = modern.changes()
        submit(Jobs(modern), "a")
        assert modern.changes() != before
        assert (tmp_path / "muster.db-wal").exists()
    monkeypatch.setattr("store.sqlite.SAFE_WAL", (9, 0, 0))
    assert "locked by another process" in refused(sqlite_url)
    modern.close()
    careful = Database.open(sqlite_url)
    assert Jobs(careful).find(JobId("a")) is not None
    assert not (tmp_path / "muster.db-wal").exists()
    careful.close()


def test_every_connection_is_durable_and_checks_references(sqlite_url: str) -> None:
    database = Database.open(sqlite_url)
    with database.writing() as connection:
        settings = [
            connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("foreign_keys", "synchronous", "journal_mode", "busy_timeout")
        ]
    assert settings == [1, 2, journal_mode(sqlite3.sqlite_version_info), 10_000]
    database.close()


@given(st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-7, minutes=3))])))
def test_a_time_survives_to_the_microsecond_and_comes_back_in_utc(moment: datetime) -> None:
    column = Moment()
    stored = column.process_bind_param(moment, None)
    found = column.process_result_value(stored, None)
    assert found == moment
    assert found.tzinfo is UTC


@pytest.mark.slow
@given(st.lists(st.datetimes(timezones=st.just(UTC)), min_size=2))
def test_stored_times_are_ordered_as_the_times_are(moments: list[datetime]) -> None:
    column = Moment()
    assert sorted(moments) == sorted(moments, key=lambda at: column.process_bind_param(at, None))


def test_a_time_without_a_zone_is_refused() -> None:
    with pytest.raises(TypeError):
        Moment().process_bind_param(datetime(2026, 1, 1), None)  # noqa: DTZ001  the point
