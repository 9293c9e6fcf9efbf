"""What answers a command, when it is not the API."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cli.server import LOOK_SECONDS, RETRY_SECONDS, Server, ServerRefused, ServerUnreachable
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


class _Muster(_Stranger):
    """Says that it is well."""

    def do_GET(self) -> None:
        self._say(200, b'{"status": "ok"}')


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[int]:
    """Let somebody answer for a while, at the port that is yielded."""
    with HTTPServer(("127.0.0.1", port), handler) as listener:
        serving = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield listener.server_port
        listener.shutdown()
        serving.join()


@pytest.fixture
def server() -> Iterator[Server]:
    with listening(_Stranger) as port, Server(f"http://127.0.0.1:{port}") as opened:
        yield opened


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_where_nobody_listens_the_next_command_is_said() -> None:
    clock = Clock()
    words = "again within seconds.*set MUSTER_PORT to what `muster up` printed, or start it"
    url = f"http://127.0.0.1:{free_port()}"
    with Server(url, monotonic=clock.monotonic, sleep=clock.sleep) as server:
        with pytest.raises(ServerUnreachable, match=words):
            server.get("/health")
        assert clock.now == pytest.approx(RETRY_SECONDS, abs=LOOK_SECONDS)


def test_a_question_is_asked_until_the_api_is_there_again() -> None:
    port = free_port()
    with ExitStack() as stack:

        def api_comes_back(_seconds: float) -> None:
            stack.enter_context(listening(_Muster, port))

        url = f"http://127.0.0.1:{port}"
        server = stack.enter_context(Server(url, sleep=api_comes_back))
        assert server.get("/health") == {"status": "ok"}


def test_an_order_is_given_once() -> None:
    clock = Clock()
    url = f"http://127.0.0.1:{free_port()}"
    with Server(url, monotonic=clock.monotonic, sleep=clock.sleep) as server:
        with pytest.raises(ServerUnreachable):
            server.post("/jobs/a/pause")
        with pytest.raises(ServerUnreachable):
            server.patch("/jobs/a", {"world_size": 1})
    assert clock.now == 0


def test_a_stranger_is_recognised(server: Server) -> None:
    with pytest.raises(ServerRefused, match="is not Muster"):
        server.get("/health")
    with pytest.raises(ServerRefused, match=r"Internal Server Error \(HTTP 500\)"):
        server.patch("/jobs/a", {"world_size": 1})


def test_a_refusal_is_told_in_the_servers_words(server: Server) -> None:
    with pytest.raises(ServerRefused, match=r"not now \(HTTP 409\)") as caught:
        server.post("/jobs/a/pause")
    assert caught.value.status == 409
