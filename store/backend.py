"""What `Database` needs of a kind of database. Two implementations: `sqlite` and `postgres`."""

from contextlib import AbstractContextManager
from typing import Any, Final, Protocol, TypeAlias

from sqlalchemy import Column, ColumnElement, Connection, Engine, Table
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from store.errors import StoreError

Insert: TypeAlias = sqlite.Insert | postgresql.Insert

POOLED: Final = 5
"""Connections kept open."""

POOLED_BURST: Final = 35
"""More for a moment: with `POOLED` one for each thread of a web server's pool of 40."""


class Backend(Protocol):
    """One kind of database. It raises SQLAlchemy's errors; `explain` makes ours of them."""

    engine: Engine

    def begin_reading(self, connection: Connection) -> None:
        """Begin a transaction that only reads: whatever it reads is of one moment."""

    def begin_writing(self, connection: Connection) -> None:
        """Begin a transaction that writes: from now on no other one does, in any process.

        Everything that earlier ones have committed is seen: a read-then-write loses nothing.
        Nobody who waits is starved by one who writes again and again, as long as writers begin
        within milliseconds of their turn.
        """

    def is_prepared(self, connection: Connection) -> bool:
        """Return whether the settings that live in the database itself are as we need them."""

    def migrating(self) -> AbstractContextManager[Connection]:
        """Open a transaction for a change of schema, alone among all processes."""

    def insert(self, table: Table) -> Insert:
        """Return an INSERT that can say ON CONFLICT."""

    def json(self, column: Column[Any]) -> ColumnElement[Any]:
        """Return a column of JSON text as something one can look into."""

    def changes(self) -> int | None:
        """Return a number that differs after any other commit; None if there is none."""

    def explain(self, error: SQLAlchemyError) -> StoreError:
        """Return the sentence for an error of the driver or the pool."""

    def close(self) -> None:
        """Close every connection."""
