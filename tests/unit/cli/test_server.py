"""What answers a command, when it is not the API."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cli.server import Server, ServerRefused, ServerUnreachable
from muster.ports import free_port


class _Stranger(BaseHTTPRequestHandler):
    """Says hello in HTML to a GET, and is out of order otherwise."""

    def do_GET(self) -> None:
        self._say(200, b"<h1>hello</h1>")

    def do_PATCH(self) -> None:
        self._say(500, b"<h1>out of order</h1>")

    def do_POST(self) -> None:
        self._say(409, b'{"detail": "not now"}')

    def log_message(self, *_words: object) -> None: ...

    def _say(self, status: int, body: bytes) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Server]:
    with HTTPServer(("127.0.0.1", 0), _Stranger) as stranger:
        serving = threading.Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        with Server(f"http://127.0.0.1:{stranger.server_port}") as opened:
            yield opened
        stranger.shutdown()
        serving.join()


def test_where_nobody_listens_the_next_command_is_said() -> None:
    with (
        Server(f"http://127.0.0.1:{free_port()}") as server,
        pytest.raises(
            ServerUnreachable, match="set MUSTER_PORT to what `muster up` printed, or start it"
        ),
    ):
        server.get("/health")


def test_a_stranger_is_recognised(server: Server) -> None:
    with pytest.raises(ServerRefused, match="is not Muster"):
        server.get("/health")
    with pytest.raises(ServerRefused, match=r"Internal Server Error \(HTTP 500\)"):
        server.patch("/jobs/a", {"world_size": 1})


def test_a_refusal_is_told_in_the_servers_words(server: Server) -> None:
    with pytest.raises(ServerRefused, match=r"not now \(HTTP 409\)") as caught:
        server.post("/jobs/a/pause")
    assert caught.value.status == 409
