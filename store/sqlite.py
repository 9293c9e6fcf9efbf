"""SQLite: the database of one machine.

Every transaction begins by hand: the driver's own BEGIN comes too late for reads, and is never
IMMEDIATE, without which a read-then-write fails at once when another one is under way, in spite
of the busy timeout.
"""

import errno
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import (
    JSON,
    URL,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Table,
    create_engine,
    event,
    type_coerce,
)
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError

from muster.lost_files import Loss, loss_of
from muster.sight import require_descriptors
from store.backend import POOLED, POOLED_BURST
from store.errors import StoreError, StoreLocked, StoreUnavailable
from store.turnstile import TURN_PATIENCE_SECONDS, Turnstile, try_lock

SAFE_WAL: Final = (3, 51, 3)
"""Before this version two connections that write and checkpoint a write-ahead log at the same
instant can corrupt the database (sqlite.org/wal.html, "the WAL-reset bug")."""

_LOCK_POLL_SECONDS: Final = 0.02

_SENTENCES: Final = {
    sqlite3.SQLITE_NOTADB: "is no SQLite database: move the file away, or name another one",
    sqlite3.SQLITE_CORRUPT: "is damaged: restore a copy, or move the file away and start afresh",
    sqlite3.SQLITE_CANTOPEN: "cannot be opened: check the path and its permissions",
    sqlite3.SQLITE_READONLY: "cannot be written: check the permissions of file and directory",
    sqlite3.SQLITE_PERM: "cannot be opened: check the permissions of file and directory",
    sqlite3.SQLITE_FULL: "has no room left on its disk: free some space",
    sqlite3.SQLITE_IOERR: "cannot be read or written: its disk reports an error",
}

_CROWDED: Final = "cannot be opened: this process has too many open files (see `ulimit -n`)"
_CRAMPED: Final = "cannot be used: its disk has no room for another file, free some space"
"""Of either SQLite says no more than of a path that is wrong."""

_LOST: Final = {
    Loss.GONE: "is gone, moved or removed while it was open: put it back, or start afresh",
    Loss.REPLACED: "was replaced by another file while it was open: start the services again to "
    "use that",
}


def journal_mode(version: tuple[int, ...]) -> str:
    """Return the journal mode that cannot lose data with this version of SQLite."""
    return "wal" if version >= SAFE_WAL else "delete"


