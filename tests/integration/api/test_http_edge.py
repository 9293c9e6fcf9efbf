"""Hostile bytes on a socket, and how requests are logged."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from http.client import HTTPResponse

import httpx
import pytest

from tests.support.api_service import Service

STATUS = re.compile(rb"HTTP/1.1 (\d{3})")
GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n"


def post(body: bytes, path: str = "/jobs", **headers: str) -> bytes:
    """Return the bytes of a POST that asks the server to close the connection."""
    fields = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Connection": "close",
        "Content-Length": str(len(body)),
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


def status(answer: bytes) -> int:
    found = STATUS.match(answer)
    assert found, answer[:200]
    return int(found[1])


def test_a_body_without_a_length_is_refused_at_the_limit(service: Service) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = post(b"", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as sender:
        sender.sendall(head)
        try:
            for _ in range(200 << 4):
                sender.sendall(chunk)
        except OSError:
            return  # the server closed the connection
        assert status(sender.recv(4096)) == 413


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"], ids=["endless", "complete"])
def test_long_headers_are_refused(service: Service, end: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as client:
        try:
            client.sendall(GET + b"X: " + b"x" * (1 << 20) + end)
            answer = client.recv(4096)
        except OSError:
            return  # the server closed the connection
        assert answer == b"" or status(answer) in {400, 431}


@pytest.mark.parametrize(
    "body",
    [
        b'{"name": "\xff"}',
        b"[" * 200_000,
        b'{"a":' * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
    ids=["encoding", "deep list", "deep object", "long number"],
)
def test_a_body_that_cannot_be_decoded_is_refused(service: Service, body: bytes) -> None:
    assert status(service.raw(post(body))) == 400


def test_invalid_json_is_refused_with_its_line(client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}
    answer = client.post("/jobs", content='{"world_size": 2,\n "command": [x]}', headers=headers)
    assert answer.json()["detail"].endswith("at line 2, column 14")


LINES = b"\n" * 1000 + b'{"world_size": 0}'
KEPT_POST = post(LINES).replace(b"Connection: close\r\n", b"")
FIELDS = GET + b"a:\r\n" * 99


@pytest.mark.parametrize(
    "before", [b"", FIELDS + b"\r\n", KEPT_POST], ids=["first", "after a request", "after a body"]
)
def test_a_101st_header_field_is_refused_as_it_arrives(service: Service, before: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as client:
        client.sendall(before)
        if before:
            answer = HTTPResponse(client)
            answer.begin()
            assert answer.status in {200, 422}
            answer.read()
        client.sendall(FIELDS + b"b")
        client.sendall(b":\r\n")
        assert status(client.recv(65536)) == 431


def test_the_lines_of_a_body_are_no_header_fields(service: Service) -> None:
    answers = service.raw(KEPT_POST * 2 + post(LINES))
    assert answers.count(b"HTTP/1.1 422") == 3


@pytest.mark.parametrize("length", ["Content-Length", "Transfer-Encoding"])
def test_a_refused_body_is_not_read_to_its_end(service: Service, length: str) -> None:
    sent, limit = 0, 64 << 20
    value = {"Content-Length": str(1 << 40), "Transfer-Encoding": "chunked"}[length]
    head = f"POST /jobs HTTP/1.1\r\nHost: evil.example\r\n{length}: {value}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as client:
        client.sendall(head.encode())
        assert b"403" in client.recv(4096)
        with suppress(ConnectionError):
            while sent < limit:
                sent += client.send(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
    assert sent < limit


def test_what_is_not_http_is_refused(service: Service) -> None:
    assert status(service.raw(b"\x16\x03\x01 hello\r\n\r\n")) == 400


def test_pipelined_requests_are_answered_in_order(service: Service) -> None:
    answers = service.raw((GET + b"\r\n") * 20 + GET + b"Connection: close\r\n\r\n")
    assert answers.count(b"HTTP/1.1 200") == 21


@pytest.mark.parametrize(
    "sent",
    [
        post(b'{"world_size": 0}'),
        post(b"", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
        + b'11\r\n{"world_size": 0}\r\n0\r\n\r\n',
    ],
    ids=["length", "chunked"],
)
def test_an_upgrade_does_not_lose_the_body(service: Service, sent: bytes) -> None:
    upgrade = b"Connection: close, Upgrade\r\nUpgrade: h2c"
    answer = service.raw(sent.replace(b"Connection: close", upgrade))
    assert status(answer) == 422
    assert b"world_size" in answer


def test_a_refusal_is_logged_with_its_caller(service: Service) -> None:
    service.raw(post(b"{}", Host="evil.example", X_Request_ID="of-a-stranger"))
    (line,) = [line for line in service.log.read_text().splitlines() if "of-a-stranger" in line]
    logged = json.loads(line)
    assert (logged["action"], logged["reason"]) == ("request_refused", "foreign-host")
    caller = f"uid:{os.geteuid()}"
    assert (logged["method"], logged["path"], logged["caller"]) == ("POST", "/jobs", caller)


def test_a_change_is_logged_with_its_caller(service: Service) -> None:
    service.raw(post(b"{}", "/jobs/unknown/stop", X_Request_ID="of-mine"))
    (line,) = [line for line in service.log.read_text().splitlines() if "of-mine" in line]
    logged = json.loads(line)
    assert (logged["action"], logged["status"]) == ("request_answered", 404)
    assert (logged["path"], logged["caller"]) == ("/jobs/unknown/stop", f"uid:{os.geteuid()}")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_a_token_in_a_path_is_masked(service: Service, method: str) -> None:
    text = f"mst_{'0' * 12}_{'5ec7e7' * 10}"
    head = f"{method} /jobs/{text} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    answer = service.raw(head.encode())
    assert status(answer) in {404, 422}
    assert b"/jobs/mst_[secret]" in answer
    assert "5ec7e7" not in answer.decode() + service.log.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_another_user_of_this_machine_is_refused(service: Service) -> None:
    script = (
        "import encodings.idna, os, socket; os.setuid(65534);"
        f"client = socket.create_connection(('127.0.0.1', {service.port}));"
        "client.sendall(b'GET /jobs HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n');"
        "print(client.recv(4096).decode())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=20, check=True
    )
    assert status(answer.stdout) == 401
