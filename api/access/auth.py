"""Who sends a request: the service's own user on this machine, or the owner of a token.

A request with a token is judged by the token alone, also if it comes from the service's own user.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from http import HTTPStatus
from ipaddress import IPv6Address, IPv6Network
from typing import Final, TypeAlias

import structlog
from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from starlette.types import Scope as ASGIScope

from api.errors import Problem, ServiceUnavailable
from database.engine import Database
from database.errors import DatabaseUnavailable
from database.tokens import Tokens
from muster.contracts.relay import RelayedClient
from muster.contracts.settings.services import TOKEN
from muster.contracts.token import Scope, Token, id_in, masked, matches
from muster.host.peers import normalize_address

SESSION_COOKIE: Final = "muster_token"
"""The token of a browser; `api.page` sets it."""

CHANGING_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})

CACHED_SECONDS: Final = 1.0
"""Within this time a token that another process revoked is refused."""

LOOKUPS_AT_ONCE: Final = 4
"""Clients that try one invalid token after another must not take all threads."""

USE_NOTED_EVERY: Final = timedelta(minutes=1)
"""Precision of a token's last use: a transaction per request would cost more."""

_IPV6_NETWORK_BITS: Final = 64
"""One IPv6 client usually has a network of 2**64 addresses."""

_PATH_LIMIT: Final = 200
"""The longest valid path, with a job id of 64 letters, is half as long."""

User: TypeAlias = int | RelayedClient | None
"""Whose connection it is: a user of this machine, a client at the relay of a node, or unknown."""

_LOG: Final = structlog.get_logger("api")


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The authenticated sender of a request."""

    name: str
    """For logs and events: ``uid:1000``, ``uid:1000@desk``, ``token:ci`` or ``MUSTER_TOKEN``."""
    scope: Scope
    is_limited: bool
    """False for the service's own user, who could stop the service as well."""
    token_id: str | None = None
    node_user: str | None = None
    """Of a user at another node: with its id, as a machine may get another name."""

    @property
    def principal(self) -> str:
        """A permanent identity; the name of a revoked token may be given to another token."""
        if self.token_id is not None:
            return f"token:{self.token_id}"
        return self.node_user or self.name


class Unauthorized(Problem):
    def __init__(self, slug: str, detail: str) -> None:
        headers = {"WWW-Authenticate": "Bearer"}
        super().__init__(HTTPStatus.UNAUTHORIZED, slug, detail, headers=headers)


def require_scope(caller: Caller, needed: Scope) -> None:
    """Raise `Problem` unless the caller has this scope."""
    if not caller.scope.covers(needed):
        raise Problem(
            HTTPStatus.FORBIDDEN,
            "scope-too-small",
            f"This request needs a token of scope {needed}, and {caller.name} has {caller.scope}. "
            "Ask the operator of the service for another token.",
            headers={"WWW-Authenticate": f'Bearer error="insufficient_scope", scope="{needed}"'},
        )


class TokenCache(Tokens):
    """All tokens of the database, and for a second each one that was read."""

    def __init__(self, database: Database, monotonic: Callable[[], float]) -> None:
        super().__init__(database)
        self._monotonic = monotonic
        self._read: dict[str, tuple[Token, float]] = {}
        self._revoked: set[str] = set()
        """Another thread may be reading one of these tokens right now."""

    def find_cached(self, token_id: str) -> Token | None:
        """Return the token if it was read within the last second, without a query."""
        if token_id in self._revoked:
            return None
        token, read_at = self._read.get(token_id, (None, 0.0))
        return token if self._monotonic() - read_at < CACHED_SECONDS else None

    def find(self, token_id: str) -> Token | None:
        now = self._monotonic()
        token = super().find(token_id)
        if token is not None:
            self._read[token_id] = (token, now)
        return token

    def revoke(self, name: str) -> Token:
        token = super().revoke(name)
        self._revoked.add(token.token_id)
        return token


