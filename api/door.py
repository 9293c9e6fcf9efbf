"""Who may come in: the same Unix user, from this host, and no web page of anybody else.

A page in the user's browser can reach a loopback port. The Host list stops DNS rebinding, the
Origin check and the JSON content type stop forged requests, and the user check stops the other
accounts of the machine.
"""

import ipaddress
import re
import uuid
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.problems import Problem, respond
from muster.contracts.errors import MusterError

BODY_LIMIT_BYTES: Final = 1 << 20
"""A job of 256 variables and 1024 words is far below; nothing else has a body of any size."""

LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})

REQUEST_ID_LIMIT: Final = 128

_HOST: Final = re.compile(r"(?:\[([0-9a-f:]+)\]|([^:/@\s]+))(?::\d{1,5})?")

_BODY_METHODS: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})

_LOG: Final = structlog.get_logger("api")


class NotLoopback(MusterError):
    """The service was asked to listen where other machines could reach it."""

    def __init__(self, host: str) -> None:
        super().__init__(
            f"refusing to listen on {host}: access from other machines needs tokens, which come "
            "with a later release; set MUSTER_HOST to 127.0.0.1 and use an SSH tunnel"
        )


def require_loopback(host: str, address: str) -> None:
    """Raise `NotLoopback` unless `address`, to which `host` resolves, is this machine's own."""
    if not ipaddress.ip_address(address).is_loopback:
        raise NotLoopback(host)


class Door:
    """ASGI middleware in front of everything: names each request, and turns some away."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        own_uid: int,
        caller_uid: Callable[[Scope], int | None],
        bound_host: str,
    ) -> None:
        self._app = app
        self._own_uid = own_uid
        self._caller_uid = caller_uid
        self._names = LOCAL_NAMES | {bound_host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _with_header(send, b"x-request-id", request_id.encode())
        problem = self._refusal(scope, headers)
        if problem is None:
            await self._pass_on(scope, receive, answer)
            return
        _LOG.warning(
            f"turned a request away: {problem.slug}",
            action="request_refused",
            request_id=request_id,
            path=scope["path"],
        )
        await respond(problem, scope)(scope, receive, answer)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:  # noqa: BLE001  the client has its answer; the story is for us
            _LOG.exception(
                "a request failed unexpectedly",
                action="request_failed",
                request_id=scope["state"]["request_id"],
                path=scope["path"],
            )

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> Problem | None:
        return (
            self._foreign_user(scope)
            or self._foreign_host(headers)
            or _foreign_origin(headers)
            or _wrong_content(scope, headers)
        )

    def _foreign_user(self, scope: Scope) -> Problem | None:
        uid = self._caller_uid(scope)
        scope["state"]["caller_uid"] = uid
        if uid == self._own_uid:
            return None
        return Problem(
            HTTPStatus.FORBIDDEN,
            "foreign-user",
            "Only the Unix user that runs this service may use it: connect as that user.",
        )

    def _foreign_host(self, headers: Mapping[str, str]) -> Problem | None:
        name = _host_name(headers.get("host", ""))
        if name in self._names:
            return None
        return Problem(
            HTTPStatus.FORBIDDEN,
            "foreign-host",
            "The Host header names another machine: use localhost or 127.0.0.1.",
        )


def _foreign_origin(headers: Mapping[str, str]) -> Problem | None:
    origin = headers.get("origin")
    if origin is None or _origin_host(origin) == headers.get("host", "").lower():
        return None
    return Problem(
        HTTPStatus.FORBIDDEN, "foreign-origin", "Pages of another origin may not use this service."
    )


def _wrong_content(scope: Scope, headers: Mapping[str, str]) -> Problem | None:
    if scope["method"] not in _BODY_METHODS or not _has_body(headers):
        return None
    if headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json":
        return None
    return Problem(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "not-json",
        "Bodies are JSON and say so: add the header `Content-Type: application/json`.",
    )


def _has_body(headers: Mapping[str, str]) -> bool:
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


def _host_name(host: str) -> str | None:
    found = _HOST.fullmatch(host.lower())
    return (found[1] or found[2]) if found else None


def _origin_host(origin: str) -> str | None:
    """Return host and port of an Origin header, or None for what is none (``null``)."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _request_id(headers: Mapping[str, str]) -> str:
    given = headers.get("x-request-id", "")
    if 0 < len(given) <= REQUEST_ID_LIMIT and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _with_header(send: Send, name: bytes, value: bytes) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", []), (name, value)]
        await send(message)

    return sending
