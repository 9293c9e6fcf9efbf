"""How many jobs a second an installation accepts, each of them durable before its answer.

One job holds the only slot, so that the others wait: nothing runs but services and clients. The
clients know each of their jobs by a key, and when the time is over every acknowledged one must be
there, once.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from installation import Installation
from load_client import Connection, port_of, post
from load_figures import Figure, at_least, none_of, p99_ms
from postgres_server import running_server

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
    """Flood an installation on PostgreSQL, where there is a server."""
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


def _told(flood: "Flood", installation: Installation) -> Iterator[Figure]:
    # One more than the clients': that which holds the slot.
    total = int(installation.request("GET", "/jobs?limit=1").headers["X-Total-Count"]) - 1
    faults = [*flood.faults]
    if total != len(flood.waits):
        faults.append(f"{total} jobs for {len(flood.waits)} answers")
    yield Figure("  their answers, p99", f"{p99_ms(flood.waits):.0f} ms")
    yield none_of("  refused, lost or there twice", faults)


class Flood:
    """Clients that submit one job after the other."""

    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self.seconds = seconds
        self.waits: list[float] = []
        """How long each acknowledged one took."""
        self.faults: list[str] = []

    @property
    def rate(self) -> float:
        """Jobs a second."""
        return len(self.waits) / self.seconds

    def run(self) -> None:
        """Submit as fast as it goes, until the time is over and all have their answers."""
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
        body = {"command": ["true"], "world_size": 1}
        with Connection(self._port) as connection:
            number = 0
            while time.perf_counter() < end:
                number += 1
                key = f"client-{client}-{number}"
                answer, seconds = connection.timed(post("/jobs", body, idempotency_key=key))
                if answer.status == 201:
                    self.waits.append(seconds)
                else:
                    self.faults.append(f"{answer.status} {answer.body.decode()}")
