"""SQLite: the database of one machine.

Every transaction begins explicitly. The driver's implicit BEGIN comes too late for reads and is
never IMMEDIATE; a read followed by a write then fails at once if another transaction is writing, in
spite of the busy timeout.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from database.errors import DatabaseError, DatabaseFull, DatabaseLocked, DatabaseUnavailable

SAFE_WAL: Final = (3, 51, 3)
"""Before this version two connections that write and checkpoint a write-ahead log at the same
instant can corrupt the database (sqlite.org/wal.html, "the WAL-reset bug")."""

TURN_TIMEOUT_SECONDS: Final = 0.5
"""Longest wait for the write lock. It is held for milliseconds; if its holder is stuck or stopped,
SQLite's own lock decides."""

_SENTENCES: Final = {
    sqlite3.SQLITE_NOTADB: "is not an SQLite database: move the file away, or name another one",
    sqlite3.SQLITE_CORRUPT: "is damaged: restore a copy, or move the file away and start afresh",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check the path, its permissions and the free space",
    sqlite3.SQLITE_READONLY: "cannot be written: check the permissions of file and directory",
    sqlite3.SQLITE_PERM: "cannot be opened: check the permissions of file and directory",
    sqlite3.SQLITE_FULL: "has no room left on its disk: free some space",
    sqlite3.SQLITE_IOERR: "cannot be read or written: its disk reports an error",
}

_NO_ROOM: Final = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN)
"""Without a free inode the journal cannot be opened."""


