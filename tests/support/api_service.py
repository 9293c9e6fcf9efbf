"""A real service on a free port, and a stand-in for the coordinator that moves its rows."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from database.engine import Database
from database.fenced_writer import FencedWriter
from database.jobs import Jobs
from database.leases import Leases
from database.records import Job, JobChange, JobWrite, RankRecord, utc_now
from muster.contracts.job.status import JobId, JobStatus, Reason
from muster.contracts.settings.paths import DataDir
from muster.host.processes import this_process
from tests.support.logs import JobLogs

DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.02


class Service:
    """`python -m api` with a data directory of its own."""

    def __init__(self, root: Path, **environment: str) -> None:
        self.root = root
        self._more = environment
        self.files = DataDir(root / "data")
        self.log = root / "api.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            **os.environ,
            "MUSTER_DATA_DIR": str(self.files.root),
            "MUSTER_PORT": str(self.port),
            "CHECKPOINT_DIR": str(self.root / "checkpoints"),
            "DATASET_DIR": str(self.root / "shards"),
            **self._more,
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.files.root}/muster.db"

    def start(self) -> None:
        already = len(self.log.read_text()) if self.log.exists() else 0
        with self.log.open("ab") as log:  # a pipe that is never read would fill up
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "api"],
                cwd=self.root,
                env=dict(self.environment),
                stderr=log,
            )
        deadline = time.monotonic() + DEADLINE_SECONDS
        listening = re.compile(r"listens on https?://[0-9.]+:(\d+)")
        while not (found := listening.search(self.log.read_text(), already)):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, "the service does not start"
            time.sleep(POLL_SECONDS)
        self.port = int(found[1])

    def end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(timeout=DEADLINE_SECONDS)
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
        self._database = database
        self.take_office()

    def take_office(self) -> None:
        self.lease = self.leases.take("stand-in", this_process(), "127.0.0.1:1", displacing=None)
        self._writer = FencedWriter(self._database, self.lease)

    def resign(self) -> None:
        self.leases.release(self.lease)

    def write(self, job_id: str, **rows: Sequence[object]) -> None:
        """Write rows beside a job that stays as it is."""
        change = _unchanged(self.jobs.get(JobId(job_id)))
        self._writer.commit([JobWrite(change=change, **rows)])

    def move(
        self,
        job_id: str,
        *path: JobStatus,
        workers: tuple[RankRecord, ...] = (),
        exit_code: int = 0,
        message: str | None = None,
        reason: Reason | None = None,
    ) -> None:
        for status in path or (self.jobs.get(JobId(job_id)).status,):
            job = self.jobs.get(JobId(job_id))
            change = replace(_unchanged(job), status=status, message=message or job.message)
            change = replace(change, reason=reason or job.reason)
            if status in {JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.STOPPED}:
                change = replace(change, finished_at=utc_now(), exit_code=exit_code)
            self._writer.commit([JobWrite(change=change, ranks=workers)])

    def end(self, job_id: str) -> None:
        """Bring a job to its end from wherever it is."""
        job = self.jobs.find(JobId(job_id))
        if job is not None and not job.is_terminal:
            queued = job.status is JobStatus.QUEUED
            self.move(job_id, *([] if queued else [JobStatus.STOPPING]), JobStatus.STOPPED)

    def run(self, job_id: str, *workers: RankRecord) -> None:
        self.move(job_id, JobStatus.STARTING, JobStatus.RUNNING, workers=workers)


class Agent:
    """Writes the logs of any job, as an agent does."""

    def __init__(self, files: DataDir) -> None:
        self._files = files

    def write(
        self,
        job_id: str,
        rank: int,
        text: str,
        *,
        at_micros: int | None = None,
        attempt: int = 0,
    ) -> None:
        logs = JobLogs(self._files.job(job_id))
        logs.write(rank, text, at_micros=at_micros, attempt=attempt)


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
    )
