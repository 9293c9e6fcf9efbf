"""What makes no sense, is too much or comes from outside is refused: hostile bytes on a socket."""

import json
import os
import re
import socket
import subprocess
import sys

import httpx
import pytest
from integration.api.service import Service

STATUS = re.compile(rb"HTTP/1.1 (\d{3})")


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


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"name": NaN}', 422),
        (b'{"sleep_sec": NaN}', 422),
        (b'{"sleep_sec": Infinity}', 422),
        (b'{"sleep_sec": -1e400}', 422),
        (b'{"seed": true}', 422),
        (b'{"world_size": 4.5}', 422),
        (b'{"world_size": "4"}', 422),
        (b'{"world_size": 0}', 422),
        (b'{"world_size": 99999999999999999999999}', 422),
        (b'{"seed": 9223372036854775808}', 422),
        (b'{"seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"name": "a\\u0000b"}', 422),
        (b'{"name": "\\ud800"}', 422),
        (b'{"\\ud800": 1}', 422),
        (b'{"restart_scope": "all", "command": ["true"]}', 422),
        (b'{"restart_scope": "gang"}', 422),
        (b'{"restart_scope": "gang", "mode": "synchronous"}', 422),
        (b'{"job_id": "../etc"}', 422),
        (b'{"job_id": "summaries"}', 422),
        (b'{"job_id": "a\\n"}', 422),
        (b'{"env": {"A=B": "x"}}', 422),
        (b'{"command": []}', 422),
        (b'{"mode": "both"}', 422),
        (b'{"mode": "synchronous", "command": ["true"]}', 422),
        (b'{"mode": "synchronous", "program": "nowhere.py:Net"}', 422),
        (b'{"mode": "synchronous", "program": "\\u0000.py:Net"}', 422),
        (b'{"mode": "synchronous", "batch_size": 65}', 422),
        (b'{"mode": "synchronous", "virtual_shards": 48}', 422),
        (b'{"mode": "synchronous", "virtual_shards": 0}', 422),
        (b'{"program": "train.py:Net"}', 422),
        (b'{"backend": "pigeon"}', 422),
        (b'{"dataset_dir": "nowhere"}', 422),
        (b'{"working_dir": "nowhere"}', 422),
        (b'{"resume_from": "nobody"}', 422),
        (b'{"wrold_size": 4}', 422),
        (b"{", 422),
        (b"[]", 422),
        (b"null", 422),
        (b"", 422),
        (b'{"name": "\xff"}', 400),
        (b"[" * 200_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"world_size": 2, "world_size": 1}', 422),
    ],
)
def test_what_cannot_be_a_job_is_refused_as_a_problem(
    service: Service, client: httpx.Client, body: bytes, expected: int
) -> None:
    before = client.get("/jobs").headers["x-total-count"]
    answer = service.raw(post(body))
    assert status(answer) == expected
    assert b"content-type: application/problem+json" in answer
    assert client.get("/jobs").headers["x-total-count"] == before


def test_a_misspelt_field_is_answered_with_the_right_one(client: httpx.Client) -> None:
    problem = client.post("/jobs", json={"wrold_size": 4}).json()
    assert isinstance(problem["detail"], str)
    assert problem["errors"][0]["loc"] == ["body", "wrold_size"]
    assert problem["errors"][0]["hint"] == "did you mean 'world_size'?"
    problem = client.get("/jobs", params={"stat": "RUNNING"}).json()
    assert problem["errors"][0]["hint"] == "did you mean 'status'?"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"world_size": 2, "command": ["python", ', "line 1, column 41 (it ends there: "),
        ('{"world_size": 2,\n "command": [python]}', "line 2, column 14 (correct it there, "),
        ('{\n"command": "pyth', "line 2, column 12 (correct it there, "),
        ("world_size: 2", "line 1, column 1 (correct it there, or send YAML as "),
    ],
)
def test_a_body_that_is_no_json_is_answered_with_where_that_begins(
    client: httpx.Client, body: str, said: str
) -> None:
    answer = client.post("/jobs", content=body, headers={"Content-Type": "application/json"})
    problem = answer.json()
    assert (answer.status_code, problem["errors"][0]["loc"]) == (422, ["body"])
    assert problem["detail"].startswith("body: is no JSON: ")
    assert said in problem["detail"]


