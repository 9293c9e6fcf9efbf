"""Refuses a request with too many header fields while they arrive.

h11 parses the fields when all have arrived, at 5 µs each, and no other client is served meanwhile:
48 connections with 32,000 fields each would hold up everyone for seconds.
"""

import asyncio
import re
import sys
from http import HTTPStatus
from typing import Any, Final, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from api.errors import Problem, problem_response

HEADERS_LIMIT_BYTES: Final = 1 << 17
"""The longest header is a position in the logs of 4096 ranks, about 64 KiB."""

FIELDS_LIMIT: Final = 100

# These find what h11 finds: it ends lines with LF or CRLF, and admits no blank before the colon.
_HEADER_END: Final = re.compile(rb"\n\r?\n")
_BODY_LENGTH: Final = re.compile(
    rb"^(?:content-length:[ \t]*(\d{1,20})|transfer-encoding:)", re.IGNORECASE | re.MULTILINE
)

_PROBLEM: Final = problem_response(
    Problem(
        HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
        "long-headers",
        f"A request may have {FIELDS_LIMIT} header fields, {HEADERS_LIMIT_BYTES >> 10} KiB in all.",
        headers={"Connection": "close"},
    ),
    scope={},
)
_REFUSAL: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\n%s\r\n%s" % (
    b"".join(b"%s: %s\r\n" % field for field in _PROBLEM.raw_headers),
    _PROBLEM.body,
)


class LimitedProtocol(asyncio.Protocol):
    """Counts the lines of each header, and passes all that arrives on to uvicorn's protocol."""

    def __init__(self, **arguments: Any) -> None:  # noqa: ANN401  those of uvicorn's protocols
        self._http = H11Protocol(**arguments)
        self._uncounted = bytearray()
        self._searched = self._lines = 0  # bytes at its beginning, and the lines in them
        self._body_bytes = 0
        """Bytes of a body that are still to come; they are not counted."""

    def data_received(self, data: bytes) -> None:
        self._uncounted += data
        while self._uncounted:
            taken = min(self._body_bytes, len(self._uncounted))
            self._body_bytes -= taken
            if not taken:
                end = _HEADER_END.search(self._uncounted, max(0, self._searched - 2))
                taken = end.end() if end else len(self._uncounted)
                self._lines += self._uncounted.count(b"\n", self._searched, taken)
                self._searched = taken
                # The first line is the request, and the last one is empty.
                fields = self._lines - (2 if end else 1)
                if fields > FIELDS_LIMIT or taken > HEADERS_LIMIT_BYTES:
                    self._transport.write(_REFUSAL)
                    self._transport.close()
                    return
                if not end:
                    break
                if found := _BODY_LENGTH.search(self._uncounted, 0, taken):
                    # `AccessMiddleware` closes the connection after a body of unknown length.
                    self._body_bytes = int(found[1] or sys.maxsize)
            del self._uncounted[:taken]
            self._searched = self._lines = 0
        self._http.data_received(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._http.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()
