"""ASGI middleware: admits or refuses each request before any route sees it.

A web page in the user's browser can reach a loopback port. The list of host names stops DNS
rebinding; the origin check and the JSON content type stop forged requests (CSRF).
"""

import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from api.access.auth import (
    CHANGING_METHODS,
    SESSION_COOKIE,
    Authenticator,
    Caller,
    Unauthorized,
    client_name,
    log_change,
    log_refusal,
    require_scope,
    shorten_path,
)
from api.access.rate_limits import RateLimiter
from api.dependencies import PREFIX
from api.errors import Problem, problem_response
from muster.contracts import token
from muster.contracts.settings.services import LOOPBACK_NAMES

BODY_LIMIT_BYTES: Final = 1 << 20
"""A job with 256 variables and 1024 words is far below."""

UNREAD_BODY_LIMIT_BYTES: Final = 1 << 17
"""After a request with a longer body, or one of unknown length, the connection is closed: the HTTP
parser would read what is left of a refused body to its end."""

QUERY_NAMES_LIMIT: Final = 100

BARE_PROBES: Final = frozenset({"/healthz", "/livez", "/readyz"})
"""These answer yes or no only, under any host name: a container's monitor knows just an address."""

PROBES: Final = BARE_PROBES | {"/health"}
"""Open without a token; they tell nothing about any job."""

OPEN_PAGES: Final = ("/ui/login", "/ui/static/")
"""A browser needs them before it has a token."""

PAGE_HEADER: Final = "x-muster-page"
"""Sent by our scripts with each change. Another site cannot send it: that needs a preflight."""

ONE_COPY: Final = (
    b"warning",
    b'199 muster "no other machine has this change yet: it is lost if this disk is"',
)
"""Of a change that followers have not acknowledged (RFC 7234, 5.5)."""

_REQUEST_ID_LIMIT: Final = 128

_HOST: Final = re.compile(r"(?:\[([0-9a-f:]+)\]|([^:/@\s]+))(?::\d{1,5})?")

_LOG: Final = structlog.get_logger("api")


class AccessMiddleware:
    """Names, checks, authenticates and limits each request.

    It sets `request_id` and, where known, `caller` and `authenticate` in the request's state.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        authenticator: Authenticator,
        limiter: RateLimiter,
        hosts: Collection[str],
        requests: Counter[tuple[str, int]],
        acknowledge: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """`acknowledge` returns whether a copy has what was written; None without copies."""
        self._app = app
        self._acknowledge = acknowledge
        self._authenticator = authenticator
        self._limiter = limiter
        self._hosts = {*LOOPBACK_NAMES, *map(str.lower, hosts)}
        self._requests = requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}  # uvicorn sends no body
            headers = Headers(scope=scope)
            request_id = _request_id(headers)
            scope.setdefault("state", {})["request_id"] = request_id
            added = [
                (b"x-request-id", request_id.encode()),
                (b"x-content-type-options", b"nosniff"),
            ]
            length_bytes = int(headers.get("content-length", "0"))  # h11 admits digits only
            if length_bytes > UNREAD_BODY_LIMIT_BYTES or "transfer-encoding" in headers:
                added.append((b"connection", b"close"))

            async def send_named(message: Message) -> None:
                if message["type"] == "http.response.start":
                    log_change(message["status"], scope)
                    self._requests[_template(scope), message["status"]] += 1
                    fields = [*message.get("headers", ()), *added]
                    if b"cache-control" not in dict(fields):  # a browser would keep it on its disk
                        fields.append((b"cache-control", b"no-store"))
                    if self._acknowledge and scope["method"] in CHANGING_METHODS:
                        is_refused = message["status"] >= HTTPStatus.BAD_REQUEST
                        if not (is_refused or await self._acknowledge()):
                            fields.append(ONE_COPY)
                    message["headers"] = fields
                await send(message)

            with bound_contextvars(request_id=request_id):
                await self._handle(scope, headers, receive, send_named)

    async def _handle(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            client = await self._admit(scope, headers)
            with nullcontext() if client is None else self._limiter.admit(client):
                _refuse_early(scope)
                await self._app(scope, receive, send)
        except Problem as problem:
            log_refusal(problem, scope)
            is_page = scope["path"].startswith("/ui") and "text/html" in headers.get("accept", "")
            if isinstance(problem, Unauthorized) and is_page:
                await RedirectResponse("/ui/login", HTTPStatus.SEE_OTHER)(scope, receive, send)
                return
            await problem_response(problem, scope)(scope, receive, send)
        except Exception:  # noqa: BLE001  the client was answered by `api.errors`
            _LOG.exception(
                "a request failed unexpectedly",
                action="request_failed",
                path=shorten_path(scope["path"]),
            )
        finally:
            if "caller" in scope["state"]:
                scope["state"]["connection"].count_for(scope["state"]["caller"].name)

    async def _admit(self, scope: Scope, headers: Headers) -> str | None:
        """Return the client whose limits apply, None for no limits; raise `Problem`.

        A refused request counts against the client's limits as well.
        """
        is_own_user = self._authenticator.is_own_user(scope["state"]["user"])
        try:
            self._check_headers(scope, headers)
            caller = await self._authenticate(scope, headers)
        except Problem:
            scope["state"]["connection"].count_for(client_name(scope))
            if not is_own_user:
                self._limiter.charge(client_name(scope))
            raise
        if caller is None:
            scope["state"]["connection"].count_for(client_name(scope))
            return None if is_own_user else client_name(scope)
        scope["state"]["caller"] = caller
        scope["state"]["connection"].count_for(None)  # open requests have a limit of their own
        return caller.name if caller.is_limited else None

    async def _authenticate(self, scope: Scope, headers: Mapping[str, str]) -> Caller | None:
        """Return the caller; None for an anonymous request to a probe."""
        if _is_in(BARE_PROBES, scope):
            return None
        user, authorization = scope["state"]["user"], headers.get("authorization")
        if authorization is None and not self._authenticator.is_own_user(user):
            # Our own user needs no cookie, and may have an old one: all ports of a host share them.
            authorization = _session(scope, headers)
        authenticate = partial(self._authenticator.authenticate, user, authorization)
        scope["state"]["authenticate"] = authenticate
        try:
            return await authenticate()
        except Problem:
            if _is_open(scope):
                return None
            raise

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        found = _HOST.fullmatch(headers.get("host", "").lower())
        host = (found[1] or found[2]) if found else None
        if host not in self._hosts and not _is_in(BARE_PROBES, scope):
            raise Problem(
                HTTPStatus.FORBIDDEN,
                "foreign-host",
                "This service is not known by the name in the Host header. Use localhost or "
                "127.0.0.1 on its own machine, or ask its operator to add the name to "
                "MUSTER_ALLOWED_HOSTS.",
            )
        _check_origin(scope, headers)
        _check_body(scope, headers)


def _template(scope: Scope) -> str:
    """Return the path as its route declares it; of a request that reached none, "none"."""
    return scope["route"].path.removeprefix(PREFIX) if "route" in scope else "none"


def _is_in(probes: Collection[str], scope: Scope) -> bool:
    return scope["path"].removeprefix(PREFIX) in probes


def _is_open(scope: Scope) -> bool:
    """Return whether the path needs no caller, whatever the method."""
    return _is_in(PROBES, scope) or scope["path"].startswith(OPEN_PAGES)


def _session(scope: Scope, headers: Mapping[str, str]) -> str | None:
    """Return the token in a browser's cookie as an Authorization header."""
    # Not by http.cookies, which reads none if one of another service of this host is unusual.
    pairs = (pair.strip().partition("=") for pair in headers.get("cookie", "").split(";"))
    token = next((value for name, _, value in pairs if name == SESSION_COOKIE), None)
    if token is None:
        return None
    if scope["method"] in CHANGING_METHODS and not all(
        name in headers for name in ("origin", PAGE_HEADER)
    ):
        detail = f"A change with a cookie needs the headers Origin and {PAGE_HEADER}."
        raise Problem(HTTPStatus.FORBIDDEN, "not-from-our-page", detail)
    return "Bearer " + token.strip('"')


