"""A job that is stored, or planned: under the id it asks for, or under one that is free."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from unit.api.jobs import JOB

from api.creation import IDS_TRIED, create, planned
from api.requests import JobRequest
from api.submission import Submitter
from muster.contracts.environ import ServiceSettings
from muster.contracts.job import JobId, JobUid
from muster.contracts.layout import DataDirectory
from store.company import Work
from store.errors import JobExists
from store.records import Job

UID = JobUid("uid")


class Office:
    """What of a front desk a submission uses; it makes up the same words in every second."""

    def __init__(self, root: Path, words: Iterable[int], search_path: str | None = None) -> None:
        environment = {"MUSTER_DATA_DIR": str(root), "CHECKPOINT_DIR": str(root / "ckpt")}
        hexes = map(hex, words)
        self.stored: dict[JobId, Job] = {}
        self.desk = SimpleNamespace(
            jobs=SimpleNamespace(creation=self._creation, find=self.stored.get),
            intake=SimpleNamespace(take_in=self._take_in),
            files=DataDirectory(root),
            submitter=Submitter(
                settings=ServiceSettings.read(environment, cores=2),
                working_dir=root,
                clock=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
                random_hex=lambda: next(hexes),
                checkpoint_dir_of=lambda _: None,
                search_path=search_path,
            ),
        )

    def _creation(self, job_id: JobId, uid: JobUid, *_: object, **__: object) -> Work[Job]:
        def write(_: object) -> Job:
            if job_id in self.stored:
                raise JobExists(job_id)
            return self.stored.setdefault(job_id, replace(JOB, job_id=job_id, uid=uid))

        return write

    async def _take_in(self, creation: Work[Job]) -> Job:
        return creation(None)  # type: ignore[arg-type]  # these need no connection

    def submit(self, job_id: str | None = None) -> Job:
        return asyncio.run(create(JobRequest(job_id=job_id), self.desk, UID, None, "ada"))


def test_an_id_that_nobody_chose_is_made_up_anew_where_it_is_anothers(tmp_path: Path) -> None:
    office = Office(tmp_path, [1, 1, 1, 2])
    first, second = office.submit(), office.submit()
    assert (first.job_id, second.job_id) == (
        "job-20260102t030405-100000",
        "job-20260102t030405-200000",
    )


def test_ids_are_made_up_a_few_times(tmp_path: Path) -> None:
    office = Office(tmp_path, [1] * (1 + IDS_TRIED))
    office.submit()
    with pytest.raises(JobExists):
        office.submit()
    assert len(office.stored) == 1


def test_an_id_that_was_asked_for_is_tried_once(tmp_path: Path) -> None:
    office = Office(tmp_path, [])
    office.submit("mine")
    for refused in (office.submit, lambda name: planned(JobRequest(job_id=name), office.desk)):
        with pytest.raises(JobExists):
            refused("mine")


def test_a_plan_under_an_id_that_nobody_chose_refuses_nothing(tmp_path: Path) -> None:
    office = Office(tmp_path, [1, 1])
    assert office.submit().job_id == planned(JobRequest(), office.desk).job_id


def test_a_plan_looks_for_programs_where_ranks_do(tmp_path: Path) -> None:
    office = Office(tmp_path, [1])
    program = tmp_path / "trains"
    program.touch(mode=0o755)
    asked = JobRequest(command=["trains"])
    assert "trains is not found in PATH" in str(planned(asked, office.desk).message)
    office = Office(tmp_path, [1], search_path=str(tmp_path))
    assert "PATH" not in str(planned(asked, office.desk).message)
