"""Of which trace a request is a part: the header `traceparent` (W3C Trace Context, level 1)."""

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)


def trace_id(scope: Scope) -> str | None:
    """Return the trace that the caller names; None for a header that is missing or none."""
    found = _TRACEPARENT.fullmatch(Headers(scope=scope).get("traceparent", ""))
    return found[1] if found else None


class Traced:
    """ASGI middleware: whatever is logged for a request of a trace says so."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace = trace_id(scope) if scope["type"] == "http" else None
        if trace is None:
            await self._app(scope, receive, send)
            return
        with bound_contextvars(trace_id=trace):
            await self._app(scope, receive, send)
