"""One HTTP connection, with a deadline on what the client owes us.

uvicorn waits for ever for the rest of a request, and for whoever does not read its answer. Here a
request must arrive whole within `RECEIPT_SECONDS`, and its headers must be short, or the connection
is closed: a client that drips one byte a minute holds nothing for long. Nor may one client hold all
connections, or ask a second time before the first is answered, which would cost us memory and it
nothing.
"""

import uuid
from asyncio import AbstractEventLoop, TimerHandle, Transport
from http import HTTPStatus
from typing import Any, ClassVar, Final

import structlog
from starlette.datastructures import Headers
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from api.announcement import has_body
from api.networks import client_network
from api.problems import Problem, respond
from api.reader import LOOK_SECONDS, Reader
from muster.contracts.environ import CONNECTIONS_AT_ONCE
from muster.peers import user_of
from muster.socket_owners import plain

RECEIPT_SECONDS: Final = 9.0
"""Enough for 1 MiB over a line of 1 Mbit/s, and who owes more is gone within ten."""

FAREWELL_SECONDS: Final = 5.0
"""For the answer that says why a connection is closed; then nobody waits for it to be read."""

HEADERS_LIMIT_BYTES: Final = 1 << 17
"""The longest header of ours is the position in the logs of 4096 ranks: about 64 KiB."""

CONNECTIONS_TOGETHER: Final = 512
"""Below the usual limit of 1024 open files, which logs and the database need as well."""

CONNECTIONS_IN_RESERVE: Final = 128
"""Beyond those, for the service's own user: who else would see what is going on?"""

_LOG: Final = structlog.get_logger("api")


