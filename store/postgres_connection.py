"""A connection to PostgreSQL that does not wait for ever.

A server that was stopped, or whose machine lost its power, closes nothing: it only says nothing
any more. No setting of its own ends that, so the client keeps the time. What became of a
transaction that was about to be committed then is not known: see `store.tenure`.
"""

import time
from typing import Any, Final, TypeVar, cast

import sqlalchemy
from psycopg import Connection, OperationalError
from psycopg.abc import PQGen
from sqlalchemy import Engine, event

SLACK_SECONDS: Final = 1.0
"""By so much the server's own timeouts come first: their errors say more."""

Value = TypeVar("Value")


class BoundedConnection(Connection[Any]):
    """Raises `OperationalError`, and is closed, if an answer takes longer than this."""

    answer_seconds = 10.0

    def wait(self, gen: PQGen[Value], *args: Any, **named: Any) -> Value:  # noqa: ANN401  psycopg's own
        try:
            return super().wait(_until(gen, time.monotonic() + self.answer_seconds), *args, **named)
        except TimeoutError:
            # Whoever has it now would read the answer to an older question.
            self.close()
            raise OperationalError(
                f"the server has not answered for {self.answer_seconds:g} s"
            ) from None


def bound(engine: Engine, answer_seconds: float) -> None:
    """Let every connection of `engine` wait for so long, and no longer."""

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, args: Any, named: Any) -> BoundedConnection:  # noqa: ANN401  SQLAlchemy's own
        connection = BoundedConnection.connect(*args, **named)
        connection.answer_seconds = answer_seconds
        return connection


def be_patient(connection: sqlalchemy.Connection, answer_seconds: float) -> None:
    """Let this one connection wait for longer."""
    # By this name also one that is detached has it.
    bounded = cast("BoundedConnection", connection.connection.dbapi_connection)
    bounded.answer_seconds = answer_seconds


def _until(answer: PQGen[Value], deadline: float) -> PQGen[Value]:
    """Pass on what `answer` waits for; raise `TimeoutError` when nothing came by the deadline."""
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
