"""The record of every process: what came first is kept, and pages leave nothing out."""

from dataclasses import replace
from datetime import timedelta

import pytest
from store_samples import NOON, finish, incarnation, submit, take_lease, write_of

from muster.contracts.job import JobId
from store.database import Database
from store.incarnations import Incarnations
from store.jobs import Jobs
from store.records import Incarnation, Job
from store.tenure import Tenure

LATER = NOON + timedelta(seconds=7)


@pytest.fixture
def incarnations(database: Database) -> Incarnations:
    return Incarnations(database)


@pytest.fixture
def job(jobs: Jobs) -> Job:
    return submit(jobs, "a")


def write(database: Database, job: Job, *rows: Incarnation) -> None:
    Tenure(database, take_lease(database)).commit([write_of(job, incarnations=rows)])


def test_an_end_is_added_to_what_was_known(
    database: Database, incarnations: Incarnations, job: Job
) -> None:
    write(database, job, incarnation(0, 0, pid=None, step_at_start=None))
    write(database, job, incarnation(0, 0))
    ended = incarnation(
        0, 0, ended_at=LATER, exit_signal=9, retry_class="crash", reason="r", message="m"
    )
    # One that took over knows when it ended, and not well when it began.
    write(database, job, replace(ended, pid=None, started_at=LATER, step_at_start=3))
    assert incarnations.page(job.job_id, 9, None) == [ended]


def test_pages_begin_with_the_newest_and_leave_nothing_out(
    database: Database, incarnations: Incarnations, job: Job, jobs: Jobs
) -> None:
    made = [
        incarnation(rank, number, started_at=NOON + timedelta(seconds=number))
        for number in range(3)
        for rank in range(2)
    ]
    write(database, job, *made)
    write(database, submit(jobs, "b"), incarnation(0, 0))
    seen: list[Incarnation] = []
    while page := incarnations.page(
        job.job_id, 4, (seen[-1].started_at, seen[-1].rank, seen[-1].incarnation) if seen else None
    ):
        seen += page
    assert seen == made[::-1]
    assert incarnations.count(job.job_id) == 6
    assert incarnations.page(JobId("nobody"), 4, None) == []


def test_they_go_with_their_job(
    database: Database, incarnations: Incarnations, job: Job, jobs: Jobs
) -> None:
    write(database, job, incarnation(0, 0))
    finish(database, job)
    jobs.delete(job.job_id, job.uid)
    assert incarnations.count(job.job_id) == 0
