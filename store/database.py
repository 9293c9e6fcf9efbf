"""The door to the rows: transactions that begin right, and errors that are sentences."""

import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, Connection, Table, func, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from store import schema
from store.backend import Backend, Insert
from store.breaker import Breaker
from store.company import Result, Work, trouble_of_all, write_together
from store.errors import CommitInDoubt, StoreLocked, StoreUnavailable
from store.place import refuse_unknown, shown
from store.postgres import PostgresBackend
from store.sqlite import SqliteBackend

BUSY_TIMEOUT_SECONDS: Final = 10.0
"""How long a reader or a writer waits for others. Writers are few and short, so that a longer
wait means that somebody is stuck."""


class Database:
    """An open database. Any thread may use it; one object is enough for a process.

    While the database is away, locked or stopped, whoever asks is told so with `StoreUnavailable`:
    at once where it can be known, and else after a few waits of the busy timeout at most each: for
    this process's other writers, for a connection, for a turn, and for the other processes.
    """

    def __init__(self, backend: Backend, busy_timeout_seconds: float) -> None:
        self._backend = backend
        self._busy_timeout_seconds = busy_timeout_seconds
        # Threads that queue here are served in turn; in the busy handler they would starve.
        self._writer = threading.Lock()
        # Two, since a writer that is stuck need not keep anybody from reading.
        self._readers_breaker = Breaker()
        self._writers_breaker = Breaker()

    @classmethod
    def open(cls, url: str, *, busy_timeout_seconds: float = BUSY_TIMEOUT_SECONDS) -> "Database":
        """Open the database at ``sqlite:///<path>`` or ``postgresql://…``; make or migrate it.

        Any number of processes may do so at the same instant. Raises `StoreUnavailable` or
        `StoreNewer`, and then nothing is changed.
        """
        database = cls(_backend(url, busy_timeout_seconds), busy_timeout_seconds)
        try:
            database._prepare()
        except BaseException:
            database.close()
            raise
        return database

    @classmethod
    def as_it_is(cls, url: str, *, busy_timeout_seconds: float) -> "Database":
        """Open a database that is there, and neither make nor migrate it."""
        return cls(_backend(url, busy_timeout_seconds), busy_timeout_seconds)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Open a transaction that only reads: whatever is read inside is of one moment."""
        with (
            self._readers_breaker.attempt(),
            self._explained(),
            self._backend.engine.begin() as connection,
        ):
            self._backend.begin_reading(connection)
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Open a transaction that may write.

        It is durable when the block is left, and without a trace if that raises, other than
        `CommitInDoubt`. There is one at a time, in this process and in all others: what was read
        inside is still true at its end.
        """
        with self._writers_breaker.attempt(), self._transaction() as connection:
            yield connection

    def write_together(self, works: Sequence[Work[Result]]) -> list[Result | Exception]:
        """Do all `works` in one transaction as of `writing`; return what each returns or raises.

        Each sees what those before it have written. So it refuses, with a `StoreError`, only what
        it has not begun to write; whatever else it raises undoes its own write and no other's.
        """
        try:
            with self._writers_breaker.attempt():
                outcomes = write_together(self._transaction, works)
                if trouble := trouble_of_all(outcomes):
                    raise trouble
        except StoreUnavailable as error:
            return [error] * len(works)
        return outcomes

    def upsert(self, table: Table, kept: Collection[str] = ()) -> Insert:
        """Return the statement that inserts a row, or replaces the one with the same key.

        Columns that are `kept` stay what they are once they are something.
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

    def insert_new(self, table: Table) -> Insert:
        """Return the statement that inserts a row, or none where its key is taken: `rowcount`."""
        insert = self._backend.insert(table)
        new = insert.on_conflict_do_nothing(index_elements=list(table.primary_key))
        return new.execution_options(preserve_rowcount=True)

    def json(self, column: Column[Any]) -> ColumnElement[Any]:
        """Return a column of JSON text as something one can look into: ``json(c)["name"]``."""
        return self._backend.json(column)

    def changes(self) -> int | None:
        """Return a token that differs after any commit, this object's own included.

        It costs microseconds. None: this kind of database has no such token, so read the rows.
        For one thread at a time.
        """
        with self._explained():
            return self._backend.changes()

    @property
    def kind(self) -> str:
        """``sqlite`` or ``postgresql``."""
        return self._backend.engine.dialect.name

    def revision(self) -> str | None:
        """Return the revision of the schema, or raise `StoreError` if it cannot be read."""
        with self.reading() as connection:
            return schema.revision(connection)

    def check(self) -> None:
        """Raise `StoreError` unless the database can be read."""
        self.revision()

    def close(self) -> None:
        """Close every connection."""
        self._backend.close()

    def _prepare(self) -> None:
        with self._explained():
            with self._backend.engine.connect() as connection:
                ready = self._backend.is_prepared(connection) and (
                    schema.revision(connection) == schema.HEAD
                )
            if not ready:
                with self._backend.migrating() as connection:
                    url = self._backend.engine.url
                    schema.migrate(connection, shown(url.render_as_string(hide_password=False)))

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        is_committing = False
        try:
            with (
                self._alone(),
                self._explained(),
                self._backend.engine.begin() as connection,
            ):
                self._backend.begin_writing(connection)
                yield connection
                is_committing = True
        except StoreUnavailable as error:
            # Who was not let in, by a lock, has written nothing.
            if is_committing and not isinstance(error, StoreLocked):
                raise CommitInDoubt(str(error)) from error
            raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._writer.acquire(timeout=self._busy_timeout_seconds):
            raise StoreUnavailable(
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
            raise StoreUnavailable(
                f"every connection to the database has been in use for more than "
                f"{self._busy_timeout_seconds:g} s: try again"
            ) from error
        except SQLAlchemyError as error:
            raise self._backend.explain(error) from error


def _backend(url: str, busy_timeout_seconds: float) -> Backend:
    refuse_unknown(url)
    parsed = make_url(url)
    try:
        if parsed.get_backend_name() == "sqlite":
            return SqliteBackend(parsed, busy_timeout_seconds)
        parsed = parsed.set(drivername="postgresql+psycopg")
        return PostgresBackend(parsed, busy_timeout_seconds)
    except (ArgumentError, ValueError):
        # What is wrong is not repeated: in the driver's words it may be a secret.
        raise StoreUnavailable(
            f"the database {shown(url)} cannot be opened: something after the ? in its URL is not "
            "what the driver takes, correct MUSTER_DATABASE_URL"
        ) from None
