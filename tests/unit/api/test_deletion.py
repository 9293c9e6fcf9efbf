"""A delete removes what belongs to its job, and nothing of a later job of the same id."""

import asyncio
import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from api.access.auth import Caller
from api.dependencies import DiskReserve
from api.routes import deletion
from api.routes.deletion import Deletion, delete_all
from database.engine import Database
from database.jobs import Jobs
from database.records import Job
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import Owner
from muster.contracts.job import JobId, JobUid
from muster.contracts.paths import DataDir
from muster.contracts.spec import JobSpec
from muster.contracts.token import Scope
from muster.runtime.archive import claim_directory
from tests.support.checkpoint_ranks import Rank
from tests.support.database_samples import finish, submit

pytestmark = pytest.mark.slow  # a database of its own


async def allow() -> None:
    """The caller still has access."""


UNFORCED = Deletion(
    delete_logs=True,
    force=False,
    delete_checkpoints=False,
    caller=Caller(name="ada", scope=Scope.SUBMIT, is_limited=True),
    reauthenticate=allow,
)
FORCED = replace(UNFORCED, force=True, delete_checkpoints=True)


class StaleJobs(Jobs):
    """`find` may return an earlier job, and `keeping` may run something before it."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.stale: dict[JobId, Job] = {}
        self.meanwhile: list[Callable[[], object]] = []

    @contextmanager
    def keeping(self, job_id: JobId, uid: JobUid) -> Iterator[None]:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        with super().keeping(job_id, uid):
            yield

    def find(self, job_id: JobId) -> Job | None:
        return self.stale.get(job_id) or super().find(job_id)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(f"sqlite:///{tmp_path}/muster.db")
    yield opened
    opened.close()


@pytest.fixture
def desk(database: Database, tmp_path: Path) -> SimpleNamespace:
    data_dir = DataDir(tmp_path / "data")
    reserve = DiskReserve(data_dir.disk_reserve)
    return SimpleNamespace(jobs=StaleJobs(database), data_dir=data_dir, disk_reserve=reserve)


def over(database: Database, desk: SimpleNamespace, uid: str, spec: JobSpec | None = None) -> Job:
    """Return a job that is over and has written a line."""
    job = finish(database, submit(desk.jobs, "a", uid=uid, spec=spec))
    files = desk.data_dir.job(job.job_id)
    claim_directory(files, job.uid)
    files.logs.mkdir()
    files.log(0, 0).write_text(f"by {uid}\n")
    return job


def save(directory: Path, uid: str) -> None:
    """Save as rank 0 of job "a", and begin to as rank 1."""
    owner = Owner(job_id="a", job_uid=uid, rank=0, world_size=2, generation=0)
    rank_dir = directory / "a" / "worker_0"
    Rank(files=LocalFileSystem(), directory=rank_dir, owner=owner).save(1, 2)
    (directory / "a" / "worker_1" / ".step_0000000001.g0000.tmp").mkdir(parents=True)


@pytest.mark.parametrize("is_stale", [False, True])
def test_a_late_delete_spares_the_next_job_of_that_id(
    database: Database, desk: SimpleNamespace, *, is_stale: bool
) -> None:
    old = over(database, desk, "old")
    shutil.rmtree(desk.data_dir.job(old.job_id).root)
    desk.jobs.delete(old.job_id, old.uid)
    new = over(database, desk, "new")
    desk.jobs.stale = {old.job_id: old} if is_stale else {}
    assert asyncio.run(delete_all(desk, [old], UNFORCED, None)) == ({}, [])
    assert desk.data_dir.job(new.job_id).log(0, 0).read_text() == "by new\n"
    assert desk.jobs.get(new.job_id) == new


@pytest.mark.parametrize("resume_from", [None, "a"])
def test_a_late_forced_delete_spares_the_next_jobs_checkpoints(
    database: Database, desk: SimpleNamespace, tmp_path: Path, resume_from: str | None
) -> None:
    directory = tmp_path / "saved"
    spec = JobSpec(world_size=2, checkpoint_dir=str(directory), resume_from=resume_from)
    old = over(database, desk, "old", spec)
    desk.jobs.delete(old.job_id, old.uid)
    over(database, desk, "new", spec)
    save(directory, "new")
    before = set(directory.rglob("*"))
    desk.jobs.stale = {old.job_id: old}
    assert asyncio.run(delete_all(desk, [old], FORCED, None)) == ({}, [])
    assert set(directory.rglob("*")) == before


def test_a_forced_delete_stops_once_another_one_is_done(
    database: Database, desk: SimpleNamespace, tmp_path: Path
) -> None:
    directory = tmp_path / "saved"
    spec = JobSpec(world_size=2, checkpoint_dir=str(directory), resume_from="a")
    old = over(database, desk, "old", spec)
    save(directory, "old")
    left: list[set[Path]] = []

    def delete_and_resubmit() -> None:
        desk.jobs.delete(old.job_id, old.uid)
        over(database, desk, "new", spec)
        left.append(set(directory.rglob("*")))

    desk.jobs.meanwhile = [lambda: None, delete_and_resubmit]
    assert asyncio.run(delete_all(desk, [old], FORCED, None)) == ({}, [])
    assert [set(directory.rglob("*"))] == left


def test_an_interrupted_delete_can_be_repeated(database: Database, desk: SimpleNamespace) -> None:
    job = over(database, desk, "old")
    files = desk.data_dir.job(job.job_id)
    archive = files.root.rename(files.root.with_name(f"a.{job.uid}"))
    freed_bytes, _ = asyncio.run(delete_all(desk, [job], UNFORCED, None))
    assert not archive.exists()
    assert desk.jobs.find(job.job_id) is None
    assert freed_bytes == {job.job_id: len("oldby old\n")}


def test_a_refused_delete_of_checkpoints_leaves_the_logs(
    database: Database, desk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    job = over(database, desk, "old", JobSpec(world_size=2, checkpoint_dir="/checkpoints"))
    monkeypatch.setattr(deletion, "entries", refuse)
    _, (kept,) = asyncio.run(delete_all(desk, [job], FORCED, None))
    assert "could not be removed" in kept.detail
    assert desk.data_dir.job(job.job_id).log(0, 0).read_text() == "by old\n"
    assert desk.jobs.get(job.job_id) == job
