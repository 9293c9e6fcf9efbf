"""One HTTP connection, with a deadline on what the client owes us.

uvicorn waits for ever for the rest of a request. Here a request must arrive whole within
`RECEIPT_SECONDS`, and its headers must be short, or the connection is closed: a client that
drips one byte a minute holds nothing for long. Nor may one client hold all connections.
"""

import os
from asyncio import AbstractEventLoop, TimerHandle, Transport
from typing import Any, ClassVar, Final

import structlog
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from muster.peers import Endpoint, plain, user_of

RECEIPT_SECONDS: Final = 9.0
"""Enough for 1 MiB over a line of 1 Mbit/s, and who owes more is gone within ten."""

HEADERS_LIMIT_BYTES: Final = 1 << 17
"""The longest header of ours is the position in the logs of 4096 ranks: about 64 KiB."""


_LOG: Final = structlog.get_logger("api")


class DeadlineProtocol(HttpToolsProtocol):
    """Knows its caller's user id, and closes connections whose request does not arrive."""

    receipt_seconds: ClassVar[float] = RECEIPT_SECONDS
    connections_at_once: ClassVar[int] = 128
    """From one other machine, or of one other user of this one."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._receipt: TimerHandle | None = None
        self._headers_pending_bytes = 0
        self._header_bytes = 0
        self.origin: int | str | None = None
        """Who is connected: a user of this machine, or else an address."""

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]  # as uvicorn
        super().connection_made(transport)
        # Once per connection: who is at the other end of it does not change.
        uid = self._caller_uid()
        self.app_state = {**self.app_state, "caller_uid": uid}
        self.origin = uid if uid is not None else self.client and self.client[0]
        self._expect_request()
        if uid != os.geteuid() and self._connections() > self.connections_at_once:
            self._turn_away(429, "Too Many Requests")

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_received()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._expect_request()
        self._headers_pending_bytes += len(data)
        super().data_received(data)
        if self._headers_pending_bytes > HEADERS_LIMIT_BYTES and self._receipt is not None:
            self._turn_away(431, "Request Header Fields Too Large")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        # Those of a request that came at once are not pending; a parser ends with whatever it is
        # told.
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > HEADERS_LIMIT_BYTES:
            self._turn_away(431, "Request Header Fields Too Large")
            raise ValueError("headers too large")
        super().on_header(name, value)

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)

    def on_body(self, body: bytes) -> None:
        # Bodies are counted by the application.
        self._headers_pending_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._request_received()
        super().on_message_complete()

    def _expect_request(self) -> None:
        if self._receipt is None:
            self._receipt = self.loop.call_later(self.receipt_seconds, self._request_overdue)

    def _request_received(self) -> None:
        self._headers_pending_bytes = 0
        if self._receipt is not None:
            self._receipt.cancel()
            self._receipt = None

    def _request_overdue(self) -> None:
        self._turn_away(408, "Request Timeout")

    def _connections(self) -> int:
        """Return how many connections this client has, this one included."""
        return sum(
            isinstance(other, DeadlineProtocol) and other.origin == self.origin
            for other in self.connections
        )

    def _turn_away(self, status: int, phrase: str) -> None:
        if self.transport.is_closing():
            return
        _LOG.warning(
            f"closed a connection: {phrase.lower()}",
            action="connection_refused",
            caller=f"uid:{self.origin}" if isinstance(self.origin, int) else self.origin,
            status=status,
        )
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            head = f"HTTP/1.1 {status} {phrase}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode())
        self.transport.close()

    def _caller_uid(self) -> int | None:
        if self.client is None or self.server is None or self.server[1] is None:
            return None
        client: Endpoint = (plain(self.client[0]), self.client[1])
        return user_of(client, (plain(self.server[0]), self.server[1]))
