"""A database with one token, and its authenticator, for tests of authentication."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from types import SimpleNamespace
from typing import Any

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from api.access.auth import Authenticator
from database.errors import DatabaseUnavailable
from muster.contracts.token import Scope, Token, id_in, sha256_of
from tests.support.clocks import ManualClock
from tests.support.database_samples import NOON

TEXT = f"mst_{'a' * 12}_{'b' * 64}"
OWN_UID = 7


def sent_by(uid: int | None, app: ASGIApp) -> ASGIApp:
    """Return an application whose clients all have this user id."""

    async def call(scope: ASGIScope, receive: Receive, send: Send) -> None:
        connection = SimpleNamespace(count_for=lambda _name: None)
        scope.setdefault("state", {}).update(user=uid, connection=connection)
        await app(scope, receive, send)

    return call


def make_token() -> Token:
    return Token(
        token_id=id_in(TEXT) or "",
        name="ci",
        scope=Scope.SUBMIT,
        sha256=sha256_of(TEXT),
        created_at=NOON,
        created_by=None,
        expires_at=None,
    )


@dataclass
class TokenStore:
    """May be unavailable, for readers or for writers only."""

    token: Token = field(default_factory=make_token)
    is_away: bool = False
    is_read_only: bool = False
    is_cached: bool = False
    noted: list[datetime] = field(default_factory=list)

    def find(self, token_id: str) -> Token | None:
        if self.is_away:
            raise DatabaseUnavailable("no route to host")
        return self.token if token_id == self.token.token_id else None

    def find_cached(self, token_id: str) -> Token | None:
        return self.token if self.is_cached and token_id == self.token.token_id else None

    def note_use(self, _token_id: str, now: datetime) -> None:
        self.noted.append(now)
        if self.is_read_only:
            raise DatabaseUnavailable("locked")


def make_authenticator(
    tokens: Any,  # noqa: ANN401  a TokenStore stands for a TokenCache
    clock: Callable[[], datetime] | None = None,
    *,
    require_token: bool = False,
    token: str | None = None,
) -> Authenticator:
    """Return the authenticator of a service; `token` is its MUSTER_TOKEN."""
    return Authenticator(
        tokens=tokens,
        clock=clock or ManualClock(NOON),
        own_uid=OWN_UID,
        require_token=require_token,
        token_sha256=None if token is None else sha256_of(token),
    )
