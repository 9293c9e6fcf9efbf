"""A proxy in front of a store that counts requests and makes some of them fail."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs, urlsplit

from msgspec import structs

from muster.contracts.settings.services import S3Settings

FAULTS: Final = (
    "drop before",  # the request is lost
    "drop after",  # the answer is lost
    "late",  # the request arrives, but only after the connection is lost
    "409",
    "412",
    "500",
    "503",
    "200",  # with an error in the body
    "cut",  # the body of the answer is cut short
    "cut 40",  # the answer is, after so many bytes: in its headers
)
LATE_SECONDS: Final = 0.05

Rewrite: TypeAlias = Callable[[str, dict[str, str]], None]


def as_ceph(operation: str, headers: dict[str, str]) -> None:
    """Rewrite requests to what Ceph RGW 16.2 makes of them."""
    if operation.startswith("PUT") and '"' in headers.get("If-Match", ""):
        headers["If-Match"] = "never"  # it matches an ETag only without its quotes
    if operation == "COMPLETE":
        headers.pop("If-None-Match", None)  # it ignores conditions of uploads in parts


_ERROR: Final = "<?xml version='1.0'?><Error><Code>Injected</Code><Message>no</Message></Error>"


def operation(method: str, url: str) -> str:
    """Return what a request does, such as ``PUT LATEST``, ``LIST`` or ``COMPLETE``."""
    parts = urlsplit(url)
    query = parse_qs(parts.query, keep_blank_values=True)
    if "list-type" in query:
        return "LIST"
    if "uploads" in query:
        return "LIST UPLOADS" if method == "GET" else "CREATE"
    if "uploadId" in query:
        return {"PUT": "PART", "POST": "COMPLETE", "DELETE": "ABORT"}[method]
    return f"{method} {parts.path.rpartition('/')[2]}"


class FaultyStore:
    """Set `fault`: it is given an operation, and returns one of `FAULTS`, a status, or None.

    "cut" takes any number. `rewrite` may change the headers of requests that reach the store.
    """

    def __init__(self, access: S3Settings) -> None:
        target = urlsplit(access.endpoint or "").netloc
        outer = self

        class Handler(_Handler):
            store, server_address = outer, target

        self.fault: Callable[[str], str | None] = lambda _operation: None
        self.rewrite: Rewrite = lambda _operation, _headers: None
        self.operations: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.late: list[threading.Thread] = []
        """Each lets one request arrive whose connection is lost."""
        self.access = structs.replace(
            access, endpoint=f"http://127.0.0.1:{self._server.server_port}"
        )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def await_late(self) -> None:
        """Wait until all late requests have arrived."""
        while self.late:
            self.late.pop().join()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def faulty(access: S3Settings) -> Iterator[FaultyStore]:
    store = FaultyStore(access)
    try:
        yield store
    finally:
        store.close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    store: FaultyStore
    server_address: str

    def handle(self) -> None:
        with suppress(ConnectionError):  # the client was killed
            super().handle()

    def _relay(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        done = operation(self.command, self.path)
        self.store.operations.append(done)
        fault = self.store.fault(done)
        if fault == "200" and done.startswith(("GET", "HEAD", "DELETE")):
            fault = None  # no store does
        if fault and fault.isdigit():
            self._answer(int(fault), [("Content-Type", "application/xml")], _ERROR.encode())
        elif fault in {"drop before", "late"}:
            self.close_connection = True
            if fault == "late":
                late = threading.Thread(target=self._late, args=(body,), daemon=True)
                late.start()  # a thread that is joined has to run
                self.store.late.append(late)
        else:
            status, headers, content = self._forward(body)
            if fault == "drop after":
                self.close_connection = True
            else:
                self._answer(status, headers, content, cut=fault or "")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _relay  # noqa: N815

    def _late(self, body: bytes) -> None:
        time.sleep(LATE_SECONDS)
        self._forward(body)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = HTTPConnection(self.server_address)
        try:
            headers = {name: value for name, value in self.headers.items() if name != "Expect"}
            self.store.rewrite(operation(self.command, self.path), headers)
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, *, cut: str = ""
    ) -> None:
        lines = [f"{self.protocol_version} {status} {HTTPStatus(status).phrase}"]
        for name, value in headers:
            if name.lower() not in {"connection", "transfer-encoding"}:
                lines.append(f"{name}: {value}")
        if not any(name.lower() == "content-length" for name, _ in headers):
            lines.append(f"Content-Length: {len(content)}")
        head = "\r\n".join([*lines, "", ""]).encode("latin-1")
        answer = head if self.command == "HEAD" else head + content
        if cut:
            self.close_connection = True
            answer = answer[: int(cut[4:] or len(head) + len(content) // 2)]
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, ANN401
        """Keep quiet: `FaultyStore.operations` has it."""
