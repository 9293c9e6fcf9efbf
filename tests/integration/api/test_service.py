"""The service as a client meets it: a real process, a real socket, and hostile bytes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from integration.api.service import Agent, Service, StandIn
from starlette.types import Receive, Scope, Send

from api.protocol import DeadlineProtocol
from muster.contracts.job import JobId, JobStatus, StopRequest
from store.records import Worker

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


def test_a_world_size_alone_is_enough(client: httpx.Client) -> None:
    answer = client.post("/jobs", json={"world_size": 4})
    job = answer.json()
    assert answer.status_code == 201
    assert answer.headers["location"] == f"/jobs/{job['job_id']}"
    assert (job["status"], job["world_size"], job["is_terminal"]) == ("QUEUED", 4, False)
    assert job["created_at"].endswith("Z")
    assert "synthetic" in job["message"]
    assert client.get(answer.headers["location"]).json() == job


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


def test_two_hundred_megabytes_are_refused_by_their_announcement(service: Service) -> None:
    head = post(b"", Content_Length=str(200 << 20))
    assert status(service.raw(head)) == 413


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
    assert status(answer.stdout) == 403


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


@pytest.mark.usefixtures("stand_in")
def test_health_says_whether_a_coordinator_is_there(client: httpx.Client) -> None:
    assert client.head("/health").status_code == 200
    health = client.get("/health").json()
    assert (health["status"], health["checks"]["coordinator"]["status"]) == ("ok", "ok")
    assert health["uptime_seconds"] >= 0


def test_every_request_has_an_id(client: httpx.Client) -> None:
    given = client.get("/nothing", headers={"X-Request-ID": "mine"})
    assert given.headers["x-request-id"] == given.json()["request_id"] == "mine"
    assert len(client.get("/health").headers["x-request-id"]) == 32


def test_the_same_key_creates_one_job(client: httpx.Client) -> None:
    def submit(world_size: int) -> httpx.Response:
        return client.post(
            "/jobs", json={"world_size": world_size}, headers={"Idempotency-Key": "once"}
        )

    first, again, other = submit(1), submit(1), submit(2)
    assert again.json() == first.json()
    assert "idempotency-replayed" not in first.headers
    assert again.headers["idempotency-replayed"] == "true"
    assert other.status_code == 422
    long = client.post("/jobs", json={}, headers={"Idempotency-Key": "k" * 256})
    assert long.status_code == 422


def test_an_id_that_is_taken_is_a_conflict(client: httpx.Client, job: str) -> None:
    answer = client.post("/jobs", json={"job_id": job})
    assert (answer.status_code, answer.json()["type"]) == (409, "/problems/job-exists")


def test_checkpoints_of_an_earlier_job_are_not_resumed_silently(
    service: Service, client: httpx.Client
) -> None:
    (service.root / "checkpoints" / "earlier" / "worker_0").mkdir(parents=True)
    refused = client.post("/jobs", json={"job_id": "earlier"})
    assert refused.status_code == 409
    assert "resume_from" in refused.json()["detail"]
    job = {"mode": "independent", "resume_from": "earlier"}
    assert client.post("/jobs", json=job).status_code == 201
    assert client.post("/jobs", json={"job_id": "earlier", **job}).status_code == 201


def test_pages_follow_each_other_without_loss(client: httpx.Client) -> None:
    wanted = [job["job_id"] for job in client.get("/jobs").json()["jobs"]]
    assert len(wanted) >= 3
    found, path = [], "/jobs?limit=2"
    while path:
        answer = client.get(path)
        found += [job["job_id"] for job in answer.json()["jobs"]]
        assert answer.headers["x-total-count"] == str(len(wanted))
        path = answer.links.get("next", {}).get("url")
    assert found == wanted
    assert client.get("/jobs?cursor=nonsense").status_code == 422
    assert client.get("/jobs?status=RUNING").json()["errors"][0]["hint"]


def test_lists_can_be_asked_for_several_statuses(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    for path in ("/jobs", "/jobs/summaries"):
        found = client.get(path, params={"status": ["RUNNING", "failed"]}).json()["jobs"]
        assert [one["job_id"] for one in found] == [job]
    stand_in.move(job, JobStatus.FAILED)


def test_a_summary_adds_up_what_the_ranks_say(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    ranks = [
        Worker(
            rank=rank,
            incarnation=rank,
            state="live",
            process=stand_in.lease.process,
            step=10,
            total_steps=30,
            throughput_steps_per_sec=5.0,
            loss=0.5 + rank,
        )
        for rank in (0, 1)
    ]
    stand_in.run(job, *ranks)
    found = client.get(f"/jobs/{job}/summary").json()
    keys = ["step", "total_steps", "throughput_steps_per_sec", "eta_seconds", "loss"]
    assert [found[key] for key in keys] == [20, 60, 10.0, 4.0, 1.0]
    assert [worker["worker_id"] for worker in found["workers"]] == ["0.0", "1.1"]
    assert {worker["pid"] for worker in found["workers"]} == {os.getpid()}


def test_stopping_twice_is_stopping_once(client: httpx.Client, stand_in: StandIn, job: str) -> None:
    stand_in.run(job)
    first = client.post(f"/jobs/{job}/stop", json={"grace_seconds": 3})
    again = client.post(f"/jobs/{job}/stop")
    assert first.json() == again.json()
    assert (first.json()["status"], first.json()["stop_requested"]) == ("STOPPING", True)
    kinds = [event["kind"] for event in client.get(f"/jobs/{job}/events").json()["events"]]
    assert kinds.count("stop_requested") == 1
    stand_in.move(job, JobStatus.STOPPING, JobStatus.STOPPED)
    assert client.post(f"/jobs/{job}/stop").json()["status"] == "STOPPED"


def test_a_running_job_is_not_deleted_unless_asked_to(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    refused = client.delete(f"/jobs/{job}")
    assert refused.status_code == 409
    assert f"/jobs/{job}/stop" in refused.json()["detail"]
    assert client.get(f"/jobs/{job}").json()["status"] == "RUNNING"


@pytest.mark.parametrize(
    ("query", "request_made", "logs", "checkpoints"),
    [
        ({"stop_first": True}, StopRequest.GRACEFUL, False, True),
        ({"stop_first": True, "delete_logs": False}, StopRequest.GRACEFUL, True, True),
        ({"force": True}, StopRequest.FORCED, False, False),
    ],
)
def test_deleting_waits_for_the_end(  # noqa: PLR0913, PLR0917  a table and its fixtures
    service: Service,
    client: httpx.Client,
    stand_in: StandIn,
    agent: Agent,
    job: str,
    query: dict[str, bool],
    request_made: StopRequest,
    logs: bool,  # noqa: FBT001  a table's column
    checkpoints: bool,  # noqa: FBT001  a table's column
) -> None:
    agent.write(job, 0, "line\n")
    kept = service.root / "checkpoints" / job
    kept.mkdir(parents=True)
    (kept / "LATEST").write_text("step_1\n")
    stand_in.run(job)
    uid = client.get(f"/jobs/{job}").json()["job_uid"]
    answers = []
    deleting = threading.Thread(
        target=lambda: answers.append(client.delete(f"/jobs/{job}", params=query))
    )
    deleting.start()
    while stand_in.jobs.get(JobId(job)).stop_request is None:
        assert deleting.is_alive()
    assert stand_in.jobs.get(JobId(job)).stop_request is request_made
    stand_in.move(job, JobStatus.STOPPING, JobStatus.STOPPED)
    deleting.join()
    assert answers[0].json() == {
        "job_id": job,
        "deleted": True,
        "logs_deleted": not logs,
        "checkpoints_deleted": not checkpoints,
    }
    root = service.files.job(job).root
    assert not root.exists()
    assert root.with_name(f"{job}.{uid}").exists() is logs
    assert kept.exists() is checkpoints
    assert client.get(f"/jobs/{job}").status_code == 404


def test_without_a_coordinator_nobody_waits_for_an_end(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.resign()
    answers = [
        client.delete(f"/jobs/{job}?stop_first=true"),
        client.post("/jobs/purge?stop_running=true&statuses=STOPPING"),
    ]
    health = client.get("/health").json()
    stand_in.take_office()
    assert [answer.status_code for answer in answers] == [503, 200]
    assert "make up" in answers[0].json()["detail"]
    assert answers[1].json()["skipped"] == [job]
    assert health["status"] == health["checks"]["coordinator"]["status"] == "degraded"


def test_purging_waits_for_those_it_stops(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    answers: list[httpx.Response] = []
    params = {"stop_running": "true", "statuses": "RUNNING"}
    purging = threading.Thread(
        target=lambda: answers.append(client.post("/jobs/purge", params=params))
    )
    purging.start()
    while stand_in.jobs.get(JobId(job)).stop_request is None:
        assert purging.is_alive()
    stand_in.move(job, JobStatus.STOPPING, JobStatus.STOPPED)
    purging.join()
    assert job in answers[0].json()["job_ids"]
    assert client.get(f"/jobs/{job}").status_code == 404


def test_a_link_in_the_place_of_checkpoints_is_not_followed(
    service: Service, client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    precious = service.root / "precious"
    precious.mkdir()
    (service.root / "checkpoints").mkdir(exist_ok=True)
    (service.root / "checkpoints" / job).symlink_to(precious)
    stand_in.move(job, JobStatus.STOPPED)
    assert client.delete(f"/jobs/{job}?force=true").json()["checkpoints_deleted"] is False
    assert precious.is_dir()


def test_purging_skips_what_runs_and_days_win_over_hours(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    over = client.post("/jobs", json={}).json()["job_id"]
    stand_in.move(over, JobStatus.STOPPED)
    stand_in.run(job)
    statuses = ["STOPPED", "RUNNING"]
    young = client.post(
        "/jobs/purge",
        params={"older_than_days": 1, "older_than_hours": 0, "statuses": statuses},
    )
    assert young.json() == {"matched": 0, "deleted": 0, "job_ids": [], "skipped": []}
    found = client.post("/jobs/purge", params={"older_than_hours": 0, "statuses": statuses}).json()
    assert over in found["job_ids"]
    assert job in found["skipped"]
    assert found["matched"] == found["deleted"] + len(found["skipped"])
    assert client.post("/jobs/purge?older_then_days=1").status_code == 422
    assert client.get(f"/jobs/{job}").status_code == 200


def test_the_tail_of_a_log_comes_as_json_or_as_text(
    client: httpx.Client, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "one\ntwo\n", at_micros=1_700_000_000_000_000)
    agent.write(job, 0, "three")
    found = client.get(f"/jobs/{job}/logs", params={"tail": 2}).json()
    assert found == {
        "job_id": job,
        "tail": 2,
        "lines": [
            {"rank": 0, "time": "2023-11-14T22:13:20Z", "line": "two"},
            {"rank": 0, "time": None, "line": "three"},
        ],
    }
    assert client.get(f"/jobs/{job}/logs", params={"rank": 1}).json()["lines"] == []
    assert client.get(f"/jobs/{job}/logs", params={"rank": 2}).status_code == 422
    text = client.get(f"/jobs/{job}/logs", params={"rank": 0}, headers={"Accept": "text/plain"})
    assert text.text == "one\ntwo\nthree\n"


def test_each_operation_is_documented(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    operations = [
        (f"{method} {path}", operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    assert len(operations) >= 12
    assert not [
        name for name in _references(document) if name not in document["components"]["schemas"]
    ]
    identities = [operation["operationId"] for _, operation in operations]
    assert len(set(identities)) == len(identities)
    for name, operation in operations:
        assert list(operation["responses"]["4XX"]["content"]) == ["application/problem+json"], name
        assert operation["summary"], name
        body = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if body:
            assert _examples(document, body["schema"]), name


def _references(document: dict[str, Any]) -> set[str]:
    return set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))


def _examples(document: dict[str, Any], schema: dict[str, Any]) -> object:
    for candidate in [schema, *schema.get("anyOf", [])]:
        name = candidate.get("$ref", "").rpartition("/")[2]
        if name:
            return document["components"]["schemas"][name].get("examples")
    return None


def test_twenty_open_streams_do_not_hold_up_the_end(
    service: Service, stand_in: StandIn, agent: Agent, job: str
) -> None:
    agent.write(job, 0, "line\n")
    stand_in.run(job)
    opened = [socket.create_connection(("127.0.0.1", service.port), 20) for _ in range(20)]
    for stream in opened:
        stream.sendall(f"GET /jobs/{job}/logs/stream HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        received = b""
        while b"data: " not in received:
            received += stream.recv(4096)
    assert service.end(signal.SIGTERM) == 0
    for stream in opened:
        stream.close()
    service.start()


def test_a_taken_port_is_one_sentence(service: Service) -> None:
    found = _refused_start(service, {})
    assert re.fullmatch(r"api: cannot listen on 127\.0\.0\.1 port \d+ .*\n", found)


def test_a_public_address_is_refused(service: Service) -> None:
    assert "tokens" in _refused_start(service, {"MUSTER_HOST": "0.0.0.0"})  # noqa: S104  refused


def test_an_unusable_setting_is_one_sentence(service: Service) -> None:
    assert "MUSTER_PORT" in _refused_start(service, {"MUSTER_PORT": "many"})


def _refused_start(service: Service, changes: dict[str, str]) -> str:
    ended = subprocess.run(
        [sys.executable, "-P", "-m", "api"],
        env=dict(service.environment) | changes,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    return ended.stderr


class _Impatient(DeadlineProtocol):
    receipt_seconds = 0.2


@pytest.fixture
def slow_service() -> Iterator[tuple[str, int]]:
    """The same protocol with a short deadline, in this process."""

    async def answer(_scope: Scope, receive: Receive, _send: Send) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()

    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(
        uvicorn.Config(answer, http=_Impatient, lifespan="off", log_level="critical")
    )
    running = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    running.start()
    yield listener.getsockname()
    server.should_exit = True
    running.join()


def test_a_client_that_never_finishes_its_request_is_dropped(slow_service: tuple[str, int]) -> None:
    for beginning in (b"", b"GET / HT", post(b"{}", Content_Length="100")[:-1]):
        with socket.create_connection(slow_service, timeout=20) as client:
            client.sendall(beginning)
            received = b"".join(iter(lambda: client.recv(4096), b""))
            assert status(received) == 408


def test_headers_without_end_are_refused(slow_service: tuple[str, int]) -> None:
    with socket.create_connection(slow_service, timeout=20) as client:
        client.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 18))
        assert status(client.recv(4096)) == 431