class SqliteBackend:
    """A database file."""

    def __init__(self, url: URL, busy_timeout_seconds: float) -> None:
        """Make the file's directory. Raises `StoreUnavailable` where there can be no file."""
        if not url.database or url.database == ":memory:":
            raise StoreUnavailable(
                "a database in memory is not shared between processes: use sqlite:///<path>"
            )
        self._path = Path(url.database).absolute()
        self._busy_timeout_seconds = busy_timeout_seconds
        self._turnstile = Turnstile(
            Path(f"{self._path}.turn"), min(TURN_PATIENCE_SECONDS, busy_timeout_seconds)
        )
        self._journal_mode = journal_mode(sqlite3.sqlite_version_info)
        self._watch: sqlite3.Connection | None = None
        self._last_change: int | None = None
        self._opened = self._make_file()
        self.engine = _engine(url.set(database=str(self._path)), busy_timeout_seconds)

    def begin_reading(self, connection: Connection) -> None:
        self._refuse_if_lost()
        connection.exec_driver_sql("BEGIN")

    def begin_writing(self, connection: Connection) -> None:
        self._refuse_if_lost()
        with self._turnstile.turn():
            connection.exec_driver_sql("BEGIN IMMEDIATE")

    def is_prepared(self, connection: Connection) -> bool:
        return bool(
            connection.exec_driver_sql("PRAGMA journal_mode").scalar() == self._journal_mode
        )

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        with self._file_lock(), self.engine.connect() as connection:
            connection.detach()  # what is set here must not come back from the pool
            connection.exec_driver_sql(f"PRAGMA journal_mode = {self._journal_mode}")
            # A batch migration drops the old table: with foreign keys that deletes its children.
            connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
            self.begin_writing(connection)
            yield connection
            connection.commit()

    def insert(self, table: Table) -> sqlite.Insert:
        return sqlite.insert(table)

    def json(self, column: Column[Any]) -> ColumnElement[Any]:
        # A cast would make a number of the text.
        return type_coerce(column, JSON)

    def changes(self) -> int | None:
        if self._watch is None:
            self._watch = self._detached()
        try:
            (self._last_change,) = self._watch.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError as error:
            # A commit is being written at this moment: the next look will see it.
            if _code(error) != sqlite3.SQLITE_BUSY:
                raise DBAPIError("PRAGMA data_version", None, error) from error
        return self._last_change

    def explain(self, error: SQLAlchemyError) -> StoreError:
        cause = error.orig if isinstance(error, StatementError) else error
        code = _code(cause)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._locked()
        if code in _SENTENCES:
            reason = self._reason_behind(code) or f"{_SENTENCES[code]} ({cause})"
            return StoreUnavailable(f"the database {self._path} {reason}")
        return StoreError(
            f"the database {self._path} refused a statement, nothing is written: {cause}"
        )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        self._turnstile.close()
        self.engine.dispose()

    def _refuse_if_lost(self) -> None:
        """SQLite reads on, and may write on, what nobody will find again."""
        if loss := loss_of(self._path, self._opened):
            raise StoreUnavailable(f"the database {self._path} {_LOST[loss]}")

    def _reason_behind(self, code: int) -> str | None:
        """Return what SQLite does not tell apart from what its code is mostly due to."""
        if code == sqlite3.SQLITE_CANTOPEN and not _may_open_files():
            return _CROWDED
        if loss := loss_of(self._path, self._opened):
            return _LOST[loss]
        if code == sqlite3.SQLITE_CANTOPEN and _is_cramped(self._path.parent):
            return _CRAMPED
        return None

    def _make_file(self) -> os.stat_result:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Never touch a file that exists: closing it would drop this process's locks on it.
            if not self._path.exists():
                self._path.touch(mode=0o600)  # a job's environment may hold secrets
            return self._path.stat()
        except OSError as error:
            raise StoreUnavailable(
                f"there can be no database at {self._path} ({error}): check MUSTER_DATA_DIR and "
                "MUSTER_DATABASE_URL"
            ) from error

    def _detached(self) -> sqlite3.Connection:
        """Return a connection outside the pool that never waits."""
        pooled = self.engine.raw_connection()
        connection = pooled.driver_connection
        pooled.detach()
        assert isinstance(connection, sqlite3.Connection)  # noqa: S101  tells mypy
        connection.execute("PRAGMA busy_timeout = 0")
        return connection

    @contextmanager
    def _file_lock(self) -> Iterator[None]:
        """Hold a lock beside the database: a change of journal mode is no transaction."""
        deadline = time.monotonic() + self._busy_timeout_seconds
        descriptor = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not try_lock(descriptor):
                if time.monotonic() > deadline:
                    raise self._locked()
                time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def _locked(self) -> StoreLocked:
        return StoreLocked(
            f"the database {self._path} has been locked by another process for more than "
            f"{self._busy_timeout_seconds:g} s: try again, or see who has it open"
        )


def _engine(url: URL, busy_timeout_seconds: float) -> Engine:
    engine = create_engine(
        url,
        connect_args={"timeout": busy_timeout_seconds, "isolation_level": None},
        pool_size=POOLED,
        max_overflow=POOLED_BURST,
        pool_timeout=busy_timeout_seconds,
        hide_parameters=True,  # a job's environment may hold secrets
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _: Any) -> None:  # noqa: ANN401  SQLAlchemy's own
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute("PRAGMA synchronous = FULL")

    return engine


def _may_open_files() -> bool:
    try:
        require_descriptors()
    except OSError:
        return False
    return True


def _is_cramped(directory: Path) -> bool:
    """Whether there can be no other file: SQLite needs one beside its own to write."""
    try:
        with tempfile.TemporaryFile(dir=directory):
            return False
    except OSError as error:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _code(error: BaseException | None) -> int | None:
    """Return SQLite's primary error code; the extended one has more bits above it."""
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
