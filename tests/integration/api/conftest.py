"""A real service on a free port, and a stand-in for the coordinator that moves its rows."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from muster.contracts.job import JobId, JobStatus
from muster.contracts.layout import TIME_MARK, DataDirectory
from muster.processes import myself
from store.clock import utc_now
from store.database import Database
from store.jobs import Jobs
from store.leases import Leases
from store.records import Job, JobChange, Worker
from store.tenure import Tenure

DEADLINE_SECONDS = 20.0


class Service:
    """`python -m api` with a data directory of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = DataDirectory(root / "data")
        self.process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "MUSTER_DATA_DIR": str(self.files.root),
            "MUSTER_PORT": str(self.port),
            "CHECKPOINT_DIR": str(self.root / "checkpoints"),
            "DATASET_DIR": str(self.root / "shards"),
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.files.root}/muster.db"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "api"],
            cwd=self.root,
            env=dict(self.environment),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "listening on" in line:
                self.port = int(line.rpartition(":")[2])
                return
        raise AssertionError("the service did not start")

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        assert self.process.stderr is not None
        self.process.send_signal(number)
        code = self.process.wait(timeout=DEADLINE_SECONDS)
        self.process.stderr.close()
        self.process = None
        return code

    def raw(self, request: bytes) -> bytes:
        """Send bytes as they are; return all that comes back until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=DEADLINE_SECONDS) as client:
            client.sendall(request)
            return b"".join(iter(lambda: client.recv(65536), b""))


class StandIn:
    """Holds the coordinator's lease and writes what a coordinator would."""

    def __init__(self, database: Database) -> None:
        self.jobs = Jobs(database)
        self.leases = Leases(database)
        self.lease = self.leases.take(
            "coordinator", "stand-in", myself(), "127.0.0.1:1", displacing=None
        )
        self._tenure = Tenure(database, self.lease)

    def move(
        self, job_id: str, *path: JobStatus, workers: tuple[Worker, ...] = (), exit_code: int = 0
    ) -> None:
        for status in path or (self.jobs.get(JobId(job_id)).status,):
            job = self.jobs.get(JobId(job_id))
            change = replace(_unchanged(job), status=status)
            if status in {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.STOPPED}:
                change = replace(change, finished_at=utc_now(), exit_code=exit_code)
            self._tenure.commit([change], {job.job_id: workers}, {}, renewing=True)

    def run(self, job_id: str, *workers: Worker) -> None:
        self.move(job_id, JobStatus.STARTING, JobStatus.RUNNING, workers=workers)


class Writer:
    """Writes a rank's log and its time index, as an agent does."""

    def __init__(self, files: DataDirectory, job_id: str, rank: int, incarnation: int = 0) -> None:
        job = files.job(job_id)
        job.logs.mkdir(parents=True, exist_ok=True)
        self._log = job.log(rank, incarnation)
        self._times = job.times(rank, incarnation)
        self._log.touch()

    def write(self, text: str, at_micros: int | None = None) -> None:
        with self._log.open("ab") as file:
            file.write(text.encode())
        if at_micros is not None:
            with self._times.open("ab") as file:
                file.write(TIME_MARK.pack(self._log.stat().st_size, at_micros))


def _unchanged(job: Job) -> JobChange:
    return JobChange(
        job_id=job.job_id,
        uid=job.uid,
        status=job.status,
        reason=job.reason,
        message=job.message,
        started_at=job.started_at,
        finished_at=job.finished_at,
        exit_code=job.exit_code,
        generation=job.generation,
        agent=job.agent,
        agent_token_sha256=job.agent_token_sha256,
    )


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    running = Service(tmp_path)
    running.start()
    yield running
    if running.process is not None:
        running.end(signal.SIGKILL)


@pytest.fixture
def stand_in(service: Service) -> Iterator[StandIn]:
    database = Database.open(service.database_url)
    yield StandIn(database)
    database.close()


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=DEADLINE_SECONDS) as opened:
        yield opened


def wait_until(condition: object) -> None:
    """Return when `condition()` is true; fail after a generous deadline."""
    assert callable(condition)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


@pytest.fixture
def write(service: Service) -> object:
    def writing(
        job_id: str, rank: int, text: str, *, at_micros: int | None = None, incarnation: int = 0
    ) -> None:
        Writer(service.files, job_id, rank, incarnation).write(text, at_micros)

    return writing
