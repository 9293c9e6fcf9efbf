"""Who may come in: whoever `api.identity` knows, and no web page of anybody else.

A page in the user's browser can reach a loopback port. The Host list stops DNS rebinding, the
Origin check and the JSON content type stop forged requests. What a caller may do is said by each
route, in the words of `api.access`.
"""

import re
import uuid
from collections.abc import Callable, Collection, Mapping
from functools import partial
from http import HTTPStatus
from typing import Final
from urllib.parse import urlsplit

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from api.access import is_bare_probe, is_probe, refuse_idle_change
from api.account import CHANGING, client_of, legible, tell_refusal, with_account
from api.announcement import has_body, length_bytes, media_type
from api.identity import Caller, Identities, Unauthorized
from api.limits import Limits
from api.problems import Problem, respond
from api.tracing import trace_id
from api.visit import Visit
from api.yaml_bodies import YAML_TYPES
from muster.contracts.environ import LOCAL_NAMES

BODY_LIMIT_BYTES: Final = 1 << 20
"""A job of 256 variables and 1024 words is far below; nothing else has a body of any size."""

REQUEST_ID_LIMIT: Final = 128

_BODIES: Final = {"application/json", *YAML_TYPES}
"""What a browser sends for a page without asking first is none of them."""

_JUDGED: Final = (
    b"host",
    b"origin",
    b"sec-fetch-site",
    b"sec-fetch-mode",
    b"content-type",
    b"authorization",
    b"idempotency-key",
)
"""By which somebody is let in, and a job is known again.

What two say of a body's length the parser refuses.
"""

_HOST: Final = re.compile(r"(?:\[([0-9a-f:]+)\]|([^:/@\s]+))(?::\d{1,5})?")

_REPEATABLE: Final = re.compile(r"[a-z0-9._:-]{1,253}")
"""A name as DNS has them, or an address: no text that a page or a terminal would obey."""

_LOG: Final = structlog.get_logger("api")


