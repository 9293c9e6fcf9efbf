"""PostgreSQL: the database of several machines.

An advisory lock, held to the end of the transaction, gives every write transaction what BEGIN
IMMEDIATE gives on SQLite, so that callers need to be correct for one kind of database only. Its
commit notifies every process that listens, on any host.
"""

import os
import select
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

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

MINIMUM_VERSION: Final = 15

WRITER_LOCK: Final = 0x4D555354  # key of the advisory lock: "MUST" in ASCII
CHANNEL: Final = "muster"

SILENCE_SECONDS: Final = 5.0
"""After this long without a notification the connection is tested, and the rows count as changed,
because a pooler may lose notifications."""

RECONNECT_SECONDS: Final = (0.5, 8.0)
"""Pause before a lost connection for notifications is opened again; it doubles up to the second."""

CONNECT_TIMEOUT_SECONDS: Final = 3  # a running server accepts within milliseconds

LOST_HOST: Final = {
    "tcp_user_timeout": 10_000,  # milliseconds, for what was sent
    "keepalives_idle": 4,  # seconds, while an answer is awaited
    "keepalives_interval": 2,
    "keepalives_count": 3,
}
"""A host that lost its power or network closes no connection: TCP notices it within 10 s."""

CLOSE_SECONDS: Final = 1.0

_FACTS: Final = """
SELECT current_setting('server_version') AS version,
  current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
    AS max_connections,
  current_setting('server_encoding') AS encoding,
  pg_is_in_recovery() OR current_setting('default_transaction_read_only')::bool AS is_read_only
"""

READ_ONLY: Final = "25006"
"""SQLSTATE of a server that takes no writes: a standby, or one whose disk is full."""

_HINTS: Final = {
    "password": "correct the user or the password in MUSTER_DATABASE_URL",
    "does not exist": "create it, or correct its name in MUSTER_DATABASE_URL",
    "too many clients": "the server has no connection left: raise its max_connections",
    "remaining connection slots": "the server has no connection left: raise its max_connections",
    "cannot execute": "the server takes no writes: wait, or set MUSTER_DATABASE_URL to its primary",
}
"""By what the driver's message contains; errors before a login have no code."""


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
                    **LOST_HOST,
                    "client_encoding": "utf8",  # also of a database made as SQL_ASCII
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
        sa.event.listen(self.engine, "connect", self._refuse_old)
        sa.event.listen(self.engine, "handle_error", _leave_read_only)
        self._notifications: Notifications | None = None

    def _refuse_old(self, connection: Any, _: object) -> None:  # noqa: ANN401
        if (found := connection.info.server_version // 10_000) < MINIMUM_VERSION:
            raise DatabaseUnavailable(
                f"the database {self._place} is on PostgreSQL {found}, and Muster needs "
                f"{MINIMUM_VERSION} or newer: upgrade the server"
            )

    def begin_reading(self, connection: sa.Connection) -> None:
        # In READ COMMITTED each statement would see a snapshot of its own.
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")

    def begin_writing(self, connection: sa.Connection) -> None:
        connection.exec_driver_sql(
            f"SELECT pg_advisory_xact_lock({WRITER_LOCK}), pg_notify('{CHANNEL}', '')"
        )

    def is_prepared(self, connection: sa.Connection) -> bool:
        del connection
        return True

    @contextmanager
    def migrating(self) -> Iterator[sa.Connection]:
        with self.engine.begin() as connection:
            self.begin_writing(connection)
            yield connection

    def insert(self, table: sa.Table) -> postgresql.Insert:
        return postgresql.insert(table)

    def json(self, column: sa.Column[Any]) -> sa.ColumnElement[Any]:
        return sa.cast(column, sa.JSON)

    def listen(self, on_commit: Callable[[], None]) -> bool:
        self._notifications = Notifications(self.engine, on_commit)
        return True

    def changes(self) -> int | None:
        known = self._notifications
        return known.count if known is not None and known.is_listening else None

    def facts(self, connection: sa.Connection) -> Mapping[str, Any]:
        return connection.exec_driver_sql(_FACTS).one()._asdict()

    def back_up(self, path: Path) -> None:
        raise DatabaseError(f"the database {self._place} is no file: use pg_dump instead of {path}")

    def explain(self, error: SQLAlchemyError) -> DatabaseError:
        cause = " ".join(str(error.orig if isinstance(error, StatementError) else error).split())
        is_disconnected = isinstance(error, DBAPIError) and error.connection_invalidated
        if is_disconnected or isinstance(error, OperationalError | InterfaceError):
            hints = [hint for text, hint in _HINTS.items() if text in cause]
            hint = next(iter(hints), "check the server and try again")
            return DatabaseUnavailable(
                f"the database {self._place} cannot be used now: {hint} ({cause})"
            )
        return DatabaseError(
            f"the database {self._place} refused a statement, nothing is written: {cause}"
        )

    def close(self) -> None:
        if self._notifications is not None:
            self._notifications.close()
            self._notifications = None
        self.engine.dispose()


def _leave_read_only(context: sa.engine.ExceptionContext) -> None:
    """Count a server that takes no writes as lost: the next connection may find its successor."""
    if getattr(context.original_exception, "sqlstate", None) == READ_ONLY:
        context.is_disconnect = True


class Notifications:
    """Is notified of every commit, with a thread and a connection of its own."""

    def __init__(self, engine: sa.Engine, on_commit: Callable[[], None]) -> None:
        self.count = 0
        self.is_listening = False
        """False while notifications may be lost."""
        self._engine = engine
        self._on_commit = on_commit
        self._ending, self._end = os.pipe()
        self._thread = threading.Thread(target=self._run, name="notifications", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; it may outlive this call while the server does not answer."""
        os.close(self._end)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        import psycopg  # noqa: PLC0415  an optional dependency, found by `create_engine`

        pause_seconds, longest_seconds = RECONNECT_SECONDS
        ended = select.poll()
        ended.register(self._ending, select.POLLHUP)
        while True:
            with suppress(SQLAlchemyError, psycopg.Error), self._engine.connect() as connection:
                connection.execution_options(isolation_level="AUTOCOMMIT").detach()
                connection.exec_driver_sql(f"LISTEN {CHANNEL}")
                self.is_listening = True
                pause_seconds = RECONNECT_SECONDS[0]
                self._receive(connection.connection.dbapi_connection)
            self.is_listening = False
            if ended.poll(1000 * pause_seconds):
                os.close(self._ending)
                return
            pause_seconds = min(2 * pause_seconds, longest_seconds)

    def _receive(self, connection: Any) -> None:  # noqa: ANN401  the driver's
        """Count notifications until the connection is lost or `close` is called."""
        readable = select.poll()
        readable.register(connection, select.POLLIN)
        readable.register(self._ending, select.POLLHUP)
        while True:
            self.count += 1  # also at first, as there were commits before, and after silence
            self._on_commit()
            ready = dict(readable.poll(1000 * SILENCE_SECONDS))
            if self._ending in ready:
                return
            if not ready:
                connection.execute("SELECT 1")
            for _ in connection.notifies(timeout=0):
                pass
