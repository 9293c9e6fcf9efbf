"""Of which trace a request is a part: the header `traceparent` (W3C Trace Context, level 1)."""

import re
from typing import Final

from starlette.datastructures import Headers
from starlette.types import Scope

_TRACEPARENT: Final = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)


def trace_id(scope: Scope) -> str | None:
    """Return the trace that the caller names; None for a header that is missing or none."""
    found = _TRACEPARENT.fullmatch(Headers(scope=scope).get("traceparent", ""))
    return found[1] if found else None