class Door:
    """ASGI middleware in front of everything: names each request, and turns some away."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        identities: Identities,
        limits: Limits,
        caller_uid: Callable[[Scope], int | None],
        hosts: Collection[str],
    ) -> None:
        self._app = app
        self._identities = identities
        self._limits = limits
        self._caller_uid = caller_uid
        self._hosts = {*LOCAL_NAMES, *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":  # and nothing else is spoken here
            with bound_contextvars(**_named(scope)):
                await self._meet(scope, receive, send)

    async def _meet(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        state = scope["state"]
        state["caller_uid"] = self._caller_uid(scope)
        answer = _with_header(send, b"x-request-id", state["request_id"].encode())
        try:
            with self._limits.admitted(await self._client(scope, headers)):
                await self._attend(scope, receive, with_account(answer, scope), headers)
        except Problem as problem:
            tell_refusal(problem, scope)
            await respond(problem, scope)(scope, receive, answer)

    def _inspect(self, scope: Scope, headers: Headers) -> None:
        """Raise `Problem` for what no client of ours would send."""
        problem = (
            _said_twice(headers)
            or self._foreign_host(scope, headers)
            or _foreign_origin(headers)
            or _foreign_page(scope, headers)
            or _wrong_content(scope, headers)
            or _too_long(headers)
        )
        if problem is not None:
            raise problem

    async def _client(self, scope: Scope, headers: Headers) -> str | None:
        """Return whose limits hold for this request, None where no limits do.

        Raises `Problem` for whoever may not come in; that counts as a request of theirs, too.
        """
        is_own = self._identities.is_own(scope["state"]["caller_uid"])
        try:
            self._inspect(scope, headers)
            caller = await self._caller(scope, headers)
        except Problem:
            if not is_own:
                self._limits.charge(client_of(scope))
            raise
        if caller is None:
            return None if is_own else client_of(scope)
        scope["state"]["caller"] = caller
        return caller.name if caller.is_limited else None

    async def _caller(self, scope: Scope, headers: Mapping[str, str]) -> Caller | None:
        """Return who is asking, None for somebody who need not be known."""
        path = scope["path"]
        if is_bare_probe(path):
            return None
        recognize = partial(
            self._identities.identify,
            scope["state"]["caller_uid"],
            headers.get("authorization"),
        )
        scope["state"]["recognize"] = recognize
        try:
            return await recognize()
        except Problem:
            if is_probe(path):
                return None
            raise

    async def _attend(
        self, scope: Scope, receive: Receive, send: Send, headers: Mapping[str, str]
    ) -> None:
        """Pass a request on; one that showed a token, for as long as that opens anything.

        Raises `Problem` before anything is read of what somebody may not send.
        """
        refuse_idle_change(scope)
        authorization = headers.get("authorization")
        if authorization is None:
            await self._pass_on(scope, receive, send)
            return

        async def is_known() -> bool:
            try:
                await self._identities.identify(None, authorization)
            except Unauthorized as problem:
                tell_refusal(problem, scope)
                return False
            except Problem:
                return True  # tokens cannot be read now, which says nothing of this one
            return True

        visit = Visit(receive, send, is_known)
        try:
            await self._pass_on(scope, visit.receive, visit.send)
        finally:
            await visit.end()

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:  # noqa: BLE001  the client has its answer; the story is for us
            _LOG.exception(
                "a request failed unexpectedly",
                action="request_failed",
                path=legible(scope["path"]),
            )

    def _foreign_host(self, scope: Scope, headers: Mapping[str, str]) -> Problem | None:
        name = _host_name(headers.get("host", ""))
        if name in self._hosts or is_bare_probe(scope["path"]):
            return None
        return Problem(
            HTTPStatus.FORBIDDEN,
            "foreign-host",
            f"{_unknown(name)}: ask whoever runs it to add the name by which you call it to "
            "MUSTER_ALLOWED_HOSTS. On its own machine it is localhost, or 127.0.0.1.",
        )


def _said_twice(headers: Headers) -> Problem | None:
    """Refuse two of what is looked at once: somebody on the way may have looked at the other."""
    given = [name for name, _ in headers.raw]
    for name in _JUDGED:
        if given.count(name) > 1:
            return Problem(
                HTTPStatus.BAD_REQUEST,
                "header-given-twice",
                f"The header {name.decode().title()} is given twice: once is what it may be.",
            )
    return None


def _foreign_origin(headers: Mapping[str, str]) -> Problem | None:
    origin = headers.get("origin")
    if origin is None or _origin_host(origin) == headers.get("host", "").lower():
        return None
    return _no_pages()


def _foreign_page(scope: Scope, headers: Mapping[str, str]) -> Problem | None:
    """Refuse what a browser fetches for a page of somebody else; such a GET has no Origin.

    A link that a person follows is none of that.
    """
    is_foreign = headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}
    is_link = scope["method"] == "GET" and headers.get("sec-fetch-mode") == "navigate"
    return _no_pages() if is_foreign and not is_link else None


def _no_pages() -> Problem:
    return Problem(
        HTTPStatus.FORBIDDEN, "foreign-origin", "Pages of another origin may not use this service."
    )


def _wrong_content(scope: Scope, headers: Mapping[str, str]) -> Problem | None:
    if scope["method"] not in CHANGING or not has_body(headers):
        return None
    if media_type(headers) in _BODIES:
        return None
    return Problem(
        HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
        "not-json",
        "Bodies are JSON or YAML and say so: add the header `Content-Type: application/json`.",
    )


def _too_long(headers: Mapping[str, str]) -> Problem | None:
    """Refuse a body by its announcement; what comes without one is counted as it comes."""
    if length_bytes(headers) <= BODY_LIMIT_BYTES:
        return None
    return Problem(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        "body-too-large",
        f"A body has {BODY_LIMIT_BYTES} bytes at most.",
    )


def _host_name(host: str) -> str | None:
    found = _HOST.fullmatch(host.lower())
    return (found[1] or found[2]) if found else None


def _unknown(name: str | None) -> str:
    """Return what is wrong with a host; a name is said back only where it can be nothing else."""
    if name is None or not _REPEATABLE.fullmatch(name):
        return "The Host header names no machine that this service could be"
    return f"This service is not known as {name}"


def _origin_host(origin: str) -> str | None:
    """Return host and port of an Origin header, or None for what is none (``null``)."""
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _named(scope: Scope) -> dict[str, str]:
    """Give a request its name; return what everything says that is logged for it."""
    request_id = _request_id(Headers(scope=scope))
    scope.setdefault("state", {})["request_id"] = request_id
    trace = trace_id(scope)
    return {"request_id": request_id} | ({} if trace is None else {"trace_id": trace})


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