@dataclass(slots=True, kw_only=True)
class Authenticator:
    """Identifies callers. `token_sha256` is the digest of MUSTER_TOKEN, if that is set."""

    tokens: TokenCache
    clock: Callable[[], datetime]
    own_uid: int
    require_token: bool
    token_sha256: str | None
    _lookups: CapacityLimiter = field(
        init=False, default_factory=partial(CapacityLimiter, LOOKUPS_AT_ONCE)
    )
    _noted: dict[str, datetime] = field(init=False, default_factory=dict)
    """By token id: when its use was last written, or was tried to be."""

    def is_own_user(self, user: User) -> bool:
        """True if this is the service's user, and no token is required of that user."""
        return self._is_owner(user) and not self.require_token

    def _is_owner(self, user: User) -> bool:
        """True for the service's user on this machine, or that of another node at its relay."""
        if isinstance(user, RelayedClient):
            return user.user is not None
        return user is not None and user == self.own_uid

    async def authenticate(self, user: User, authorization: str | None) -> Caller:
        """Return the caller, from the user of a local client and the Authorization header.

        Raises `Unauthorized`, or `ServiceUnavailable` while the tokens cannot be read.
        """
        if authorization is not None:
            text = _bearer_token(authorization)
            cached = self._from_cache(text)
            if cached is not None:
                return cached
            return await run_sync(self._from_database, text, limiter=self._lookups)
        if self.is_own_user(user):
            return _owner(user)
        if self._is_owner(user):
            # The owner, or a stranger behind a proxy of the owner's.
            raise Unauthorized(
                "token-required",
                "This service requires a token. Send `Authorization: Bearer mst_…`. The operator "
                "creates one with `muster token create`; without any token of scope admin, while "
                "the service runs with MUSTER_REQUIRE_TOKEN=0.",
            )
        raise Unauthorized(
            "no-token",
            "This request has no token. Send `Authorization: Bearer mst_…`. The operator of the "
            "service creates one with `muster token create`.",
        )

    def _from_cache(self, text: str) -> Caller | None:
        """Return the caller if that needs no query; raises `Unauthorized`."""
        token_id = id_in(text)
        if token_id is None:
            return self._from_environment(text)
        token, now = self.tokens.find_cached(token_id), self.clock()
        if token is None or not token.is_valid(now) or not matches(text, token.sha256):
            return None
        return _caller(token) if self._is_use_noted(token, now) else None

    def _from_environment(self, text: str) -> Caller:
        if self.token_sha256 is not None and matches(text, self.token_sha256):
            return Caller(name=TOKEN, scope=Scope.ADMIN, is_limited=True)
        detail = "This service does not know this token. Check that it was copied completely."
        raise Unauthorized("unknown-token", detail)

    def _from_database(self, text: str) -> Caller:
        try:
            token = self.tokens.find(id_in(text) or "")
        except DatabaseUnavailable as error:
            # The client may be a stranger, and the error says where the database is.
            _LOG.warning(
                f"cannot look up a token: {error}", action="token_not_looked_up", reason=str(error)
            )
            detail = "The token cannot be checked because the database is unavailable. Try again."
            raise ServiceUnavailable(detail) from error
        if token is None or not matches(text, token.sha256):
            return self._from_environment(text)
        now = self.clock()
        if token.revoked_at is not None:
            detail = f"The token {token.name} was revoked. Ask for another one."
            raise Unauthorized("revoked-token", detail)
        if token.is_expired(now):
            detail = f"The token {token.name} has expired. Ask for another one."
            raise Unauthorized("expired-token", detail)
        self._note_use(token, now)
        return _caller(token)

    def _is_use_noted(self, token: Token, now: datetime) -> bool:
        noted = self._noted.get(token.token_id, token.last_used_at)
        return noted is not None and now - noted < USE_NOTED_EVERY

    def _note_use(self, token: Token, now: datetime) -> None:
        if self._is_use_noted(token, now):
            return
        # Set before the write: if the database is slow, only one request waits for it.
        self._noted[token.token_id] = now
        try:
            self.tokens.note_use(token.token_id, now)
        except DatabaseUnavailable as error:
            _LOG.warning(
                f"cannot record the use of token {token.name}: {error}",
                action="token_use_lost",
                token=token.name,
            )


def _bearer_token(authorization: str) -> str:
    scheme, _, text = authorization.partition(" ")
    text = text.strip()
    if scheme.lower() != "bearer" or not text:
        detail = "The Authorization header does not have the form `Bearer mst_…`."
        raise Unauthorized("no-bearer-token", detail)
    return text


def _owner(user: User) -> Caller:
    node_user = f"{user.user}@{user.node_id}" if isinstance(user, RelayedClient) else None
    return Caller(name=_name(user), scope=Scope.ADMIN, is_limited=False, node_user=node_user)


def _name(user: User) -> str:
    return user.name if isinstance(user, RelayedClient) else f"uid:{user}"


def _caller(token: Token) -> Caller:
    return Caller(
        name=f"token:{token.name}", scope=token.scope, is_limited=True, token_id=token.token_id
    )


def client_name(scope: ASGIScope) -> str:
    """Return how logs and limits name a client without a token: by user or by network."""
    if (user := scope["state"].get("user")) is not None:
        return _name(user)
    client = scope.get("client")
    return f"address:{client_network(client[0])}" if client else "address:unknown"


def client_network(address: str) -> str:
    """Return the address, or the /64 network of an IPv6 address."""
    found = normalize_address(address)
    if not isinstance(found, IPv6Address) or found.is_loopback:
        return str(found)
    return str(IPv6Network((int(found), _IPV6_NETWORK_BITS), strict=False))


@contextmanager
def logged_refusal(scope: ASGIScope) -> Iterator[None]:
    """Log a `Problem` that leaves the block as the refusal of the request of `scope`."""
    try:
        yield
    except Problem as problem:
        log_refusal(problem, scope)
        raise


def log_refusal(problem: Problem, scope: ASGIScope) -> None:
    """Log that the request of `scope` was refused, with the caller and the reason."""
    caller: Caller | None = scope["state"].get("caller")
    name = caller.name if caller else client_name(scope)
    _LOG.warning(
        f"refused a request of {name}: {problem.slug}",
        action="request_refused",
        caller=name,
        method=scope["method"],
        path=shorten_path(scope["path"]),
        reason=problem.slug,
    )


def log_change(status: int, scope: ASGIScope) -> None:
    """Log the answer to a request of an authenticated caller that changes something."""
    caller: Caller | None = scope["state"].get("caller")
    if caller is None or scope["method"] not in CHANGING_METHODS:
        return
    _LOG.info(
        f"answered {scope['method']} of {caller.name} with {status}",
        action="request_answered",
        caller=caller.name,
        method=scope["method"],
        path=shorten_path(scope["path"]),
        status=status,
    )


def shorten_path(text: str) -> str:
    """Return text from a client shortened, without control characters and tokens."""
    text = masked(text)
    shown = repr(text[:_PATH_LIMIT])[1:-1]
    return shown if len(text) <= _PATH_LIMIT else f"{shown}…"