def test_a_command_in_one_string_is_answered_with_how_to_write_it(client: httpx.Client) -> None:
    problem = client.post("/jobs", json={"command": "python train.py"}).json()
    (error,) = problem["errors"]
    assert error["loc"] == ["body", "command"]
    assert 'such as ["python", "train.py"]' in error["hint"]
    assert '["sh", "-c", ' in error["hint"]
    (other,) = client.post("/jobs", json={"command": ["python", 3]}).json()["errors"]
    assert (other["loc"], other["hint"]) == (["body", "command", 1], None)


def test_two_hundred_megabytes_are_refused_by_their_announcement(service: Service) -> None:
    answer = service.raw(post(b"", Content_Length=str(200 << 20)))
    assert status(answer) == 413
    assert b"content-type: application/problem+json" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["type"] == "/problems/body-too-large"


def test_a_body_without_an_announced_length_is_refused_at_the_limit(service: Service) -> None:
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    head = post(b"", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as sender:
        sender.sendall(head)
        try:
            for _ in range(200 << 4):
                sender.sendall(chunk)
        except OSError:
            return  # closed in our face, which is an answer as well
        assert status(sender.recv(4096)) == 413


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:1234"}, 201),
        ({"Host": "[::1]:8000"}, 201),
        ({"Host": ""}, 403),
        ({"Host": "evil@localhost"}, 403),
        ({"Host": "localhost.evil.example"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost"}, 201),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Type": "application/json; charset=utf-8"}, 201),
        ({"X_Forwarded_For": "10.1.2.3"}, 201),
    ],
)
def test_the_door(service: Service, headers: dict[str, str], expected: int) -> None:
    assert status(service.raw(post(b'{"world_size": 1}', **headers))) == expected


HOSTS = [
    "",
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "evil.localhost",
    "localhost.",
    "localhost:999999",
    "localhost@evil.example",
    "evil.example@localhost",
    "127.0.0.1.evil.example",
    "127.0.0.2",
    "127.1",
    "2130706433",
    "0.0.0.0",  # noqa: S104  a name that a page may use for this machine
    "[::]",
    "local host",
]
ORIGINS = [
    "null",
    "http://evil.example",
    "https://evil.example",
    "http://localhost:1",
    "http://127.0.0.1",
    "http://localhost.evil.example",
    "http://localhost@evil.example",
    "http://evil.example/localhost",
    "null, http://localhost",
    "http://",
    "http://[",
    "file://",
    "chrome-extension://localhoster",
    "javascript:localhost",
]
FETCHES = [
    ("cross-site", "no-cors"),
    ("cross-site", "cors"),
    ("cross-site", "navigate"),
    ("same-site", "cors"),
    ("same-site", "no-cors"),
    ("tomorrow-site", "cors"),
]
CONTENTS = [
    "",
    "text/plain",
    "text/html",
    "text/json",
    "text/plain; application/json",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=x",
    "application/jsonp",
    "application/ld+json",
    "application/json-patch+json",
]
FROM_A_PAGE = [
    *[{"Host": host} for host in HOSTS],
    *[{"Origin": origin} for origin in ORIGINS],
    *[{"Sec_Fetch_Site": site, "Sec_Fetch_Mode": mode} for site, mode in FETCHES],
    *[{"Content_Type": content} for content in CONTENTS],
]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"seed": ' + b"9" * 5000 + b"}", b"a number at byte 10 has more than 4300 digits"),
        (b"[" * 200_000, b"its brackets are nested too deep"),
        (b'{"name": "\xff"}', b"it is no UTF-8 at byte 11"),
        (b'{"seed": 1, "seed": 2}', b"the name seed is given twice"),
    ],
)
def test_of_a_body_that_cannot_be_read_it_is_said_why(
    service: Service, body: bytes, said: bytes
) -> None:
    assert said in service.raw(post(body))


