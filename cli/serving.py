"""Whether services serve, asked without the client and its library: `up` holds neither."""

import http.client
import json
import ssl
from typing import Final
from urllib.parse import urlsplit

ANSWER_SECONDS: Final = 2.0

_NEEDED: Final = ("database", "coordinator")
"""A disk that is nearly full keeps nobody from work: `muster status` tells of it."""


def serves(url: str) -> bool:
    """Whether API and coordinator both answer, and can reach what they need."""
    connection = _connection(url)
    try:
        connection.request("GET", "/health")
        checks = json.load(connection.getresponse())["checks"]
        return all(checks[name]["status"] == "ok" for name in _NEEDED)
    # Whoever died while it answered, or is no API at all, has not said that it serves.
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return False
    finally:
        connection.close()


def _connection(url: str) -> http.client.HTTPConnection:
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "http":
        return http.client.HTTPConnection(host, parts.port, timeout=ANSWER_SECONDS)
    # Our own child is asked how it is, at an address that its certificate need not name.
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return http.client.HTTPSConnection(host, parts.port, timeout=ANSWER_SECONDS, context=context)
