"""A plain HTTP client on one connection, so that the measurement itself costs little.

A client library with a pool needs as much time per request as the service, on the same machine.
"""

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

ANSWER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A response. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    """From the request to the last byte."""

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection to a service, which is kept."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)
        self._connection.auto_open = 0  # once it is lost, it is lost
        self._connection.connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str) -> Answer:
        return self._ask("GET", path, {}, None)

    def post(self, path: str, body: Mapping[str, object], **headers: str) -> Answer:
        """Send JSON; `idempotency_key="..."` is a header."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        whole = {"content-type": "application/json", **named}
        return self._ask("POST", path, whole, json.dumps(body).encode())

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Answer:
        """Return the answer, or raise an `OSError` if there is none."""
        began = time.perf_counter()
        try:
            self._connection.request(method, path, body, headers)
            answer = self._connection.getresponse()
            content = answer.read()
        except http.client.HTTPException as error:
            raise ConnectionResetError("closed in the middle of an answer") from error
        lower = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, lower, content, time.perf_counter() - began)


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port
