"""How many jobs per second an installation accepts, each durable before its response.

One job holds the only slot, so the others wait and only services and clients run. The clients give
each job a key; at the end every acknowledged job must exist exactly once.
"""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stress.load.client import Connection, port_of
from stress.load.figures import Figure, at_least, none_of, p99_ms
from tests.support.installation import Installation, Seen
from tests.support.postgres_server import running_server

SUBMISSIONS_GOAL = 300.0
"""A second."""

CLIENTS = 32

WHAT = f"durable submissions/s of {CLIENTS} clients on"


def sqlite_figures(root: Path, seconds: float) -> Iterator[Figure]:
    """Flood an installation on SQLite."""
    with _installation(root) as installation:
        flood = Flood(port_of(installation.url), seconds)
        flood.run()
        yield at_least(f"{WHAT} SQLite", flood.rate, SUBMISSIONS_GOAL, "")
        yield from _told(flood, installation)


def postgres_figures(root: Path, seconds: float) -> Iterator[Figure]:
    """Flood an installation on PostgreSQL, if a server is available."""
    try:
        with (
            running_server() as server,
            server.database("load") as url,
            _installation(root, MUSTER_DATABASE_URL=url) as installation,
        ):
            flood = Flood(port_of(installation.url), seconds)
            flood.run()
            yield Figure(f"{WHAT} PostgreSQL", f"{flood.rate:.0f}")
            yield from _told(flood, installation)
    except pytest.skip.Exception as reason:
        yield Figure("submissions on PostgreSQL", f"not measured: {reason}")


@contextmanager
def _installation(root: Path, **environment: str) -> Iterator[Installation]:
    root.mkdir()
    with Installation(root, MUSTER_SLOTS="1", **environment) as installation:
        holder = installation.submit(world_size=1, command=["sleep", "3600"])
        installation.wait_until(holder, lambda seen: seen["status"] == "RUNNING")
        yield installation
        installation.end_jobs()
        installation.coordinator.end(signal.SIGINT)  # allow every request from here on


def _told(flood: "Flood", installation: Installation) -> Iterator[Figure]:
    yield Figure("  their answers, p99", f"{p99_ms(flood.waits):.0f} ms")
    yield none_of("  refused, lost or duplicated", [*flood.faults, *_astray(flood, installation)])


def _astray(flood: "Flood", installation: Installation) -> Iterator[str]:
    """Yield one sentence per lost or duplicate job; a job is named by its key."""
    stored: dict[str, list[str]] = {}
    for job in _stored(installation):
        stored.setdefault(job["name"], []).append(job["job_id"])
    for key, job_id in flood.acknowledged.items():
        if stored.get(key) != [job_id]:
            yield f"{key} was answered with {job_id}, and there are {stored.get(key, [])}"
    yield from (f"no client submitted {key}" for key in stored.keys() - flood.acknowledged.keys())


def _stored(installation: Installation) -> Iterator[Seen]:
    """Yield all jobs page by page, except the one without a name that holds the slot."""
    path = "/jobs?limit=1000"
    while path:
        answer = installation.request("GET", path)
        yield from (job for job in answer.json()["jobs"] if job["name"])
        path = answer.links.get("next", {}).get("url", "")


class Flood:
    """Clients that submit one job after the other."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self.seconds = seconds
        self.waits: list[float] = []
        """Seconds of each acknowledged request."""
        self.acknowledged: dict[str, str] = {}
        """Ids of jobs by their keys."""
        self.faults: list[str] = []

    @property
    def rate(self) -> float:
        """Jobs a second."""
        return len(self.waits) / self.seconds

    def run(self) -> None:
        """Submit as fast as possible until the time is over; wait for all responses."""
        began = time.perf_counter()
        clients = [
            threading.Thread(target=self._submit, args=(number, began + self.seconds))
            for number in range(CLIENTS)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        self.seconds = time.perf_counter() - began

    def _submit(self, client: int, end: float) -> None:
        try:
            with Connection(self._port) as connection:
                number = 0
                while time.perf_counter() < end:
                    number += 1
                    self._submit_one(connection, f"client-{client}-{number}")
        except OSError as error:
            self.faults.append(f"client {client} was left alone: {error!r}")

    def _submit_one(self, connection: Connection, key: str) -> None:
        body = {"command": ["true"], "world_size": 1, "name": key}
        answer = connection.post("/jobs", body, idempotency_key=key)
        if answer.status == 201:
            self.waits.append(answer.seconds)
            self.acknowledged[key] = answer.json()["job_id"]
        else:
            self.faults.append(f"{answer.status} {answer.body.decode()}")
