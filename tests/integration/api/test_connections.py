"""What a connection may cost: time, memory and a place among others. Hostile bytes on a socket."""

import asyncio
import errno
import json
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import uvicorn
from integration.api.service import Service
from starlette.types import ASGIApp, Receive, Scope, Send
from structlog.testing import capture_logs

from api import protocol
from api.protocol import DeadlineProtocol

STATUS = re.compile(rb"HTTP/1.1 (\d{3})")
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{}"
UPGRADING = GET.removesuffix(b"\r\n") + b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
OWN_UID = 7


class Impatient(DeadlineProtocol):
    receipt_seconds = 0.2
    farewell_seconds = 0.2
    look_seconds = 0.2


class Narrow(DeadlineProtocol):
    """Takes everybody for a stranger, and two connections from each."""

    connections_at_once = 2

    def _caller_uid(self) -> int | None:
        return None


class Full(Narrow):
    """Has no place at all, but for its own user."""

    connections_together = 0


class FullForOthers(Full):
    own_uid = OWN_UID

    def _caller_uid(self) -> int | None:
        return OWN_UID


class Blind(DeadlineProtocol):
    """Has no descriptor left to look with."""

    def _caller_uid(self) -> int | None:
        raise OSError(errno.EMFILE, "Too many open files")


async def silent(_scope: Scope, receive: Receive, _send: Send) -> None:
    """Take the request, and answer nothing."""
    message = await receive()
    while message.get("more_body"):
        message = await receive()
    await receive()


async def generous(_scope: Scope, _receive: Receive, send: Send) -> None:
    """Answer with more than any buffer of a kernel holds."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": bytes(64 << 20)})


@contextmanager
def served(kind: type[DeadlineProtocol], app: ASGIApp = silent) -> Iterator[tuple[str, int]]:
    """Give the address of a service of this process."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(app, http=kind, lifespan="off", log_level="critical", ws="none")
    )
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    try:
        yield listener.getsockname()
    finally:
        server.should_exit = server.force_exit = True
        running.join()


def until_closed(client: socket.socket) -> bytes:
    received = bytearray()
    try:
        while part := client.recv(65536):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


def status(answer: bytes) -> int:
    found = STATUS.match(answer)
    assert found, answer[:200]
    return int(found[1])


