"""Tokens: made, found by their id, revoked. A row is kept for a while when it opens nothing."""

import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, delete, insert, or_, select, update

from muster.contracts.token import Scope, Token, id_in, new_text, sha256_of
from store.clock import Clock, utc_now
from store.database import Database
from store.errors import TokenExists, TokenMissing
from store.rows import values_of
from store.tables import TOKENS

KEPT: Final = timedelta(days=30)
"""How long it can be seen that a token was revoked or expired, and whose it was."""

_ALL: Final = select(TOKENS).order_by(TOKENS.c.created_at, TOKENS.c.token_id)
_ONE: Final = select(TOKENS).where(TOKENS.c.token_id == bindparam("id"))
_NAMED: Final = select(TOKENS).where(
    TOKENS.c.name == bindparam("called"), TOKENS.c.revoked_at.is_(None)
)
_FORGET: Final = delete(TOKENS).where(
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
        """Return a new token and its text, which nobody can be told again.

        Those that have opened nothing for `KEPT` are forgotten.
        Raises `TokenExists` for a name whose token was not revoked.
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
            connection.execute(_FORGET, {"until": now - KEPT})
            if _named(connection, name) is not None:
                raise TokenExists(name)
            connection.execute(insert(TOKENS), values_of(token))
        return token, text

    def all(self) -> list[Token]:
        """Return every token that is not forgotten, the oldest first."""
        with self._database.reading() as connection:
            return [_token(row) for row in connection.execute(_ALL)]

    def find(self, token_id: str) -> Token | None:
        with self._database.reading() as connection:
            row = connection.execute(_ONE, {"id": token_id}).one_or_none()
        return None if row is None else _token(row)

    def is_any_valid(self, scope: Scope = Scope.READ) -> bool:
        """Whether there is a token that opens now what needs this scope."""
        now = self._clock()
        return any(token.is_valid(now) and token.scope.covers(scope) for token in self.all())

    def revoke(self, name: str) -> Token:
        """Take a token back for good, and return it; raises `TokenMissing`."""
        with self._database.writing() as connection:
            token = _named(connection, name)
            if token is None:
                raise TokenMissing(name)
            _set(connection, token.token_id, {"revoked_at": self._clock()})
            row = connection.execute(_ONE, {"id": token.token_id}).one()
        return _token(row)

    def note_use(self, token_id: str, now: datetime) -> None:
        """Keep when a token was last used."""
        with self._database.writing() as connection:
            _set(connection, token_id, {"last_used_at": now})


def _named(connection: Connection, name: str) -> Token | None:
    row = connection.execute(_NAMED, {"called": name}).one_or_none()
    return None if row is None else _token(row)


def _set(connection: Connection, token_id: str, values: dict[str, Any]) -> None:
    connection.execute(update(TOKENS).where(TOKENS.c.token_id == token_id).values(values))


def _token(row: Row[Any]) -> Token:
    return Token(**row._asdict())