class DeadlineProtocol(HttpToolsProtocol):
    """Knows its caller's user id, and closes connections whose request does not arrive."""

    receipt_seconds: ClassVar[float] = RECEIPT_SECONDS
    farewell_seconds: ClassVar[float] = FAREWELL_SECONDS
    look_seconds: ClassVar[float] = LOOK_SECONDS
    own_uid: ClassVar[int | None] = None
    """The user who could end the service as well, so that nothing is counted. None: nobody."""
    connections_at_once: ClassVar[int] = CONNECTIONS_AT_ONCE
    connections_together: ClassVar[int] = CONNECTIONS_TOGETHER

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._receipt: TimerHandle | None = None
        self._farewell: TimerHandle | None = None
        self._headers_pending_bytes = 0
        self._header_bytes = 0
        self._is_closing = False
        self.origin: int | str | None = None
        """Who is connected: a user of this machine, or else a network."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(transport)
        self._reader = Reader(self.loop, transport, self._unread, self.look_seconds)
        self.origin = self.client and client_network(self.client[0])
        if len(self.connections) > self.connections_together + CONNECTIONS_IN_RESERVE:
            self._hang_up("no-connection-left")
            return
        try:
            # Once per connection: who is at the other end of it does not change.
            uid = self._caller_uid()
        except OSError as error:
            self._turn_away(_unseen(error))
            return
        self.app_state = {**self.app_state, "caller_uid": uid}
        self._expect_request()
        if uid is not None:
            self.origin = uid
        if uid is None or uid != self.own_uid:
            self._refuse_crowd()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_received()
        self._reader.trust()
        if self._farewell is not None:
            self._farewell.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        if self._is_answered():
            self._expect_request()  # what comes during an answer begins none, or ends it
        self._headers_pending_bytes += len(data)
        super().data_received(data)
        if self._headers_pending_bytes > HEADERS_LIMIT_BYTES and self._receipt is not None:
            self._turn_away(_headers_too_large())

    def on_message_begin(self) -> None:
        if not self._is_answered():
            self._answer_no_more()
            raise _EnoughRead
        super().on_message_begin()
        self._reader.expect_more()
        self._header_bytes = 0
        self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Those of a request that came in one piece never were pending.
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADERS_LIMIT_BYTES:
            self._turn_away(_headers_too_large())
            raise _EnoughRead
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and has_body(Headers(raw=self.headers)):
            self._turn_away(_no_upgrade())
            raise _EnoughRead
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        # Bodies are counted by the application.
        self._headers_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._request_received()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._reader.watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader.watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._reader.trust()
        if self._is_answered():
            self._reader.watch()  # nothing more is written, and so nothing else would look

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP: uvicorn calls it whenever its parser stops, also by our will."""
        self._turn_away(Problem(HTTPStatus.BAD_REQUEST, "bad-request", msg))

    def _unread(self) -> None:
        self._hang_up("unread-answer")

    def _is_answered(self) -> bool:
        """Whether no request waits for the rest of its answer."""
        return self.cycle is None or self.cycle.response_complete

    def _expect_request(self) -> None:
        if self._receipt is None:
            self._receipt = self.loop.call_later(self.receipt_seconds, self._request_overdue)

    def _request_received(self) -> None:
        self._headers_pending_bytes = 0
        if self._receipt is not None:
            self._receipt.cancel()
            self._receipt = None

    def _request_overdue(self) -> None:
        self._turn_away(
            Problem(
                HTTPStatus.REQUEST_TIMEOUT,
                "request-timeout",
                f"Your request did not arrive whole within {self.receipt_seconds:g} seconds.",
            )
        )

    def _refuse_crowd(self) -> None:
        """Turn away whoever is one too many."""
        if len(self.connections) > self.connections_together:
            detail = f"All {self.connections_together} connections are in use: try again later."
            self._turn_away(_not_now(HTTPStatus.SERVICE_UNAVAILABLE, detail))
        elif self._connections() > self.connections_at_once:
            detail = f"You have {self.connections_at_once} connections: close one, or use it again."
            self._turn_away(_not_now(HTTPStatus.TOO_MANY_REQUESTS, detail))

    def _connections(self) -> int:
        """Return how many connections this client has, this one included."""
        return sum(
            isinstance(other, DeadlineProtocol) and other.origin == self.origin
            for other in self.connections
        )

    def _answer_no_more(self) -> None:
        """Let the request that is being answered be the last one of this connection."""
        self._is_closing = True
        self._request_received()
        self.flow.pause_reading()
        self.cycle.keep_alive = False
        self._tell("pipelined-request")

    def _turn_away(self, problem: Problem) -> None:
        if self._is_closing or self.transport.is_closing():
            return
        self._is_closing = True
        request_id = uuid.uuid4().hex
        self._tell(problem.slug, status=int(problem.status), request_id=request_id)
        if self._is_answered() or not self.cycle.response_started:
            self.transport.write(_as_bytes(problem, request_id))
        self.transport.close()
        self._farewell = self.loop.call_later(self.farewell_seconds, self.transport.abort)

    def _hang_up(self, reason: str) -> None:
        """End a connection at once: nobody would read a word."""
        self._is_closing = True
        self._tell(reason)
        self.transport.abort()

    def _tell(self, reason: str, **facts: object) -> None:
        _LOG.warning(
            f"closed a connection: {reason}",
            action="connection_refused",
            caller=f"uid:{self.origin}" if isinstance(self.origin, int) else self.origin,
            reason=reason,
            **facts,
        )

    def _caller_uid(self) -> int | None:
        """Return the user at the other end, None if not of this machine; OSError if not seen."""
        if self.client is None or self.server is None or self.server[1] is None:
            return None
        client, server = plain(self.client[0]), plain(self.server[0])
        if not client.is_loopback and client != server:
            return None  # not worth a look into the kernel's tables
        return user_of((client, self.client[1]), (server, self.server[1]))


class _EnoughRead(Exception):
    """Stops the parser: what else has arrived is not looked at."""


def _headers_too_large() -> Problem:
    detail = f"Your headers are longer than {HEADERS_LIMIT_BYTES} bytes."
    return Problem(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers-too-large", detail)


def _no_upgrade() -> Problem:
    # The parser reads no further than its headers: what was asked for would be done without a body.
    detail = "A body cannot come with an upgrade of the protocol: send it over plain HTTP/1.1."
    return Problem(HTTPStatus.BAD_REQUEST, "upgrade-refused", detail)


def _not_now(status: HTTPStatus, detail: str) -> Problem:
    return Problem(status, "too-many-connections", detail, headers={"Retry-After": "1"})


def _unseen(error: OSError) -> Problem:
    return Problem(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "caller-unseen",
        f"It cannot be seen now who you are ({error.strerror}): try again.",
        headers={"Retry-After": "1"},
    )


def _as_bytes(problem: Problem, request_id: str) -> bytes:
    """Return the whole answer, for where no application has a say."""
    scope = {"type": "http", "headers": [], "state": {"request_id": request_id}}
    answer = respond(problem, scope)
    fields = [
        *answer.raw_headers,
        (b"x-request-id", request_id.encode()),
        (b"connection", b"close"),
    ]
    status = HTTPStatus(problem.status)
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    return head + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n" + answer.body