def _refuse_early(scope: Scope) -> None:
    """Refuse what no route allows this caller, before a query is parsed or a body is read."""
    if scope["query_string"].count(b"&") >= QUERY_NAMES_LIMIT:
        detail = f"A query may have {QUERY_NAMES_LIMIT} parameters."
        raise Problem(HTTPStatus.REQUEST_URI_TOO_LONG, "long-query", detail)
    is_session = scope["path"] == "/ui/session"  # for a token of any scope
    if scope["method"] in CHANGING_METHODS and not is_session and not _is_open(scope):
        require_scope(scope["state"]["caller"], token.Scope.SUBMIT)


def _check_origin(scope: Scope, headers: Mapping[str, str]) -> None:
    is_foreign = False
    if (origin := headers.get("origin")) is not None:
        try:
            host = urlsplit(origin).netloc.lower()  # empty for "null"
        except ValueError:
            host = ""
        is_foreign = not host or host != headers.get("host", "").lower()
    # A GET that a browser sends for a page has no Origin, but Sec-Fetch-Site. Following a link to
    # us is allowed.
    is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    site = headers.get("sec-fetch-site", "none")
    if is_foreign or (site not in {"none", "same-origin"} and not is_link):
        detail = "Web pages of another origin may not use this service."
        raise Problem(HTTPStatus.FORBIDDEN, "foreign-origin", detail)


def _check_body(scope: Scope, headers: Mapping[str, str]) -> None:
    if "content-length" in headers and "transfer-encoding" in headers:
        # A proxy may go by the other one than we do (request smuggling).
        detail = "A body has either a Content-Length or a Transfer-Encoding."
        raise Problem(HTTPStatus.BAD_REQUEST, "bad-request", detail)
    length_bytes = int(headers.get("content-length", "0"))  # the HTTP parser admits digits only
    has_body = length_bytes > 0 or "transfer-encoding" in headers
    if scope["method"] == "GET" and has_body:
        # A stream would read it for hours.
        raise Problem(HTTPStatus.BAD_REQUEST, "bad-request", "A GET has no body. Leave it out.")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if scope["method"] in CHANGING_METHODS and has_body and media_type != "application/json":
        detail = "The body must be JSON. Send the header `Content-Type: application/json`."
        raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "not-json", detail)
    if length_bytes > BODY_LIMIT_BYTES:  # a body without a length is limited by FastAPI
        detail = f"The body is longer than {BODY_LIMIT_BYTES} bytes."
        raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body-too-large", detail)


def _request_id(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= _REQUEST_ID_LIMIT and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
