"""Long polls: answered once the status is reached, without holding a thread."""

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from muster.contracts.job.status import JobStatus
from tests.support.api_service import DEADLINE_SECONDS, POLL_SECONDS, Service, StandIn

MORE_THAN_THREADS = 60
"""The server has 40 threads for its routes."""


def test_a_reached_status_is_answered_at_once(
    client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    assert client.get(f"/jobs/{job}?wait=60&until=QUEUED").json()["status"] == "QUEUED"
    stand_in.move(job, JobStatus.STOPPED)
    for until in ("", "&until=terminal", "&until=running", "&until=RUNNING,PAUSED"):
        assert client.get(f"/jobs/{job}?wait=60{until}").json()["is_terminal"]


def test_a_timed_out_wait_returns_the_job_as_it_is(client: httpx.Client, job: str) -> None:
    assert client.get(f"/jobs/{job}?wait=0.2").json()["status"] == "QUEUED"


def test_many_waits_do_not_block_other_requests(
    service: Service, client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    waiting = threading.Barrier(MORE_THAN_THREADS + 1)

    def wait() -> str:
        waiting.wait(60)
        answer = httpx.get(f"{service.url}/jobs/{job}?wait=60&until=RUNNING", timeout=70)
        return str(answer.json()["status"])

    with ThreadPoolExecutor(MORE_THAN_THREADS) as people:
        asked = [people.submit(wait) for _ in range(MORE_THAN_THREADS)]
        waiting.wait(60)
        for _ in range(5):
            assert client.get(f"/jobs/{job}").json()["status"] == "QUEUED"
        stand_in.run(job)
        assert {one.result() for one in asked} == {"RUNNING"}


def test_the_end_or_deletion_of_a_job_ends_every_wait(
    service: Service, client: httpx.Client, stand_in: StandIn, job: str
) -> None:
    stand_in.run(job)
    with ThreadPoolExecutor(1) as person:
        asked = person.submit(httpx.get, f"{service.url}/jobs/{job}?wait=60", timeout=70)
        stand_in.move(job, JobStatus.FAILED)
        assert asked.result().json()["status"] == "FAILED"
    client.delete(f"/jobs/{job}").raise_for_status()


def test_a_wait_does_not_delay_shutdown(service: Service, client: httpx.Client, job: str) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=20) as waiting:
        head = f"GET /jobs/{job}?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        waiting.sendall(head.encode())
        client.get("/health").raise_for_status()  # the server has read what was sent before
        assert service.end(signal.SIGTERM) == 0
        assert waiting.recv(65536).startswith(b"HTTP/1.1 200")
    service.start()


def test_a_disconnected_client_frees_its_slot(tmp_path: Path) -> None:
    token = "f" * 64
    narrow = Service(tmp_path, MUSTER_TOKEN=token, MUSTER_REQUESTS_AT_ONCE="1")
    narrow.start()
    shown = {"Authorization": f"Bearer {token}"}
    with httpx.Client(base_url=narrow.url, headers=shown, timeout=DEADLINE_SECONDS) as client:
        client.post("/jobs", json={"job_id": "a"}).raise_for_status()
        with pytest.raises(httpx.ReadTimeout):
            client.get("/jobs/a?wait=60", timeout=0.5)
        deadline = time.monotonic() + DEADLINE_SECONDS
        while client.get("/jobs/a").status_code == 429:
            assert time.monotonic() < deadline
            time.sleep(POLL_SECONDS)
    narrow.end(signal.SIGKILL)