class WriteLock:
    """An advisory lock (flock) on a file beside the database.

    SQLite's writers poll, at last ten times a second, so a process that writes continuously can
    starve another one with a lease to renew. A writer therefore holds this lock until its
    transaction has begun: it is taken in turn, and the last writer queues behind.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self, timeout_seconds: float, poll_seconds: float = 0.001) -> bool:
        """Return whether the lock was acquired in time. Raises OSError without file locks."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + timeout_seconds
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(poll_seconds)
            else:
                return True

    def release(self) -> None:
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class SqliteBackend:
    """A database file."""

    def __init__(self, url: sa.URL, busy_timeout_seconds: float, **options: Any) -> None:  # noqa: ANN401
        """Create the file. `options` are for SQLAlchemy's `create_engine`.

        Raises `DatabaseUnavailable` if the file cannot be created.
        """
        if not url.database or url.database == ":memory:":
            raise DatabaseUnavailable(
                "a database in memory is not shared between processes: use sqlite:///<path>"
            )
        self._path = Path(url.database).absolute()
        self._busy_timeout_seconds = busy_timeout_seconds
        self._write_lock = WriteLock(Path(f"{self._path}.turn"))
        self._journal_mode = journal_mode(sqlite3.sqlite_version_info)
        self._watch: sqlite3.Connection | None = None
        self._last_change: int | None = None
        self._create_file()
        self.engine = sa.create_engine(
            url.set(database=str(self._path)),
            connect_args={"timeout": busy_timeout_seconds, "isolation_level": None},
            **options,
        )

        @sa.event.listens_for(self.engine, "connect")
        def configure(connection: sqlite3.Connection, _: object) -> None:
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA synchronous = FULL")
            if self._journal_mode == "truncate":  # not kept in the file
                connection.execute("PRAGMA journal_mode = truncate")

    def begin_reading(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN")

    def begin_writing(self, connection: sa.Connection) -> None:
        try:
            has_turn = self._write_lock.acquire(
                min(TURN_TIMEOUT_SECONDS, self._busy_timeout_seconds)
            )
        except OSError:  # some network file systems have no locks; SQLite's own lock remains
            has_turn = False
        try:
            connection.exec_driver_sql("BEGIN IMMEDIATE")
        finally:
            if has_turn:
                self._write_lock.release()

    def is_prepared(self, connection: sa.Connection) -> bool:
        return bool(
            connection.exec_driver_sql("PRAGMA journal_mode").scalar() == self._journal_mode
        )

    @contextmanager
    def migrating(self) -> Iterator[sa.Connection]:
        # A change of journal mode is no transaction, so a file lock excludes other processes.
        lock = WriteLock(Path(f"{self._path}.lock"))
        try:
            if not lock.acquire(self._busy_timeout_seconds, poll_seconds=0.02):
                raise self._locked()
            with self.engine.connect() as connection:
                connection.detach()  # the settings below must not return to the pool
                connection.exec_driver_sql(f"PRAGMA journal_mode = {self._journal_mode}")
                # A batch migration drops the old table; foreign keys would delete its children.
                connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
                self.begin_writing(connection)
                yield connection
                connection.commit()
        finally:
            lock.close()

    def insert(self, table: sa.Table) -> sqlite.Insert:
        return sqlite.insert(table)

    def json(self, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
        return sa.type_coerce(column, sa.JSON)  # SQLite would cast the text to a number

    def listen(self, on_commit: Callable[[], None]) -> bool:
        del on_commit
        return False

    def changes(self) -> int | None:
        if self._watch is None:
            self._watch = self._unpooled_connection()
        try:
            (self._last_change,) = self._watch.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError as error:
            # Another process is committing: the next call sees it.
            if _code(error) != sqlite3.SQLITE_BUSY:
                raise DBAPIError("PRAGMA data_version", None, error) from error
        return self._last_change

    def facts(self, connection: sa.Connection) -> Mapping[str, Any]:
        del connection
        return {"version": sqlite3.sqlite_version}

    def back_up(self, path: Path) -> None:
        try:
            path.touch(mode=0o600, exist_ok=False)
            try:
                with (
                    closing(self._unpooled_connection()) as source,
                    closing(sqlite3.connect(path)) as copy,
                ):
                    # In one step: any commit of another process between two would start it anew.
                    source.backup(copy)
                    # Two nodes may go on from one backup: their rows have nothing in common.
                    with suppress(sqlite3.OperationalError), copy:  # an earlier version has none
                        copy.execute("DELETE FROM image")
            except BaseException:
                path.unlink()
                raise
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(
                f"cannot copy the database to {path} ({getattr(error, 'strerror', error)}): name a "
                "file that does not exist yet, in a directory that does and has room"
            ) from error

    def explain(self, error: SQLAlchemyError) -> DatabaseError:
        cause = error.orig if isinstance(error, StatementError) else error
        code = _code(cause)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._locked()
        if code in _SENTENCES:
            kind = DatabaseFull if code in _NO_ROOM else DatabaseUnavailable
            return kind(f"the database {self._path} {_SENTENCES[code]} ({cause})")
        return DatabaseError(
            f"the database {self._path} refused a statement, nothing is written: {cause}"
        )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._write_lock.close()
        self.engine.dispose()

    def _create_file(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Do not open an existing file: closing it would drop this process's locks on it.
            if not self._path.exists():
                self._path.touch(mode=0o600)  # a job's environment may hold secrets
        except OSError as error:
            raise DatabaseUnavailable(
                f"cannot create the database {self._path} ({error}): check MUSTER_DATA_DIR and "
                "MUSTER_DATABASE_URL"
            ) from error

    def _unpooled_connection(self) -> sqlite3.Connection:
        """Return a connection outside the pool that never waits for a lock."""
        pooled = self.engine.raw_connection()
        connection = pooled.driver_connection
        pooled.detach()
        assert isinstance(connection, sqlite3.Connection)  # noqa: S101  tells mypy
        connection.execute("PRAGMA busy_timeout = 0")
        return connection

    def _locked(self) -> DatabaseLocked:
        return DatabaseLocked(
            f"the database {self._path} has been locked by another process for more than "
            f"{self._busy_timeout_seconds:g} s: try again, or see which process has it open"
        )


def journal_mode(version: tuple[int, ...]) -> str:
    """Return the fastest journal mode that cannot lose data with this version of SQLite.

    With `delete` every commit also makes and removes a file, which triples its 95th percentile.
    """
    return "wal" if version >= SAFE_WAL else "truncate"


def _code(error: BaseException | None) -> int | None:
    """Return SQLite's primary error code; an extended code has more bits above it."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
