"""PostgreSQL: the database of several machines.

An advisory lock, held to the end of the transaction, gives every write transaction what BEGIN
IMMEDIATE gives on SQLite, so that callers need to be correct for one kind of database only.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)

from database.errors import DatabaseError, DatabaseUnavailable
from muster.host.extras import install_command

if TYPE_CHECKING:
    from psycopg.abc import PQGen

WRITER_LOCK: Final = 0x4D555354  # key of the advisory lock: "MUST" in ASCII

CONNECT_TIMEOUT_SECONDS: Final = 3  # a running server accepts within milliseconds

MIGRATION_TIMEOUT_SECONDS: Final = 600.0
"""For one statement, which may rewrite a large table. No other transaction writes meanwhile."""

SLACK_SECONDS: Final = 1.0
"""The client waits this much longer than the server's own timeouts, whose errors say more."""

Value = TypeVar("Value")


class PostgresBackend:
    """A database on a server."""

    def __init__(self, url: sa.URL, busy_timeout_seconds: float, **options: Any) -> None:  # noqa: ANN401
        """Connect to nothing yet. `options` are for SQLAlchemy's `create_engine`.

        Raises `DatabaseUnavailable` if the driver is not installed.
        """
        self._place = url.render_as_string(hide_password=True)
        milliseconds = round(busy_timeout_seconds * 1000)
        try:
            self.engine = sa.create_engine(
                url,
                connect_args={
                    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
                    # The second one: a client that holds the writer lock and stands still is cut.
                    "options": f"-c lock_timeout={milliseconds} "
                    f"-c idle_in_transaction_session_timeout={milliseconds}",
                },
                pool_pre_ping=True,  # requests survive a restart of the server
                **options,
            )
        except ModuleNotFoundError as error:
            raise DatabaseUnavailable(
                f"the database {self._place} needs {error.name}: {install_command('postgres')}"
            ) from error
        _limit_answers(self.engine, busy_timeout_seconds + SLACK_SECONDS)

    def begin_reading(self, connection: sa.Connection) -> None:
        # In READ COMMITTED each statement would see a snapshot of its own.
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    def begin_writing(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({WRITER_LOCK})")

    def is_prepared(self, connection: sa.Connection) -> bool:
        del connection
        return True

    @contextmanager
    def migrating(self) -> Iterator[sa.Connection]:
        with self.engine.connect() as connection:
            connection.detach()  # its long timeout must not return to the pool
            with connection.begin():
                self.begin_writing(connection)
                driver: Any = connection.connection.dbapi_connection
                driver.answer_seconds = MIGRATION_TIMEOUT_SECONDS
                yield connection

    def insert(self, table: sa.Table) -> postgresql.Insert:
        return postgresql.insert(table)

    def json(self, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
        return sa.cast(column, sa.JSON)

    def changes(self) -> int | None:
        return None

    def back_up(self, path: Path) -> None:
        raise DatabaseError(f"the database {self._place} is no file: use pg_dump instead of {path}")

    def explain(self, error: SQLAlchemyError) -> DatabaseError:
        cause = error.orig if isinstance(error, StatementError) else error
        is_disconnected = isinstance(error, DBAPIError) and error.connection_invalidated
        if is_disconnected or isinstance(error, OperationalError | InterfaceError):
            return DatabaseUnavailable(
                f"the database {self._place} cannot be used now: check the server and try again "
                f"({str(cause).strip()})"
            )
        return DatabaseError(
            f"the database {self._place} refused a statement, nothing is written: {cause}"
        )

    def close(self) -> None:
        self.engine.dispose()


def _limit_answers(engine: sa.Engine, answer_seconds: float) -> None:
    """Make connections of `engine` raise `OperationalError` if an answer takes longer.

    A server that was frozen, or whose machine lost power, closes no connection, and no timeout of
    its own ends the wait. After a lost commit the outcome is unknown: see `CommitInDoubt`.
    """
    import psycopg  # noqa: PLC0415  an optional dependency, found by `create_engine`

    class BoundedConnection(psycopg.Connection[Any]):
        answer_seconds = 10.0

        def wait(self, gen: "PQGen[Value]", *args: Any, **named: Any) -> Value:  # noqa: ANN401
            deadline = time.monotonic() + self.answer_seconds
            try:
                return super().wait(_until(gen, deadline), *args, **named)
            except TimeoutError:
                # The late answer must not be taken for the answer to the next question.
                self.close()
                raise psycopg.OperationalError(
                    f"the server has not answered for {self.answer_seconds:g} s"
                ) from None

    @sa.event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, args: Any, named: Any) -> BoundedConnection:  # noqa: ANN401
        connection = BoundedConnection.connect(*args, **named)
        connection.answer_seconds = answer_seconds
        return connection


def _until(answer: "PQGen[Value]", deadline: float) -> "PQGen[Value]":
    """Delegate to `answer`; raise `TimeoutError` if the socket is not ready by the deadline."""
    try:
        wanted = next(answer)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() > deadline:
                raise TimeoutError
            wanted = answer.send(ready)
    except StopIteration as end:
        result: Value = end.value
        return result
