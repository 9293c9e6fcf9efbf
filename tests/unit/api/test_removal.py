"""A delete takes what is the job's, whatever others delete and submit meanwhile."""

import asyncio
import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from store_samples import finish, submit
from vaults import Rank

from api import removal
from api.removal import Removal, delete_all
from muster.attic import claim
from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.owner import Owner
from muster.contracts.job import JobId, JobUid
from muster.contracts.layout import DataDirectory
from muster.contracts.spec import JobSpec
from store.database import Database
from store.jobs import Jobs
from store.records import Job

pytestmark = pytest.mark.slow  # a database of its own


async def allowed() -> None:
    """Let whoever asked go on."""


GONE = Removal(delete_logs=True, stop_first=False, force=False, actor="ada", ask_again=allowed)
FORCED = replace(GONE, force=True)


class Late(Jobs):
    """Shows the jobs of a while ago to whoever only looks."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.seen: dict[JobId, Job] = {}
        self.meanwhile: list[Callable[[], object]] = []
        """What somebody does each time before a row is held."""

    @contextmanager
    def keeping(self, job_id: JobId, uid: JobUid) -> Iterator[None]:
        if self.meanwhile:
            self.meanwhile.pop(0)()
        with super().keeping(job_id, uid):
            yield

    def find(self, job_id: JobId) -> Job | None:
        return self.seen.get(job_id) or super().find(job_id)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database.open(f"sqlite:///{tmp_path}/muster.db")
    yield opened
    opened.close()


@pytest.fixture
def desk(database: Database, tmp_path: Path) -> SimpleNamespace:
    """What of a front desk a delete uses of jobs that are over."""
    return SimpleNamespace(jobs=Late(database), files=DataDirectory(tmp_path / "data"))


def over(database: Database, desk: SimpleNamespace, uid: str, spec: JobSpec | None = None) -> Job:
    """Return a job that is over and has written a line."""
    job = finish(database, submit(desk.jobs, "a", uid=uid, spec=spec))
    files = desk.files.job(job.job_id)
    claim(files, job.uid)
    files.logs.mkdir()
    files.log(0, 0).write_text(f"by {uid}\n")
    return job


def test_a_delete_that_comes_late_spares_the_next_job_of_that_id(
    database: Database, desk: SimpleNamespace
) -> None:
    old = over(database, desk, "old")
    shutil.rmtree(desk.files.job(old.job_id).root)
    desk.jobs.delete(old.job_id, old.uid)
    new = over(database, desk, "new")
    desk.jobs.seen = {old.job_id: old}
    assert asyncio.run(delete_all(desk, [old], GONE)) == []
    assert desk.files.job(new.job_id).log(0, 0).read_text() == "by new\n"
    assert desk.jobs.get(new.job_id) == new


def saves(directory: Path, uid: str) -> None:
    """Save as rank 0 of job "a", and begin to as rank 1."""
    of = Owner(job_id="a", job_uid=uid, rank=0, world_size=2, generation=0)
    Rank(files=LocalFileSystem(), directory=directory / "a" / "worker_0", owner=of).save(1, 2)
    (directory / "a" / "worker_1" / ".step_0000000001.g0000.tmp").mkdir(parents=True)


def below(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


@pytest.mark.parametrize("resume_from", [None, "a"])
def test_a_forced_delete_that_comes_late_spares_the_checkpoints_of_the_next_job(
    database: Database, desk: SimpleNamespace, tmp_path: Path, resume_from: str | None
) -> None:
    spec = JobSpec(world_size=2, checkpoint_dir=str(tmp_path / "saved"), resume_from=resume_from)
    old = over(database, desk, "old", spec)
    desk.jobs.delete(old.job_id, old.uid)
    over(database, desk, "new", spec)
    saves(tmp_path / "saved", "new")
    before = below(tmp_path / "saved")
    desk.jobs.seen = {old.job_id: old}
    assert asyncio.run(delete_all(desk, [old], FORCED)) == []
    assert below(tmp_path / "saved") == before


def test_a_forced_delete_stops_where_another_one_is_done_and_the_next_job_is_there(
    database: Database, desk: SimpleNamespace, tmp_path: Path
) -> None:
    directory = tmp_path / "saved"
    spec = JobSpec(world_size=2, checkpoint_dir=str(directory), resume_from="a")
    old = over(database, desk, "old", spec)
    saves(directory, "old")
    left: list[set[Path]] = []

    def another() -> None:
        desk.jobs.delete(old.job_id, old.uid)
        over(database, desk, "new", spec)
        left.append(below(directory))

    desk.jobs.meanwhile = [lambda: None, another]
    assert asyncio.run(delete_all(desk, [old], FORCED)) == []
    assert [below(directory)] == left


def test_a_delete_that_was_cut_short_is_finished_by_the_next(
    database: Database, desk: SimpleNamespace
) -> None:
    job = over(database, desk, "old")
    files = desk.files.job(job.job_id)
    aside = files.root.rename(files.root.with_name(f"a.{job.uid}"))
    (removed,) = asyncio.run(delete_all(desk, [job], GONE))
    assert removed.view.logs_deleted
    assert not aside.exists()
    assert desk.jobs.find(job.job_id) is None
    assert removed.freed_bytes == len("oldby old\n")


def test_a_delete_that_is_refused_for_its_checkpoints_hides_no_logs(
    database: Database, desk: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> object:
        raise PermissionError(errno.EACCES, "Permission denied")

    job = over(database, desk, "old", JobSpec(world_size=2, checkpoint_dir="/checkpoints"))
    monkeypatch.setattr(removal, "entries", refuse)
    (kept,) = asyncio.run(delete_all(desk, [job], FORCED))
    assert "could not be removed" in kept.detail
    assert desk.files.job(job.job_id).log(0, 0).read_text() == "by old\n"
    assert desk.jobs.get(job.job_id) == job
