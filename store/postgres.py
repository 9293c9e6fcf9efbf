"""PostgreSQL: the database of several machines.

One advisory lock, held to the end of the transaction, gives every transaction that writes what
BEGIN IMMEDIATE gives on SQLite, so that the code above needs to be right only once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from sqlalchemy import (
    JSON,
    URL,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Table,
    cast,
    create_engine,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)

from store.backend import POOLED, POOLED_BURST
from store.errors import StoreError, StoreUnavailable
from store.place import shown

WRITER_LOCK: Final = 0x4D555354
"""The advisory lock's number: "MUST"."""

CONNECT_SECONDS: Final = 3
"""A server that is there answers in milliseconds."""

MIGRATION_SECONDS: Final = 600.0
"""One statement may have to write a large table anew. Nobody else writes meanwhile."""


class PostgresBackend:
    """A database on a server."""

    def __init__(self, url: URL, busy_timeout_seconds: float) -> None:
        """Connect to nothing yet. Raises `StoreUnavailable` if the driver is not installed."""
        self._place = shown(url.render_as_string(hide_password=False))
        try:
            self.engine = _engine(url, busy_timeout_seconds)
        except ModuleNotFoundError as error:
            raise StoreUnavailable(
                f"the database {self._place} needs {error.name}: "
                "pip install 'muster-train[postgres]'"
            ) from error

    def begin_reading(self, connection: Connection) -> None:
        # At the usual level each statement would see what was committed up to its own beginning.
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    def begin_writing(self, connection: Connection) -> None:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")

    def is_prepared(self, connection: Connection) -> bool:
        del connection
        return True

    @contextmanager
    def migrating(self) -> Iterator[Connection]:
        from store.postgres_connection import be_patient  # noqa: PLC0415  as in `_engine`

        with self.engine.connect() as connection:
            connection.detach()  # its patience must not come back from the pool
            with connection.begin():
                self.begin_writing(connection)
                be_patient(connection, MIGRATION_SECONDS)
                yield connection

    def insert(self, table: Table) -> postgresql.Insert:
        return postgresql.insert(table)

    def json(self, column: Column[Any]) -> ColumnElement[Any]:
        return cast(column, JSON)

    def changes(self) -> int | None:
        return None

    def explain(self, error: SQLAlchemyError) -> StoreError:
        cause = error.orig if isinstance(error, StatementError) else error
        if _is_of_the_server(error):
            return StoreUnavailable(
                f"the database {self._place} cannot be used now: check the server and try again "
                f"({str(cause).strip()})"
            )
        return StoreError(
            f"the database {self._place} refused a statement, nothing is written: {cause}"
        )

    def close(self) -> None:
        self.engine.dispose()


def _is_of_the_server(error: SQLAlchemyError) -> bool:
    """Whether the connection is to blame, and not the statement."""
    ended = isinstance(error, DBAPIError) and error.connection_invalidated
    return ended or isinstance(error, OperationalError | InterfaceError)


def _engine(url: URL, busy_timeout_seconds: float) -> Engine:
    milliseconds = round(busy_timeout_seconds * 1000)
    engine = create_engine(
        url,
        connect_args={
            "connect_timeout": CONNECT_SECONDS,
            # The second: who holds the writer lock and says nothing is gone, and loses it.
            "options": f"-c lock_timeout={milliseconds} "
            f"-c idle_in_transaction_session_timeout={milliseconds}",
        },
        pool_pre_ping=True,  # a server that was restarted costs no request
        pool_size=POOLED,
        max_overflow=POOLED_BURST,
        pool_timeout=busy_timeout_seconds,
        hide_parameters=True,  # a job's environment may hold secrets
    )
    # The driver is an extra, and `create_engine` has found it.
    from store.postgres_connection import SLACK_SECONDS, bound  # noqa: PLC0415

    bound(engine, busy_timeout_seconds + SLACK_SECONDS)
    return engine
