"""Who is asking: the service's own user on this machine, or whoever shows a token.

A token that is shown decides alone: a wrong one is refused, whoever shows it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from http import HTTPStatus
from typing import Final

import structlog
from anyio import CapacityLimiter
from anyio.to_thread import run_sync

from api.problems import Problem, StoreAway
from api.remembered import RememberedTokens
from muster.contracts.environ import TOKEN
from muster.contracts.token import Scope, Token, id_in, matches
from store.errors import StoreUnavailable

LOOKUPS_AT_ONCE: Final = 4
"""Whoever shows one made-up token after another leaves the other threads to those who are known."""

NOTED_EVERY: Final = timedelta(minutes=1)
"""How exactly the last use of a token is known: a transaction per request would cost more."""

_CHALLENGE: Final = {"WWW-Authenticate": "Bearer"}

_LOG: Final = structlog.get_logger("api")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks for something, and what they may ask for."""

    name: str
    """For logs and events: ``uid:1000``, ``token:ci`` or ``MUSTER_TOKEN``."""
    scope: Scope
    is_limited: bool
    """Whether limits on requests hold; the service's own user could end the service as well."""
    token_id: str | None = None
    """Of the token that was shown, if one was made for it."""

    @property
    def principal(self) -> str:
        """Who this is for ever: a token's name may be another token's when it is revoked."""
        return self.name if self.token_id is None else f"token:{self.token_id}"


class Unauthorized(Problem):
    """Nobody we know; the sentence says how to become somebody."""

    def __init__(self, slug: str, detail: str) -> None:
        super().__init__(HTTPStatus.UNAUTHORIZED, slug, detail, headers=_CHALLENGE)


class Identities:
    """Tells callers apart. `token_sha256` is that of MUSTER_TOKEN, if there is one."""

    def __init__(
        self,
        tokens: RememberedTokens,
        clock: Callable[[], datetime],
        *,
        own_uid: int,
        require_token: bool,
        token_sha256: str | None,
    ) -> None:
        self._tokens = tokens
        self._clock = clock
        self._own_uid = own_uid
        self._require_token = require_token
        self._token_sha256 = token_sha256
        self._lookups = CapacityLimiter(LOOKUPS_AT_ONCE)
        self._noted: dict[str, datetime] = {}
        """By the id of a token: when its use was last written down, or was to be."""

    def is_own(self, uid: int | None) -> bool:
        """Whether this is the user that the service runs as, and that alone is enough."""
        return uid is not None and uid == self._own_uid and not self._require_token

    async def identify(self, uid: int | None, authorization: str | None) -> Caller:
        """Return who is asking, from the uid of a neighbour and the Authorization header.

        Raises `Unauthorized`, or `Problem` while the tokens cannot be read.
        """
        if authorization is not None:
            text = _bearer(authorization)
            at_hand = self._at_hand(text)
            if at_hand is not None:
                return at_hand
            return await run_sync(self._shown, text, limiter=self._lookups)
        if self.is_own(uid):
            return Caller(name=f"uid:{uid}", scope=Scope.ADMIN, is_limited=False)
        if uid is not None and uid == self._own_uid:
            # The owner, or a stranger whom a proxy brings. The owner who is told to make one and
            # has none of scope admin would be told the same again.
            raise Unauthorized(
                "token-required",
                "This service needs a token from everybody: send `Authorization: Bearer mst_…`. "
                "Whoever runs it makes one with `muster token create`, and where nobody has one "
                "of scope admin, while it runs with MUSTER_REQUIRE_TOKEN=0.",
            )
        raise Unauthorized(
            "no-token",
            "This service needs a token from you: send `Authorization: Bearer mst_…`. Whoever runs "
            "the service makes one with `muster token create`.",
        )

    def _at_hand(self, text: str) -> Caller | None:
        """Return who shows a token that can be judged, and need not be noted, by itself."""
        token_id = id_in(text)
        if token_id is None:
            return self._by_environment(text)
        token, now = self._tokens.at_hand(token_id), self._clock()
        if token is None or not token.is_valid(now) or not matches(text, token.sha256):
            return None
        return _caller(token) if self._is_noted(token, now) else None

    def _shown(self, text: str) -> Caller:
        token = self._known(text)
        return self._by_environment(text) if token is None else self._opened_by(token)

    def _by_environment(self, text: str) -> Caller:
        if self._token_sha256 is not None and matches(text, self._token_sha256):
            return Caller(name=TOKEN, scope=Scope.ADMIN, is_limited=True)
        raise Unauthorized(
            "unknown-token", "This token is none of this service: was it copied whole?"
        )

    def _known(self, text: str) -> Token | None:
        token_id = id_in(text)
        if token_id is None:
            return None
        try:
            token = self._tokens.find(token_id)
        except StoreUnavailable as error:
            # Whoever made it up is told no more: a database's error says where that is.
            _LOG.warning(
                f"a token cannot be looked up: {error}",
                action="token_not_looked_up",
                reason=str(error),
            )
            raise StoreAway("Your token cannot be looked up now: try again.") from error
        return token if token is not None and matches(text, token.sha256) else None

    def _opened_by(self, token: Token) -> Caller:
        now = self._clock()
        if token.revoked_at is not None:
            raise Unauthorized(
                "revoked-token", f"The token {token.name} was revoked: ask for another."
            )
        if token.is_expired(now):
            raise Unauthorized("expired-token", f"The token {token.name} expired: ask for another.")
        self._note_use(token, now)
        return _caller(token)

    def _is_noted(self, token: Token, now: datetime) -> bool:
        """Whether it is written down already that it was used about now."""
        noted = self._noted.get(token.token_id, token.last_used_at)
        return noted is not None and now - noted < NOTED_EVERY

    def _note_use(self, token: Token, now: datetime) -> None:
        if self._is_noted(token, now):
            return
        # Before the attempt: where the database is held up, one request waits for it and not all.
        self._noted[token.token_id] = now
        try:
            self._tokens.note_use(token.token_id, now)
        except StoreUnavailable as error:
            # Who could be read can come in: when they last did is no reason to turn them away.
            _LOG.warning(
                f"the use of the token {token.name} was not noted: {error}",
                action="token_use_lost",
                token=token.name,
            )


def _bearer(authorization: str) -> str:
    scheme, _, text = authorization.partition(" ")
    text = text.strip()
    if scheme.lower() != "bearer" or not text:
        raise Unauthorized(
            "no-bearer-token", "The Authorization header is not of the form `Bearer mst_…`."
        )
    return text


def _caller(token: Token) -> Caller:
    return Caller(
        name=f"token:{token.name}", scope=token.scope, is_limited=True, token_id=token.token_id
    )
