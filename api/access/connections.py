"""Connections: whose they are, and what is refused while it arrives, before there is a request.

A caller without a token may keep few connections open, so that those of others find room.
h11 parses header fields when all have arrived, at 5 µs each, and a chunk at 8 µs; no other client
is served meanwhile: 48 connections with 32,000 fields each would hold up everyone for seconds.

Uvicorn's setting `http` takes a class of protocols: ours wraps uvicorn's.
"""

import asyncio
import os
import re
import sys
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from api.access.auth import User, client_name
from api.errors import Problem, problem_response
from muster.contracts.errors import WireError
from muster.contracts.relay import split_relay_line
from muster.host.peers import normalize_address, uid_of_connection

CONNECTIONS_EACH: Final = 64
"""Of a caller without an authenticated request, and of a token between requests."""

FIRST_REQUEST_SECONDS: Final = 10.0

SEND_SECONDS: Final = 0.05
"""A new connection has so long to send a request before it may be closed for another one. Some
hundred can be opened meanwhile."""

HEADERS_LIMIT_BYTES: Final = 1 << 17
"""The longest header is a position in the logs of 4096 ranks, about 64 KiB."""

FIELDS_LIMIT: Final = 100

CHUNKS_LIMIT: Final = 1000
"""Of a body, which may have 1 MiB."""

# These find what h11 finds: it ends lines with LF or CRLF, and admits no blank before the colon.
_HEADER_END: Final = re.compile(rb"\n\r?\n")
_LENGTH: Final = re.compile(rb"^content-length:[ \t]*(\d{1,20})", re.IGNORECASE | re.MULTILINE)
_CHUNKED: Final = re.compile(rb"^transfer-encoding:", re.IGNORECASE | re.MULTILINE)
_CHUNK_BYTES: Final = re.compile(rb"[0-9a-f]{1,20}", re.IGNORECASE)

_LONG_HEADERS: Final = Problem(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    "long-headers",
    f"A request may have {FIELDS_LIMIT} header fields, {HEADERS_LIMIT_BYTES >> 10} KiB in all.",
)
_MANY_CHUNKS: Final = Problem(
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "many-chunks",
    f"A body may have {CHUNKS_LIMIT} chunks. Send larger ones, or a Content-Length.",
)