def problem(answer: bytes) -> tuple[int, str]:
    """Return status and type of a whole answer, which is to be a problem document."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/problem+json" in head
    assert b"content-length: %d" % len(body) in head
    told = json.loads(body)
    assert told["request_id"].encode() in head
    return status(answer), told["type"].removeprefix("/problems/")


@pytest.mark.parametrize("beginning", [b"", b"GET / HT", POST])
def test_a_client_that_never_finishes_its_request_is_dropped(beginning: bytes) -> None:
    with served(Impatient) as address, socket.create_connection(address, timeout=20) as client:
        client.sendall(beginning)
        assert problem(until_closed(client)) == (408, "request-timeout")


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["without end", "in one piece"])
def test_long_headers_are_refused(end: bytes) -> None:
    with served(Impatient) as address, socket.create_connection(address, timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 18) + end)
        assert status(client.recv(4096)) == 431


@pytest.mark.parametrize("times_resumed", [0, 1])
def test_a_client_that_takes_no_answer_is_dropped(times_resumed: int) -> None:
    dropped = threading.Event()

    class Watched(Impatient):
        def on_response_complete(self) -> None:
            super().on_response_complete()
            for _ in range(times_resumed):
                self.resume_writing()  # as the loop does when little is left to be read

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            dropped.set()

    with (
        served(Watched, generous) as address,
        socket.create_connection(address, timeout=20) as client,
        capture_logs() as logs,
    ):
        client.sendall(GET)
        assert status(client.recv(100)) == 200
        assert dropped.wait(20)
        assert len(until_closed(client)) < 64 << 20
    assert [log["reason"] for log in logs] == ["unread-answer"]


def test_a_stranger_with_all_the_connections_gets_no_more() -> None:
    with served(Narrow) as address, ExitStack() as opened:
        for _ in range(2):
            opened.enter_context(socket.create_connection(address, timeout=20)).sendall(b"GET")
        with socket.create_connection(address, timeout=20) as another:
            answer = until_closed(another)
    assert problem(answer) == (429, "too-many-connections")
    assert b"retry-after: 1" in answer


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Full, (503, "too-many-connections")), (Blind, (503, "caller-unseen"))],
)
def test_whoever_finds_no_place_or_cannot_be_seen_is_asked_to_come_again(
    kind: type[DeadlineProtocol], expected: tuple[int, str]
) -> None:
    with served(kind) as address, socket.create_connection(address, timeout=20) as client:
        answer = until_closed(client)
    assert problem(answer) == expected
    assert b"retry-after: 1" in answer


def test_there_is_a_place_for_the_own_user_when_there_is_none_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(protocol, "CONNECTIONS_IN_RESERVE", 1)
    with (
        served(FullForOthers, generous) as address,
        socket.create_connection(address, timeout=20) as client,
    ):
        client.sendall(GET)
        assert status(client.recv(100)) == 200
        with socket.create_connection(address, timeout=20) as another:
            assert until_closed(another) == b"", "there is an end to it"


def test_strangers_who_hold_all_connections_are_told_so_and_others_are_still_answered(
    tmp_path: Path,
) -> None:
    token = "f" * 64
    crowded = Service(
        tmp_path,
        MUSTER_REQUIRE_TOKEN="1",  # noqa: S106  a switch
        MUSTER_TOKEN=token,
        MUSTER_CONNECTIONS_AT_ONCE="10000",
    )
    crowded.start()
    shown = {"Authorization": f"Bearer {token}"}
    address = ("127.0.0.1", crowded.port)
    with (
        httpx.Client(base_url=crowded.url, headers=shown, timeout=20) as client,
        ExitStack() as idle,
    ):
        client.get("/jobs").raise_for_status()
        for _ in range(protocol.CONNECTIONS_TOGETHER - 1):
            idle.enter_context(socket.create_connection(address, timeout=20))
        with socket.create_connection(address, timeout=20) as another:
            assert problem(until_closed(another)) == (503, "too-many-connections")
        client.get("/jobs").raise_for_status()
    crowded.end(signal.SIGKILL)


def test_who_asks_again_before_the_answer_is_answered_once(service: Service) -> None:
    answers = service.raw(GET * 100)
    assert answers.count(b"HTTP/1.1 ") == 1
    assert b"connection: close" in answers
    assert status(answers) == 200


def test_a_stray_line_end_during_an_answer_does_not_end_it() -> None:
    begun = threading.Event()

    async def slow(_scope: Scope, _receive: Receive, send: Send) -> None:
        begun.set()
        await asyncio.sleep(3 * Impatient.receipt_seconds)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    with (
        served(Impatient, slow) as address,
        socket.create_connection(address, timeout=20) as client,
    ):
        client.sendall(GET)
        assert begun.wait(20)
        client.sendall(b"\r\n")
        assert status(client.recv(4096)) == 204


def test_an_answer_that_waits_is_the_only_one_and_learns_that_its_client_has_left() -> None:
    asked: list[str] = []
    left = threading.Event()

    async def listening(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await silent(scope, receive, send)
        left.set()

    with served(Impatient, listening) as address:
        with socket.create_connection(address, timeout=20) as client, suppress(OSError):
            for _ in range(8):
                client.sendall(GET * 1000)
        assert left.wait(20)
    assert asked == ["/livez"]


@pytest.mark.parametrize(
    "body",
    [b"Content-Length: 2\r\n\r\n{}", b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"],
)
def test_a_body_that_comes_with_an_upgrade_is_refused_and_not_lost(
    service: Service, body: bytes
) -> None:
    answer = service.raw(UPGRADING.replace(b"GET", b"POST") + body)
    assert problem(answer) == (400, "upgrade-refused")


def test_an_upgrade_without_a_body_is_passed_over(service: Service) -> None:
    for no_body in (b"\r\n", b"Content-Length: 0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=20) as client:
            client.sendall(UPGRADING + no_body)
            assert status(client.recv(4096)) == 200


def test_what_is_not_http_is_refused_and_told(service: Service) -> None:
    answer = service.raw(b"\x16\x03\x01 hello\r\n\r\n")
    assert problem(answer) == (400, "bad-request")
    request_id = json.loads(answer.partition(b"\r\n\r\n")[2])["request_id"]
    log = service.log.read_text()
    assert "Invalid HTTP request" not in log, "uvicorn does not know who it was"
    (line,) = [line for line in log.splitlines() if request_id in line]
    told = json.loads(line)
    assert (told["action"], told["reason"]) == ("connection_refused", "bad-request")
    assert told["caller"].startswith("uid:")


def test_nobody_from_elsewhere_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    monkeypatch.setattr(protocol, "user_of", lambda *ends: looks.append(ends))
    for client, server in [
        (("192.0.2.7", 1), ("192.0.2.1", 2)),
        (("2001:db8::7", 1), ("2001:db8::1", 2)),
    ]:
        assert uid_between(client, server) is None
    assert not looks
    for host in ("127.0.0.1", "::1", "192.0.2.1"):
        uid_between((host, 1), (host, 2))
    assert len(looks) == 3


def uid_between(client: tuple[str, int], server: tuple[str, int]) -> int | None:
    """Return whom the protocol takes a connection for."""
    connection = DeadlineProtocol.__new__(DeadlineProtocol)
    connection.client, connection.server = client, server
    look: Callable[[], int | None] = connection._caller_uid  # noqa: SLF001  asks no socket
    return look()
