"""`Database`: transactions on SQLite or PostgreSQL, with the driver's errors as plain sentences."""

import secrets
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from sqlalchemy import (
    URL,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Table,
    delete,
    func,
    insert,
    make_url,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from database import HEAD
from database.errors import (
    CommitInDoubt,
    DatabaseError,
    DatabaseFull,
    DatabaseLocked,
    DatabaseUnavailable,
)
from database.postgres import PostgresBackend
from database.replication.copy import position_of
from database.replication.outbox import Replication
from database.sqlite import SqliteBackend
from database.tables import IMAGE, current_revision, migrate
from muster.contracts.location import expand_home

BUSY_TIMEOUT_SECONDS: Final = 10.0
"""Longest wait for a lock or a connection. Writers are few and short, so a longer wait means that
another process is stuck."""

POOL_SIZE: Final = 5
POOL_OVERFLOW: Final = 35  # together one connection for each of the 40 threads of a web server

CONNECTIONS_NEEDED: Final = 2 * (POOL_SIZE + POOL_OVERFLOW + 1)
"""API and coordinator have a pool each, and a connection for notifications."""

INSPECTION_TIMEOUT_SECONDS: Final = 3.0

_DRIVERS: Final = ("sqlite", "sqlite+pysqlite", "postgresql", "postgresql+psycopg")

_PUBLIC_PARAMETERS: Final = frozenset(
    "application_name connect_timeout dbname host hostaddr port sslcert sslkey sslmode "  # noqa: SIM905
    "sslrootcert target_session_attrs user".split()
)
"""The only parameters taken after the ? of a PostgreSQL URL: none of them holds a secret."""

_NO_ROW: Final = nullcontext()

Insert: TypeAlias = sqlite.Insert | postgresql.Insert

Item = TypeVar("Item")
Result = TypeVar("Result")


class Backend(Protocol):
    """What `Database` needs of one kind of database. Its methods raise SQLAlchemy's errors."""

    engine: Engine

    def begin_reading(self, connection: Connection) -> None:
        """Begin a read-only transaction that sees one snapshot."""

    def begin_writing(self, connection: Connection) -> None:
        """Begin a write transaction: the only one in all processes until it ends.

        It sees everything committed before, so a read followed by a write loses no update. A
        waiting writer is not starved by another one that writes again and again.
        """

    def is_prepared(self, connection: Connection) -> bool:
        """Return whether the settings stored in the database itself are the required ones."""

    def migrating(self) -> AbstractContextManager[Connection]:
        """Open a transaction for a schema migration, exclusive among all processes."""

    def insert(self, table: Table) -> Insert:
        """Return an INSERT that supports ON CONFLICT."""

    def json(self, column: Column[Any]) -> ColumnElement[Any]:
        """Return a column of JSON text as an expression that can be indexed."""

    def listen(self, on_commit: Callable[[], None]) -> bool:
        """Call `on_commit` in a thread after commits of any process; False if it cannot."""

    def changes(self) -> int | None:
        """Return a number that differs after any other commit; None if there is none now."""

    def facts(self, connection: Connection) -> Mapping[str, Any]:
        """Return version; of a server also max_connections, encoding and is_read_only."""

    def back_up(self, path: Path) -> None:
        """Write one consistent state to a new file; raises `DatabaseError`, and leaves no file."""

    def explain(self, error: SQLAlchemyError) -> DatabaseError:
        """Translate an error of the driver."""

    def close(self) -> None:
        """Close every connection."""


class Database:
    """An open database. Any thread may use it; one object per process is enough.

    While the database is away or locked, every method raises `DatabaseUnavailable` after at most a
    few busy timeouts: for this process's other writers, for a connection, and for other processes.
    """

    replication: Replication | None = None
    """Set by `open`."""

    def __init__(self, backend: Backend, busy_timeout_seconds: float) -> None:
        self._backend = backend
        self._busy_timeout_seconds = busy_timeout_seconds
        # Threads waiting here are served in turn; in SQLite's busy handler they would starve.
        self._writer = threading.Lock()

    @classmethod
    def open(
        cls,
        url: str | Path,
        *,
        busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS,
        migrate: bool = True,
        replication: Replication | None = None,
    ) -> "Database":
        """Open the database at ``sqlite:///<path>``, ``postgresql://…`` or in a file.

        It is created or migrated; any number of processes may do so at the same time. Raises
        `DatabaseUnavailable` or `SchemaRefused`, and then nothing is changed. Without `migrate` the
        schema stays as it is. With `replication` transactions on SQLite leave rows for followers.
        """
        database = cls(_backend(url, busy_timeout_seconds), busy_timeout_seconds)
        try:
            if migrate:
                database._migrate(replication)
        except BaseException:
            database.close()
            raise
        return database

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a read-only transaction that sees one snapshot."""
        with self._explained(), self._backend.engine.begin() as connection:
            self._backend.begin_reading(connection)
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a write transaction, the only one at a time in this and all other processes.

        It is durable when the block is left, and leaves no trace if the block raises. After
        `CommitInDoubt` it may or may not be durable.
        """
        is_committing = False
        try:
            with self._exclusive_writer(), self._explained():
                with self._backend.engine.begin() as connection:
                    self._backend.begin_writing(connection)
                    with self.replication.recording(connection) if self.replication else _NO_ROW:
                        yield connection
                    is_committing = True
                if self.replication is not None:
                    self.replication.note_commit()
        except DatabaseUnavailable as error:
            # A commit that failed on a lock or for lack of room has written nothing.
            if is_committing and not isinstance(error, DatabaseLocked | DatabaseFull):
                raise CommitInDoubt(str(error)) from error
            raise

    def write_together(
        self,
        items: Sequence[Item],
        write: Callable[[Connection, Sequence[Item]], list[Result | Exception]],
    ) -> list[Result | Exception]:
        """Group commit: write all `items` in one transaction; return the result of each.

        They share round trips and the fsync, most of the cost of a small write. If `write` raises,
        each item gets a transaction of its own. A result that is no exception is durable.
        """
        try:
            with self.writing() as connection:
                return write(connection, items)
        except DatabaseUnavailable as error:
            return [error] * len(items)
        except Exception as error:  # noqa: BLE001  the error is one item's result
            if len(items) == 1:
                return [error]
        outcomes: list[Result | Exception] = []
        for item in items:
            outcomes += self.write_together([item], write)
            if isinstance(outcomes[-1], DatabaseUnavailable):
                return outcomes + outcomes[-1:] * (len(items) - len(outcomes))
        return outcomes

    async def acknowledge(self) -> bool:
        """Return whether followers have all that this object has committed; True without any.

        See `Replication.acknowledge`.
        """
        return self.replication is None or await self.replication.acknowledge()

    def upsert(self, table: Table, kept: Collection[str] = ()) -> Insert:
        """Return the statement that inserts a row, or replaces the one with the same key.

        Columns in `kept` keep their first value that is not NULL.
        """
        insert = self._backend.insert(table)
        return insert.on_conflict_do_update(
            index_elements=list(table.primary_key),
            set_={
                column.name: func.coalesce(column, insert.excluded[column.name])
                if column.name in kept
                else insert.excluded[column.name]
                for column in table.c
                if not column.primary_key
            },
        )

    def json(self, column: Column[Any]) -> ColumnElement[Any]:
        """Return a column of JSON text that can be indexed: ``json(c)["name"]``."""
        return self._backend.json(column)

    def listen(self, on_commit: Callable[[], None]) -> bool:
        """Call `on_commit` in a thread soon after each commit of any process, on any host.

        Return False if this kind of database cannot: SQLite. A call may be lost with a connection.
        """
        return self._backend.listen(on_commit)

    def changes(self) -> int | None:
        """Return a token that differs after any commit, this object's own included.

        It costs microseconds. None: there is no such token now, so read the rows; on PostgreSQL
        there is one after `listen`. Not thread-safe.
        """
        with self._explained():
            return self._backend.changes()

    @property
    def kind(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._backend.engine.dialect.name

    def revision(self) -> str | None:
        """Return the schema revision; None for a database without tables of Muster."""
        with self.reading() as connection:
            return current_revision(connection)

    def facts(self) -> Mapping[str, Any]:
        """Return connections_needed, and what the backend tells of itself."""
        with self.reading() as connection:
            found = self._backend.facts(connection)
        return {"connections_needed": CONNECTIONS_NEEDED, **found}

    def back_up(self, path: Path) -> None:
        """Copy the database to a new file while any process may use it; only for SQLite.

        Raises a `DatabaseError` for another kind, and if the file exists or cannot be written.
        """
        with self._explained():
            self._backend.back_up(path)

    def close(self) -> None:
        """Close every connection."""
        self._backend.close()

    def _migrate(self, replication: Replication | None) -> None:
        if self.kind != "sqlite":
            replication = None
        elif replication:  # what this node has acknowledged as a follower comes first
            path = Path(str(self._backend.engine.url.database))
            try:
                position_of(path)
            except sqlite3.Error as error:
                raise DatabaseUnavailable(
                    f"the rows of other nodes cannot be written to {path} ({error}): see whether "
                    "its disk is full, and which process has it open"
                ) from error
        with self._explained():
            with self._backend.engine.connect() as connection:
                is_ready = self._backend.is_prepared(connection) and (
                    current_revision(connection) == HEAD
                )
            if not is_ready:
                with self._backend.migrating() as connection:
                    url = self._backend.engine.url
                    migrate(connection, url.render_as_string(hide_password=True))
        self.replication = replication
        with self.reading() as connection:
            has_image = connection.execute(select(IMAGE)).first() is not None
        if has_image != bool(replication):
            with self.writing() as connection:
                connection.execute(delete(IMAGE))  # what is written without rows is in no copy
                if replication:
                    connection.execute(insert(IMAGE).values(id=secrets.token_hex(16)))
        if replication:
            with self.reading() as connection:
                replication.start(connection)

    @contextmanager
    def _exclusive_writer(self) -> Iterator[None]:
        if not self._writer.acquire(timeout=self._busy_timeout_seconds):
            raise DatabaseUnavailable(
                f"another thread has been writing for more than {self._busy_timeout_seconds:g} s: "
                "try again"
            )
        try:
            yield
        finally:
            self._writer.release()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except PoolTimeout as error:
            raise DatabaseUnavailable(
                f"every connection to the database has been in use for more than "
                f"{self._busy_timeout_seconds:g} s: try again"
            ) from error
        except SQLAlchemyError as error:
            raise self._backend.explain(error) from error


@contextmanager
def existing(url: str | Path) -> Iterator[Database | None]:
    """Open the database at `url` as it is, to read from it; None if it is a missing file."""
    parsed = parse_url(url)
    is_file = parsed.get_backend_name() == "sqlite" and parsed.database
    if is_file and not Path(str(parsed.database)).exists():
        yield None  # opening it would create it
        return
    seconds = INSPECTION_TIMEOUT_SECONDS
    with closing(Database.open(url, busy_timeout_seconds=seconds, migrate=False)) as database:
        yield database


def parse_url(text: str | Path) -> URL:
    """Parse a database URL, or make that of a file.

    Raises `DatabaseUnavailable` for one that cannot be used. The error does not repeat the text,
    which may hold a password.
    """
    if isinstance(text, Path):  # which may have a ? or % in its name
        return URL.create("sqlite", database=str(text))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        url = None
    if url is None or url.drivername not in _DRIVERS:
        raise DatabaseUnavailable(
            "the database's URL is of no known kind: use sqlite:///<path> or "
            "postgresql://<user>@<host>/<database>, and write @ as %40 and ? as %3F in a password"
        )
    if url.get_backend_name() == "sqlite":
        return url.set(database=expand_home(url.database or ""))
    # SQLAlchemy takes part of an unescaped password for a host or a database, and the driver
    # would print it.
    address, _, query = text.partition("?")
    if address.count("@") > 1 or "@" in (url.database or "") or "@" in query:
        raise DatabaseUnavailable(
            "the database's URL can be read in two ways: write @ as %40, / as %2F and ? as %3F "
            "in a password"
        )
    if not url.query.keys() <= _PUBLIC_PARAMETERS:
        raise DatabaseUnavailable(
            "the database's URL has a parameter that may hold a secret: use only "
            f"{', '.join(sorted(_PUBLIC_PARAMETERS))}, and write the password as <user>:<password>@"
        )
    return url.set(drivername="postgresql+psycopg")


def _backend(text: str | Path, busy_timeout_seconds: float) -> Backend:
    url = parse_url(text)
    options = {
        "pool_size": POOL_SIZE,
        "max_overflow": POOL_OVERFLOW,
        "pool_timeout": busy_timeout_seconds,
        "hide_parameters": True,  # a job's environment may hold secrets
    }
    kind = SqliteBackend if url.get_backend_name() == "sqlite" else PostgresBackend
    try:
        return kind(url, busy_timeout_seconds, **options)
    except (ArgumentError, ValueError):
        raise DatabaseUnavailable(
            f"the database {url.render_as_string(hide_password=True)} cannot be opened: "
            "correct the parameters after the ? in MUSTER_DATABASE_URL"
        ) from None