class LimitedProtocol(asyncio.Protocol):
    """Counts connections, header lines and chunks; all that arrives goes on to uvicorn's protocol.

    Each request finds this object as `connection`, and `user`, in its state.
    """

    def __init__(
        self,
        counted: "dict[LimitedProtocol, str]",
        is_own_user: Callable[[User], bool],
        *,
        may_be_relayed: bool = False,
        app_state: dict[str, Any],
        **arguments: Any,  # noqa: ANN401  those of uvicorn's protocols
    ) -> None:
        """`counted` tells for whom each connection of the server counts, the oldest first.

        `may_be_relayed`: a node has started this API, and carries connections to it.
        """
        self._state = {**app_state, "connection": self}
        self._http = H11Protocol(app_state=self._state, **arguments)
        self._counted = counted
        self._is_own_user = is_own_user
        self._may_be_relayed = may_be_relayed  # until the first bytes have come
        self._beginning = b""
        self._uncounted = bytearray()
        self._searched = self._lines = 0  # bytes at its beginning, and the lines in them
        self._body_bytes = 0
        """Bytes of a body or a chunk that are still to come; they are not counted."""
        self._chunks: int | None = None  # so far; None outside of a body in chunks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        client, server = (transport.get_extra_info(name) for name in ("peername", "sockname"))
        uid = peer_uid(client, server)
        self._may_be_relayed = self._may_be_relayed and uid == os.geteuid()
        self._await_request(uid)
        self._http.connection_made(self._transport)

    def _await_request(self, user: User) -> None:
        """Note whose connection it is, and begin to wait for its first request."""
        self._state["user"] = user
        loop = asyncio.get_running_loop()
        self._first_request = loop.call_later(FIRST_REQUEST_SECONDS, self.close)
        if self._is_own_user(user):
            self._first_request.cancel()
        client = self._transport.get_extra_info("peername")
        self.count_for(client_name({"client": client, "state": self._state}))

    def close(self) -> None:
        self.count_for(None)
        self._transport.abort()  # what it has not read yet would keep it open

    def count_for(self, name: str | None) -> None:
        """Count it for a caller, as the newest; None: it does not count."""
        self._counted.pop(self, None)
        is_own = self._is_own_user(self._state["user"])
        if name is None or is_own or self._transport.is_closing():
            return
        self._counted[self] = name
        # Not at once: many that connect together have to send their requests first.
        asyncio.get_running_loop().call_later(SEND_SECONDS, self._close_oldest, name)

    def _close_oldest(self, name: str) -> None:
        same = [connection for connection, whose in self._counted.items() if whose == name]
        for oldest in same[:-CONNECTIONS_EACH]:
            oldest.close()

    def data_received(self, data: bytes) -> None:
        if self._may_be_relayed:
            data = self._read_relay_line(data)
            if not data:  # h11 would take it for the end
                return
        self._uncounted += data
        while self._uncounted:
            taken = min(self._body_bytes, len(self._uncounted))
            self._body_bytes -= taken
            if not taken and self._chunks is not None:
                taken = self._count_chunk(self._chunks + 1)
            elif not taken:
                taken = self._count_header()
            if self._transport.is_closing():
                return
            if not taken:
                break
            del self._uncounted[:taken]
        self._http.data_received(data)

    def _read_relay_line(self, data: bytes) -> bytes:
        """Return what follows the line of a relay, or all if there is none; b"" for nothing yet."""
        self._beginning += data
        try:
            found = split_relay_line(self._beginning)
        except WireError as error:
            self._refuse(Problem(HTTPStatus.BAD_REQUEST, "bad-relay", f"{error}. Start it again."))
            return b""
        if found is None:
            return b""
        self._may_be_relayed, self._beginning = False, b""
        client, rest = found
        if client is not None:
            self._first_request.cancel()
            self._await_request(client)
        return rest

    def _count_header(self) -> int:
        """Return the length of a header or a trailer, 0 until all of it has arrived."""
        end = _HEADER_END.search(self._uncounted, max(0, self._searched - 2))
        taken = end.end() if end else len(self._uncounted)
        self._lines += self._uncounted.count(b"\n", self._searched, taken)
        self._searched = taken
        # The first line is the request or the last chunk's, and the last one is empty.
        fields = self._lines - (2 if end else 1)
        if fields > FIELDS_LIMIT or taken > HEADERS_LIMIT_BYTES:
            self._refuse(_LONG_HEADERS)
        if not end:
            return 0
        if not self._first_request.cancelled():
            self._first_request.cancel()
            self.count_for(None)  # until `AccessMiddleware` knows the caller
        self._searched = self._lines = 0
        # As h11, which goes by chunks where a request has both. After a trailer nothing is read:
        # `AccessMiddleware` closes the connection after a body of unknown length.
        if _CHUNKED.search(self._uncounted, 0, taken):
            self._chunks = 0
        elif found := _LENGTH.search(self._uncounted, 0, taken):
            self._body_bytes = int(found[1])
        return taken

    def _count_chunk(self, number: int) -> int:
        """Return the length of the line before a chunk, 0 until all of it has arrived."""
        end = self._uncounted.find(b"\n") + 1
        if not end:
            return 0
        found = _CHUNK_BYTES.match(self._uncounted)
        size_bytes = int(found[0], 16) if found else sys.maxsize  # h11 refuses the line
        if not size_bytes:
            self._chunks = None
            return self._count_header()
        self._chunks = number
        if number > CHUNKS_LIMIT:
            self._refuse(_MANY_CHUNKS)
        self._body_bytes = size_bytes + len(b"\r\n")
        return end

    def _refuse(self, problem: Problem) -> None:
        response = problem_response(problem, scope={})
        fields = [(b"connection", b"close"), *response.raw_headers]
        head = b"HTTP/1.1 %d %s\r\n" % (problem.status, HTTPStatus(problem.status).phrase.encode())
        head += b"".join(b"%s: %s\r\n" % field for field in fields)
        self._transport.write(head + b"\r\n" + response.body)
        self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.count_for(None)
        self._first_request.cancel()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()


def peer_uid(client: tuple[Any, ...] | None, server: tuple[Any, ...] | None) -> int | None:
    """Return the user id of a client on this machine; None for a client elsewhere.

    Asked once for each connection (about 50 µs): its other end stays the same.
    """
    if not client or not server:
        return None  # it has gone already
    ends = [(normalize_address(host), port) for host, port, *_ in (client, server)]
    if not ends[0][0].is_loopback and ends[0][0] != ends[1][0]:
        return None
    return uid_of_connection(*ends)
