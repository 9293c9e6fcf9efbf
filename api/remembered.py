"""Tokens that were read a moment ago, so that who is known costs no thread and no database.

What another process changes is noticed within a second, what this one revokes at once.
"""

from collections.abc import Callable
from typing import Final

from muster.contracts.token import Token
from store.database import Database
from store.tokens import Tokens

FRESH_SECONDS: Final = 1.0


class RememberedTokens(Tokens):
    """All tokens of an installation, and for a second each one that was found."""

    def __init__(self, database: Database, monotonic: Callable[[], float]) -> None:
        super().__init__(database)
        self._monotonic = monotonic
        self._found: dict[str, tuple[Token, float]] = {}
        self._revoked: set[str] = set()
        """Ids are given once, and somebody may just be reading one of these."""

    def at_hand(self, token_id: str) -> Token | None:
        """Return the token if it was read a moment ago; asks nobody."""
        if token_id in self._revoked:
            return None
        token, at = self._found.get(token_id, (None, 0.0))
        return token if self._monotonic() - at < FRESH_SECONDS else None

    def find(self, token_id: str) -> Token | None:
        now = self._monotonic()
        token = super().find(token_id)
        if token is not None:
            self._found[token_id] = (token, now)
        return token

    def revoke(self, name: str) -> Token:
        token = super().revoke(name)
        self._revoked.add(token.token_id)
        return token
