"""A minimal HTTP client, so that the measurement itself costs little.

A client library needs as much time per request as the service, on the same machine.
"""

import json
import socket
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

    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection to a service, which is kept."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._incoming = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._incoming.close()
        self._socket.close()

    def ask(self, request: bytes) -> Answer:
        """Return the answer, or raise `ConnectionError` if there is none."""
        self._socket.sendall(request)
        status = self._line().split()[1]
        headers = {}
        while line := self._line():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        length = int(headers.get("content-length", "0"))
        body = self._incoming.read(length)
        if len(body) < length:
            raise ConnectionResetError("closed in the middle of an answer")
        return Answer(int(status), headers, body)

    def _line(self) -> str:
        line = self._incoming.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionResetError("closed before the end of an answer")
        return line.decode("latin-1").rstrip()

    def timed(self, request: bytes) -> tuple[Answer, float]:
        """Return the answer and the seconds it took."""
        began = time.perf_counter()
        answer = self.ask(request)
        return answer, time.perf_counter() - began


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def get(path: str, **headers: str) -> bytes:
    return _request("GET", path, headers, b"")


def post(path: str, body: Mapping[str, object], **headers: str) -> bytes:
    return _request("POST", path, {"content_type": "application/json", **headers}, _encoded(body))


def _encoded(body: Mapping[str, object]) -> bytes:
    return json.dumps(body).encode()


def _request(method: str, path: str, headers: Mapping[str, str], body: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