@pytest.mark.parametrize("headers", FROM_A_PAGE)
def test_no_page_of_somebody_else_can_change_anything(
    service: Service, client: httpx.Client, headers: dict[str, str]
) -> None:
    before = client.get("/jobs").headers["x-total-count"]
    assert status(service.raw(post(b'{"world_size": 1}', **headers))) in {400, 403, 415}
    assert client.get("/jobs").headers["x-total-count"] == before


@pytest.mark.parametrize(
    "more",
    [
        "Host: evil.example",
        "Origin: null\r\norigin: http://localhost",
        "Content-Type: a/b",
        "Idempotency-Key: a\r\nIdempotency-Key: b",
    ],
)
def test_what_decides_who_comes_in_or_what_a_job_is_known_by_is_said_once(
    service: Service, more: str
) -> None:
    sent = post(b'{"world_size": 1}').replace(b"\r\n\r\n", f"\r\n{more}\r\n\r\n".encode(), 1)
    answer = service.raw(sent)
    assert status(answer) == 400
    assert b"/problems/header-given-twice" in answer


@pytest.mark.parametrize(
    "announced",
    [
        "Content-Length: +5",
        "Content-Length: -5",
        "Content-Length: 5_0",
        "Content-Length:",
        "Content-Length: 5, 5",
        "Content-Length: 5\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: identity",
    ],
)
def test_how_long_a_body_is_is_said_once_and_in_digits(service: Service, announced: str) -> None:
    answer = service.raw(post(b"").replace(b"Content-Length: 0", announced.encode()) + b"[ 1 ]")
    assert status(answer) == 400
    assert b"/problems/bad-request" in answer


def test_a_page_of_somebody_else_may_link_here_and_not_look(client: httpx.Client) -> None:
    foreign = {"Sec-Fetch-Site": "cross-site"}
    for mode, expected in [("navigate", 200), ("no-cors", 403)]:
        answer = client.get("/jobs", headers=foreign | {"Sec-Fetch-Mode": mode})
        assert answer.status_code == expected


def test_a_refusal_is_in_the_log_with_who_what_and_why(service: Service) -> None:
    service.raw(post(b"{}", Host="evil.example", X_Request_ID="of-a-stranger"))
    (line,) = [line for line in service.log.read_text().splitlines() if "of-a-stranger" in line]
    told = json.loads(line)
    assert (told["action"], told["reason"]) == ("request_refused", "foreign-host")
    assert (told["method"], told["path"], told["caller"]) == (
        "POST",
        "/jobs",
        f"uid:{os.geteuid()}",
    )


def test_a_change_is_in_the_log_with_who_made_it(service: Service) -> None:
    service.raw(post(b"{}", "/jobs/nobody/stop", X_Request_ID="of-mine"))
    (line,) = [line for line in service.log.read_text().splitlines() if "of-mine" in line]
    told = json.loads(line)
    assert (told["action"], told["status"]) == ("request_answered", 404)
    assert (told["path"], told["caller"]) == ("/jobs/nobody/stop", f"uid:{os.geteuid()}")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_of_this_machine_is_turned_away(service: Service) -> None:
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


def test_unknown_paths_and_methods_are_problems_too(client: httpx.Client) -> None:
    answers = [client.get("/nothing"), client.put("/jobs"), client.get("/jobs/")]
    assert [answer.status_code for answer in answers] == [404, 405, 404]
    assert {answer.headers["content-type"] for answer in answers} == {"application/problem+json"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/jobs/nobody"),
        ("GET", "/jobs/nobody/summary"),
        ("GET", "/jobs/nobody/logs"),
        ("GET", "/jobs/nobody/logs/stream"),
        ("GET", "/jobs/nobody/events"),
        ("GET", "/jobs/nobody/workers"),
        ("GET", "/jobs/nobody/audit"),
        ("POST", "/jobs/nobody/pause"),
        ("POST", "/jobs/nobody/resume"),
        ("POST", "/jobs/nobody/workers/0/leave"),
        ("POST", "/jobs/nobody/stop"),
        ("DELETE", "/jobs/nobody"),
        ("GET", "/jobs/%00..%ff"),
        ("GET", "/jobs/" + "x" * 5000),
    ],
)
def test_an_unknown_job_is_not_found(client: httpx.Client, method: str, path: str) -> None:
    answer = client.request(method, path)
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/job-not-found")
