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
from load_client import Connection, get, port_of, post
from load_figures import Figure, at_least, none_of, p99_ms
from postgres_server import running_server

SUBMISSIONS_GOAL = 300.0
"""A second."""

CLIENTS = 8


def sqlite_figures(root: Path, seconds: float) -> Iterator[Figure]:
    """Flood an installation on SQLite."""
    with _installation(root) as installation:
        rate, *others = _flood(installation, seconds, "SQLite")
        yield at_least(rate.what, float(rate.found), SUBMISSIONS_GOAL, "")
        yield from others


def postgres_figures(root: Path, seconds: float) -> Iterator[Figure]:
    """Flood an installation on PostgreSQL, where there is a server."""
    try:
        with (
            running_server() as server,
            server.database("load") as url,
            _installation(root, MUSTER_DATABASE_URL=url) as installation,
        ):
            yield from _flood(installation, seconds, "PostgreSQL")
    except pytest.skip.Exception as reason:
        yield Figure("submissions on PostgreSQL", f"not measured: {reason}")


@contextmanager
def _installation(root: Path, **environment: str) -> Iterator[Installation]:
    root.mkdir()
    with Installation(root, MUSTER_SLOTS="1", **environment) as installation:
        holder = installation.submit(world_size=1, command=["sleep", "3600"])
        installation.wait_until(holder, lambda seen: seen["status"] == "RUNNING")
        yield installation


def _flood(installation: Installation, seconds: float, kind: str) -> Iterator[Figure]:
    port = port_of(installation.url)
    flood = Flood(port, seconds)
    flood.run()
    # One more than the clients': that which holds the slot.
    with Connection(port) as connection:
        total = int(connection.ask(get("/jobs?limit=1")).headers["x-total-count"]) - 1
    faults = [*flood.faults]
    if total != len(flood.waits):
        faults.append(f"{total} jobs for {len(flood.waits)} answers")
    rate = len(flood.waits) / flood.seconds
    yield at_least(
        f"durable submissions/s on {kind}, {CLIENTS} clients", rate, SUBMISSIONS_GOAL, ""
    )
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
