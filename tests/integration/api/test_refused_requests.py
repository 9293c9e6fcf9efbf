"""What makes no sense, is too much or comes from outside is refused: hostile bytes on a socket."""

import re

import httpx
import pytest

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
