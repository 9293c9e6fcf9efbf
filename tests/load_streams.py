"""Streams of logs under load: many readers, a long history, much at once, and a service that ends.

``python tests/load_streams.py`` starts a service on one core and reads from the other. It prints
what was found beside its goal, and exits with 1 if a goal is missed.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import httpx
from integration.api.service import DEADLINE_SECONDS, Service, StandIn
from stream_crowd import Crowd, Reader, line_of

from cli.tables import table
from muster.contracts.job import JobId, JobStatus
from muster.contracts.token import Scope
from store.database import Database
from store.tokens import Tokens

SERVER_CORE = 0
READERS_CORE = 1

STREAMS_PER_TOKEN = 60
"""Of the 64 requests that one caller may have open; the service's limits stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One row of the table."""

    what: str
    found: str
    goal: str = ""
    is_met: bool = True


class Stage:
    """A service on a core of its own, with whoever has to do with it on the other."""

    def __init__(self, root: Path) -> None:
        self.service = Service(root)
        self.start()
        self._database = Database.open(self.service.database_url)
        self.stand_in = StandIn(self._database)
        self._tokens = Tokens(self._database)

    def start(self) -> None:
        with _pinned(SERVER_CORE):
            self.service.start()

    @property
    def pid(self) -> int:
        assert self.service.process is not None
        return self.service.process.pid

    def submit(self, job_id: str) -> Path:
        """Run a job of one rank, as far as anybody can see; return the file of its log."""
        fields = {"job_id": job_id, "mode": "independent", "world_size": 1}
        answer = httpx.post(f"{self.service.url}/jobs", json=fields, timeout=DEADLINE_SECONDS)
        answer.raise_for_status()
        self.stand_in.run(job_id)
        files = self.service.files.job(JobId(job_id))
        files.logs.mkdir(parents=True)
        return files.log(0, 0)

    def finish(self, job_id: str) -> None:
        self.stand_in.move(job_id, JobStatus.COMPLETED)

    def token(self, name: str) -> str:
        return self._tokens.create(name, Scope.READ, lifetime=None, created_by=None)[1]

    def close(self) -> None:
        self._database.close()
        if self.service.process is not None:
            self.service.end(signal.SIGKILL)


@contextmanager
def _pinned(core: int) -> Iterator[None]:
    """Let the processes that are started inside begin, and stay, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class Writer:
    """Writes lines into a log at a steady rate, from another task."""

    def __init__(self, log: Path, lines_per_second: float) -> None:
        self._log = log
        self._pause = 1 / lines_per_second
        self.lines = 0

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        with self._log.open("ab", buffering=0) as log:
            while True:
                log.write(line_of(self.lines).encode())
                self.lines += 1
                due += self._pause
                await asyncio.sleep(due - loop.time())


async def follow(
    stage: Stage, *, clients: int, lines_per_second: float, seconds: float
) -> list[Figure]:
    """Let a crowd follow one job, then end the service under it and start the next."""
    log = stage.submit("followed")
    tokens = [stage.token(f"t{n}") for n in range(-(-clients // STREAMS_PER_TOKEN))]
    readers = [
        Reader(stage.service.port, "/jobs/followed/logs/stream", tokens[n // STREAMS_PER_TOKEN])
        for n in range(clients)
    ]
    writer = Writer(log, lines_per_second)
    began = time.monotonic()
    async with Crowd(readers) as crowd:
        await crowd.until("have no stream", lambda reader: reader.is_open)
        opened = time.monotonic() - began
        cpu = _cpu_seconds(stage.pid)
        writing = asyncio.create_task(writer.run())
        began = time.monotonic()
        await asyncio.sleep(seconds)
        lines = writer.lines
        await crowd.until(f"did not get {lines} lines", lambda reader: reader.lines >= lines)
        share = (_cpu_seconds(stage.pid) - cpu) / (time.monotonic() - began)
        delays = sorted(delay for reader in readers for delay in reader.delays)
        began = time.monotonic()
        code = await asyncio.to_thread(stage.service.end, signal.SIGTERM)
        ended = time.monotonic() - began
        await crowd.until("have a stream", lambda reader: not reader.is_open)
        await asyncio.to_thread(stage.start)
        began = time.monotonic()
        await crowd.until("did not come back", lambda reader: reader.is_open)
        again = time.monotonic() - began
        await asyncio.sleep(1)
        writing.cancel()
        stage.finish("followed")
        await crowd.until("heard no end", lambda reader: reader.has_ended)
    faults = crowd.faults(writer.lines)
    hundredths = quantiles(delays, n=100)
    return [
        Figure(what="all streams open after", found=f"{opened:.2f} s"),
        Figure(what="service's core in use", found=f"{share:.0%}"),
        Figure(what="p50", found=f"{hundredths[49] * 1000:.0f} ms"),
        Figure(
            what="p99",
            found=f"{hundredths[98] * 1000:.0f} ms",
            goal="<= 500 ms",
            is_met=hundredths[98] <= 0.5,
        ),
        Figure(what="max", found=f"{delays[-1] * 1000:.0f} ms"),
        Figure(
            what=f"SIGTERM exit {code}", found=f"{ended:.2f} s", goal="<= 5 s", is_met=ended <= 5
        ),
        Figure(what="all back after", found=f"{again:.2f} s"),
        Figure(what="faults", found="; ".join(faults[:5]) or "none", is_met=not faults),
    ]


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=20)
    asked = parser.parse_args()
    os.sched_setaffinity(0, {READERS_CORE})
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(Path(directory))
        try:
            figures = asyncio.run(
                follow(stage, clients=asked.clients, lines_per_second=20, seconds=asked.seconds)
            )
        finally:
            stage.close()
    print("\n".join(table(("what", "found", "goal"), [(f.what, f.found, f.goal) for f in figures])))  # noqa: T201  what a person asked for
    return int(not all(figure.is_met for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
