"""Hostile bytes on a socket, and web pages of another origin, change nothing."""

import json
import os
import re
import socket
import subprocess
import sys

import httpx
import pytest

from tests.integration.api.service import Service

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


def count_jobs(client: httpx.Client) -> str:
    return client.get("/jobs").headers["x-total-count"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:1234"}, 201),
        ({"Host": "[::1]:8000"}, 201),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost"}, 201),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/json; charset=utf-8"}, 201),
        ({"X_Forwarded_For": "10.1.2.3"}, 201),
    ],
)
def test_headers_decide_about_a_request(
    service: Service, headers: dict[str, str], expected: int
) -> None:
    assert status(service.raw(post(b'{"world_size": 1}', **headers))) == expected


HOSTS = [
    *["", "evil.example", "localhost.evil.example", "evil.localhost", "localhost.", "[::]"],
    *["localhost:999999", "localhost@evil.example", "evil.example@localhost", "local host"],
    *["127.0.0.1.evil.example", "127.0.0.2", "127.1", "2130706433", "0.0.0.0"],  # noqa: S104
]
ORIGINS = [
    *["null", "http://evil.example", "http://localhost:1", "http://127.0.0.1"],
    *["http://localhost.evil.example", "http://localhost@evil.example"],
    *["http://evil.example/localhost", "null, http://localhost", "http://", "http://["],
    *["file://", "chrome-extension://localhoster", "javascript:localhost"],
]
FETCHES = [
    *[("cross-site", "no-cors"), ("cross-site", "cors"), ("cross-site", "navigate")],
    *[("same-site", "cors"), ("tomorrow-site", "cors")],
]
CONTENTS = [
    *["", "text/plain", "text/json", "text/plain; application/json", "application/jsonp"],
    *["application/x-www-form-urlencoded", "multipart/form-data; boundary=x"],
    *["application/ld+json", "application/yaml"],
]
FROM_A_PAGE = [
    *[{"Host": host} for host in HOSTS],
    *[{"Origin": origin} for origin in ORIGINS],
    *[{"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode} for site, mode in FETCHES],
    *[{"Content_Type": content} for content in CONTENTS],
]


@pytest.mark.parametrize("headers", FROM_A_PAGE)
def test_a_page_of_another_origin_changes_nothing(
    service: Service, client: httpx.Client, headers: dict[str, str]
) -> None:
    before = count_jobs(client)
    assert status(service.raw(post(b'{"world_size": 1}', **headers))) in {400, 403, 415}
    assert count_jobs(client) == before


def test_a_page_of_another_origin_may_link_but_not_read(client: httpx.Client) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    for mode, expected in [("navigate", 200), ("no-cors", 403)]:
        answer = client.get("/jobs", headers=foreign | {"Sec-Fetch-Mode": mode})
        assert answer.status_code == expected


@pytest.mark.parametrize(
    "more",
    [
        "Host: localhost",
        "Origin: null\r\norigin: http://localhost",
        "Content-Type: a/b",
        "Idempotency-Key: a\r\nIdempotency-Key: b",
        "Authorization: Bearer a\r\nAuthorization: Bearer b",
        "Content-Length: +5",
        "Content-Length: -5",
        "Content-Length: 5_0",
        "Content-Length:",
        "Content-Length: 6",
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: identity",
    ],
)
def test_an_ambiguous_request_is_refused(service: Service, client: httpx.Client, more: str) -> None:
    before = count_jobs(client)
    sent = post(b'11\r\n{"world_size": 1}\r\n0\r\n\r\n')
    if more.startswith("Content-Length: ") and not more.endswith("6"):
        sent = re.sub(rb"Content-Length: \d+", more.encode(), sent)
    else:
        sent = sent.replace(b"\r\n\r\n", f"\r\n{more}\r\n\r\n".encode(), 1)
    assert status(service.raw(sent)) == 400
    assert count_jobs(client) == before


def test_a_long_body_is_refused_by_its_length(service: Service) -> None:
    answer = service.raw(post(b"", Content_Length=str(200 << 20)))
    assert status(answer) == 413
    assert b"content-type: application/problem+json" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "/problems/body-too-large"


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


def test_long_headers_in_one_piece_are_refused(service: Service) -> None:
    padding = b"X-Padding: " + b"x" * (130 << 10) + b"\r\n"
    assert status(service.raw(GET + padding + b"\r\n")) in {400, 431}


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
    service.raw(post(b"{}", "/jobs/nobody/stop", X_Request_ID="of-mine"))
    (line,) = [line for line in service.log.read_text().splitlines() if "of-mine" in line]
    logged = json.loads(line)
    assert (logged["action"], logged["status"]) == ("request_answered", 404)
    assert (logged["path"], logged["caller"]) == ("/jobs/nobody/stop", f"uid:{os.geteuid()}")


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


def test_unknown_paths_and_methods_are_problems(client: httpx.Client) -> None:
    answers = [client.get("/nothing"), client.put("/jobs"), client.get("/jobs/")]
    assert [answer.status_code for answer in answers] == [404, 405, 404]
    assert {answer.headers["content-type"] for answer in answers} == {"application/problem+json"}


UNKNOWN = [
    *[("GET", f"/jobs/unknown{path}") for path in ("", "/summary", "/logs", "/logs/stream")],
    *[("GET", f"/jobs/unknown/{name}") for name in ("events", "workers", "audit", "incarnations")],
    *[("POST", f"/jobs/unknown/{change}") for change in ("pause", "resume", "workers/0/leave")],
    *[("POST", "/jobs/unknown/stop"), ("DELETE", "/jobs/unknown")],
    *[("GET", "/jobs/%00..%ff"), ("GET", "/jobs/" + "x" * 5000)],
]


@pytest.mark.parametrize(("method", "path"), UNKNOWN)
def test_an_unknown_job_is_not_found(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/job-not-found")
