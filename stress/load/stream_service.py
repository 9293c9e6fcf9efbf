"""A service pinned to one core, with jobs that appear to run."""

import os
import signal
from pathlib import Path
from typing import Self

import httpx

from database.engine import Database
from database.tokens import Tokens
from muster.contracts.job.status import JobId, JobStatus
from muster.contracts.settings.paths import JobFiles
from muster.contracts.token import Scope
from tests.support.api_service import DEADLINE_SECONDS, Service, StandIn


class StreamService:
    """The service runs on the first core; this process moves to the last one."""

    def __init__(self, root: Path) -> None:
        self.service = Service(root)

    def __enter__(self) -> Self:
        self._cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, self._cores[-1:])
        self.start()
        self._database = Database.open(self.service.database_url)
        self._stand_in = StandIn(self._database)
        self._tokens = Tokens(self._database)
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()
        if self.service.process is not None:
            self.service.end(signal.SIGKILL)
        os.sched_setaffinity(0, self._cores)

    def start(self) -> None:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cores[:1])
        try:
            self.service.start()
        finally:
            os.sched_setaffinity(0, before)

    @property
    def port(self) -> int:
        return self.service.port

    @property
    def pid(self) -> int:
        assert self.service.process is not None
        return self.service.process.pid

    def files(self, job_id: str) -> JobFiles:
        return self.service.files.job(JobId(job_id))

    def run(self, job_id: str) -> None:
        """Submit a job of one rank and mark it as running."""
        fields = {"job_id": job_id, "mode": "independent", "world_size": 1}
        answer = httpx.post(f"{self.service.url}/jobs", json=fields, timeout=DEADLINE_SECONDS)
        answer.raise_for_status()
        self._stand_in.run(job_id)
        self.files(job_id).logs.mkdir(parents=True)

    def finish(self, job_id: str) -> None:
        self._stand_in.move(job_id, JobStatus.COMPLETED)

    def token(self, name: str) -> str:
        """Return a new token that may read everything."""
        return self._tokens.create(name, Scope.READ, lifetime=None, created_by=None)[1]
