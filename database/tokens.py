"""API tokens: created, found by id, revoked. Expired and revoked ones stay listed for a while."""

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, delete, insert, or_, select, update

from database.engine import Database, existing
from database.errors import DatabaseError, TokenExists, TokenMissing
from database.records import Clock, utc_now, values_of
from database.tables import TOKENS
from muster.contracts.token import Scope, Token, id_in, new_text, sha256_of

RETENTION: Final = timedelta(days=30)  # how long revoked and expired tokens stay listed

_ALL: Final = select(TOKENS).order_by(TOKENS.c.created_at, TOKENS.c.token_id)
_ONE: Final = select(TOKENS).where(TOKENS.c.token_id == bindparam("id"))
_NAMED: Final = select(TOKENS).where(
    TOKENS.c.name == bindparam("called"), TOKENS.c.revoked_at.is_(None)
)
_PRUNE: Final = delete(TOKENS).where(
    or_(TOKENS.c.revoked_at <= bindparam("until"), TOKENS.c.expires_at <= bindparam("until"))
)


class Tokens:
    """All tokens of an installation."""

    def __init__(
        self,
        database: Database,
        clock: Clock = utc_now,
        random_bytes: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._database = database
        self._clock = clock
        self._random_bytes = random_bytes

    def create(
        self, name: str, scope: Scope, *, lifetime: timedelta | None, created_by: str | None
    ) -> tuple[Token, str]:
        """Return a new token and its text, which is not stored; prune old tokens.

        Raises `TokenExists` if a token of this name was not revoked.
        """
        text, now = new_text(self._random_bytes), self._clock()
        token = Token(
            token_id=id_in(text) or "",
            name=name,
            scope=scope,
            sha256=sha256_of(text),
            created_at=now,
            created_by=created_by,
            expires_at=None if lifetime is None else now + lifetime,
        )
        with self._database.writing() as connection:
            connection.execute(_PRUNE, {"until": now - RETENTION})
            if _named(connection, name) is not None:
                raise TokenExists(name)
            connection.execute(insert(TOKENS), values_of(token))
        return token, text

    def all(self) -> list[Token]:
        """Return every token on record, oldest first."""
        with self._database.reading() as connection:
            return [_token(row) for row in connection.execute(_ALL)]

    def find(self, token_id: str) -> Token | None:
        with self._database.reading() as connection:
            row = connection.execute(_ONE, {"id": token_id}).one_or_none()
        return None if row is None else _token(row)

    def is_any_valid(self, scope: Scope = Scope.READ) -> bool:
        """Return whether a valid token covers this scope."""
        now = self._clock()
        return any(token.is_valid(now) and token.scope.covers(scope) for token in self.all())

    def revoke(self, name: str) -> Token:
        """Revoke a token and return it; raises `TokenMissing`."""
        with self._database.writing() as connection:
            token = _named(connection, name)
            if token is None:
                raise TokenMissing(name)
            _update(connection, token.token_id, {"revoked_at": self._clock()})
            row = connection.execute(_ONE, {"id": token.token_id}).one()
        return _token(row)

    def note_use(self, token_id: str, now: datetime) -> None:
        """Record when a token was last used."""
        with self._database.writing() as connection:
            _update(connection, token_id, {"last_used_at": now})


def is_any_token(url: str | Path, scope: Scope = Scope.READ) -> bool:
    """Return whether the database at `url` has a valid token for this scope.

    False if it cannot be read. A missing database is not created.
    """
    try:
        with existing(url) as database:
            return database is not None and Tokens(database).is_any_valid(scope)
    except DatabaseError:
        return False


def _named(connection: Connection, name: str) -> Token | None:
    row = connection.execute(_NAMED, {"called": name}).one_or_none()
    return None if row is None else _token(row)


def _update(connection: Connection, token_id: str, values: dict[str, Any]) -> None:
    connection.execute(update(TOKENS).where(TOKENS.c.token_id == token_id).values(values))


def _token(row: Row[Any]) -> Token:
    return Token(**row._asdict())
