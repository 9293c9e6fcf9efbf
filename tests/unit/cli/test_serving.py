"""What `muster up` takes for services that serve."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from cli.serving import serves


@contextmanager
def answering(body: bytes) -> Iterator[str]:
    """Answer every GET with this, and yield where."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def health(**ill: str) -> bytes:
    checks = dict.fromkeys(("database", "coordinator", "disk"), "ok") | ill
    return json.dumps(
        {
            "status": "degraded" if ill else "ok",
            "checks": {name: {"status": status, "detail": ""} for name, status in checks.items()},
        }
    ).encode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (health(), True),
        (health(disk="degraded"), True),
        (health(coordinator="degraded"), False),
        (health(database="degraded"), False),
        (b'{"status": "ok"}', False),
        (b"[]", False),
        (b"hello", False),
    ],
)
def test_a_disk_that_is_nearly_full_keeps_nobody_waiting(*, body: bytes, expected: bool) -> None:
    with answering(body) as url:
        assert serves(url) is expected
