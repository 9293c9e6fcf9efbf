"""Creation under the requested or a free id, plans, and waiting for a status."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from api import dependencies
from api.access.auth import Unauthorized
from api.errors import ServiceUnavailable
from api.routes.jobs import create, planned
from api.routes.watch import wait_for_status
from api.streams import JobCache, JobState
from api.submission import Submitter
from database.errors import DatabaseUnavailable, JobExists
from database.jobs import NewJob
from database.records import Job
from muster.cluster.description import cluster_of_service
from muster.contracts.job.spec import JobRequest
from muster.contracts.job.status import TERMINAL, JobId, JobStatus, JobUid
from muster.contracts.settings.paths import DataDir
from muster.contracts.settings.services import ServiceSettings
from tests.unit.api.jobs import JOB

pytestmark = pytest.mark.anyio

UID = JobUid("uid")


class Service:
    """The parts of a desk that a submission uses; the clock stands still."""

    def __init__(self, root: Path) -> None:
        environment = {"MUSTER_DATA_DIR": str(root), "CHECKPOINT_DIR": str(root / "ckpt")}
        self.stored: dict[JobId, Job] = {}
        self.app_state = SimpleNamespace(
            jobs=SimpleNamespace(find=self.stored.get),
            submission_queue=SimpleNamespace(store=self._store),
            data_dir=DataDir(root),
            submitter=Submitter(
                settings=ServiceSettings.read(environment, cores=2),
                read_cluster=lambda: cluster_of_service(None, "n-0123456789ab", slots=4),
                working_dir=root,
                clock=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
                random_hex=lambda: "abcdef0123456789",
                checkpoint_dir_of=lambda _: None,
                search_path=None,
            ),
        )

    async def _store(self, new: NewJob) -> Job:
        if new.job_id in self.stored:
            raise JobExists(new.job_id)
        return self.stored.setdefault(new.job_id, replace(JOB, job_id=new.job_id, uid=new.uid))

    def submit(self, job_id: str | None = None) -> Job:
        return asyncio.run(create(JobRequest(job_id=job_id), self.app_state, UID, None, "ada"))


def test_an_id_is_used_once(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.submit("mine")
    with pytest.raises(JobExists):
        service.submit("mine")
    with pytest.raises(JobExists):
        planned(JobRequest(job_id="mine"), service.app_state)


async def never() -> bool:
    return False


async def still_valid() -> None:
    pass


async def test_a_wait_never_returns_an_earlier_job_of_the_same_id() -> None:
    wanted = replace(JOB, uid=JobUid("later"))
    over = replace(wanted, status=JobStatus.COMPLETED)
    seen = [JOB, wanted, DatabaseUnavailable("away"), over]

    def read(_: JobId) -> JobState:
        found = seen.pop(0)
        if isinstance(found, DatabaseUnavailable):
            raise found
        return JobState(found, ())

    moments = iter(range(100))
    glances = JobCache(read, lambda: float(next(moments)))
    desk = SimpleNamespace(job_cache=glances, is_closing=lambda: False)
    request = SimpleNamespace(is_disconnected=never)
    await glances.get(JOB.job_id)
    assert await wait_for_status(desk, request, JOB.job_id, TERMINAL, 20, still_valid) == over


async def test_a_wait_ends_when_its_token_is_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependencies, "IDLE_SECONDS", 0.0)
    answers: list[Exception] = [ServiceUnavailable("away"), Unauthorized("revoked-token", "gone")]

    async def reauthenticate() -> None:
        raise answers.pop(0)

    jobs = JobCache(lambda _: JobState(JOB, ()), lambda: 0.0)
    desk = SimpleNamespace(job_cache=jobs, is_closing=lambda: False)
    request = SimpleNamespace(is_disconnected=never)
    with pytest.raises(Unauthorized):
        await wait_for_status(desk, request, JOB.job_id, TERMINAL, 20, reauthenticate)
    assert not answers, "it goes on while tokens cannot be read"
