"""Events and attempts: the first values are kept, and pages leave nothing out."""

from datetime import timedelta

import pytest
from msgspec.structs import replace

from database.engine import Database
from database.fenced_writer import FencedWriter
from database.history import History
from database.jobs import Jobs
from database.records import Attempt, Job
from muster.contracts.job.status import JobId, StopRequest
from tests.support.database_samples import NOON, attempt, finish, submit, take_lease, write_of

LATER = NOON + timedelta(seconds=7)


@pytest.fixture
def history(database: Database) -> History:
    return History(database)


@pytest.fixture
def job(jobs: Jobs) -> Job:
    return submit(jobs, "a")


def write(database: Database, job: Job, *rows: Attempt) -> None:
    FencedWriter(database, take_lease(database)).commit([write_of(job, attempts=rows)])


def test_the_end_of_an_attempt_keeps_its_beginning(
    database: Database, history: History, job: Job
) -> None:
    write(database, job, attempt(0, 0, pid=None, step_at_start=None))
    write(database, job, attempt(0, 0))
    ended = attempt(
        0, 0, ended_at=LATER, exit_signal=9, retry_class="crash", reason="r", message="m"
    )
    # A coordinator that took over knows the end, but not exactly the beginning.
    write(database, job, replace(ended, pid=None, started_at=LATER, step_at_start=3))
    assert history.attempts(job.job_id, 9, None) == [ended]


def test_pages_of_attempts_are_complete_and_newest_first(
    database: Database, history: History, job: Job, jobs: Jobs
) -> None:
    made = [
        attempt(rank, number, started_at=NOON + timedelta(seconds=number))
        for number in range(3)
        for rank in range(2)
    ]
    write(database, job, *made)
    write(database, submit(jobs, "b"), attempt(0, 0))
    seen: list[Attempt] = []
    while page := history.attempts(
        job.job_id, 4, (seen[-1].started_at, seen[-1].rank, seen[-1].attempt) if seen else None
    ):
        seen += page
    assert seen == made[::-1]
    assert history.attempt_count(job.job_id) == 6
    assert history.attempts(JobId("none"), 4, None) == []


def test_events_can_be_read_from_any_id(database: Database, jobs: Jobs, job: Job) -> None:
    submit(jobs, "another")
    jobs.scale(job.job_id, 3)
    jobs.request_stop(job.job_id, StopRequest.GRACEFUL, None)
    history = History(database)
    every = history.events(job.job_id, 10, 0)
    assert [event.kind for event in every] == ["submitted", "scale_requested", "stop_requested"]
    assert every == history.events(job.job_id, 10)
    assert history.events(job.job_id, 1, every[0].event_id) == every[1:2]
    assert history.events(job.job_id, 10, every[-1].event_id) == []


def test_the_id_of_an_event_is_never_used_again(
    database: Database, history: History, jobs: Jobs
) -> None:
    ids = []
    for uid in ("first", "second"):
        job = submit(jobs, "a", uid=uid)
        ids.append(history.events(job.job_id, 1)[0].event_id)
        finish(database, job)
        jobs.delete(job.job_id, job.uid)
    assert ids == sorted({*ids})
