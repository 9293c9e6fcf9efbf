"""What a coordinator may write, and what it no longer may."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import pytest
from sqlalchemy import Connection
from store_samples import (
    NOON,
    PROCESS,
    SteppingClock,
    change_of,
    commit,
    epoch,
    finish,
    incarnation,
    member,
    nothing_moves,
    only_the_lease_moves,
    submit,
    take_lease,
    worker,
    write_of,
)

from muster.contracts.errors import IllegalMove
from muster.contracts.job import JobId, JobStatus, StopRequest
from store.commits import Commits
from store.database import Database
from store.errors import LeaseLost, StoreUnavailable
from store.events import Events
from store.incarnations import Incarnations
from store.jobs import Jobs
from store.leases import Leases
from store.members import Members
from store.records import Event, JobWrite, Lease
from store.tenure import Tenure
from store.workers import Workers

STARTED = Event(at=NOON, kind="rank_started", message="rank 0 was started", rank=0, incarnation=0)
ROWS = {
    "workers": [worker(0, endings={"crash": 2}, fruitless=1, proven_step=5)],
    "incarnations": [incarnation(0, 0)],
    "members": [member(0)],
    "commits": [commit(5)],
    "epochs": [epoch(0)],
}


@pytest.fixture
def lease(database: Database) -> Lease:
    return take_lease(database)


@pytest.fixture
def tenure(database: Database, lease: Lease, clock: SteppingClock) -> Tenure:
    return Tenure(database, lease, clock)


def test_a_commit_writes_every_kind_of_row_and_the_beat(
    database: Database, jobs: Jobs, tenure: Tenure, lease: Lease
) -> None:
    job = submit(jobs, "a")
    change = change_of(
        job,
        status=JobStatus.STARTING,
        reason="because",
        started_at=NOON,
        generation=3,
        agent=PROCESS,
        agent_token_sha256="t" * 64,
    )
    ranks = [worker(0, loss=0.1, last_heartbeat_at=NOON, line_idx=2**40), worker(1, finished=True)]
    tenure.commit([JobWrite(change=change, **ROWS | {"workers": ranks}, events=[STARTED])])
    after = jobs.get(job.job_id)
    assert change_of(after) == change
    assert after.version == job.version + 1
    assert after.updated_at > job.updated_at
    assert Workers(database).of_job(job.job_id) == ranks
    assert Incarnations(database).page(job.job_id, 9, None) == ROWS["incarnations"]
    assert Members(database).of_job(job.job_id) == ROWS["members"]
    audit = Commits(database).audit(job.job_id, 9)
    assert (audit.commits, audit.epochs) == (ROWS["commits"], ROWS["epochs"])
    assert Events(database).of_job(job.job_id, 1)[0].message == STARTED.message
    assert Leases(database).current(lease.name).beat == lease.beat + 1


def test_a_commit_of_nothing_renews_the_lease(
    database: Database, jobs: Jobs, tenure: Tenure
) -> None:
    job = submit(jobs, "a")
    for nothing in ([], [write_of(job)]):
        with only_the_lease_moves(database):
            tenure.commit(nothing)


def test_a_worker_is_written_over_by_rank(database: Database, jobs: Jobs, tenure: Tenure) -> None:
    job = submit(jobs, "a")
    for ranks in ([worker(1), worker(0)], [worker(1, incarnation=1, step=7, process=None)]):
        tenure.commit([write_of(job, workers=ranks)])
    assert Workers(database).of_job(job.job_id) == [
        worker(0),
        worker(1, incarnation=1, step=7, process=None),
    ]


def test_the_workers_of_several_jobs_are_read_together(
    database: Database, jobs: Jobs, tenure: Tenure
) -> None:
    a, b, c = (submit(jobs, name) for name in "abc")
    tenure.commit([write_of(a, workers=[worker(0)]), write_of(b, workers=[worker(0), worker(1)])])
    found = Workers(database).of_jobs([a.job_id, b.job_id, c.job_id])
    assert {key: len(ranks) for key, ranks in found.items()} == {"a": 1, "b": 2, "c": 0}
    assert Workers(database).of_jobs([]) == {}


def test_events_keep_their_order_and_the_last_ones_are_shown(
    database: Database, jobs: Jobs, tenure: Tenure
) -> None:
    job = submit(jobs, "a")
    told = [Event(at=NOON, kind="counted", message=str(number)) for number in range(9)]
    tenure.commit([write_of(job, events=told)])
    last = Events(database).of_job(job.job_id, 3)
    assert [event.message for event in last] == ["6", "7", "8"]
    assert last[0].event_id < last[1].event_id < last[2].event_id
    assert Events(database).of_job(JobId("nobody"), 3) == []


def test_a_fenced_coordinator_changes_no_row(
    database: Database, jobs: Jobs, tenure: Tenure
) -> None:
    job = submit(jobs, "a")
    take_lease(database, "second")
    write = write_of(job, status=JobStatus.STARTING, events=[STARTED], **ROWS)
    with nothing_moves(database), pytest.raises(LeaseLost, match="stop deciding"):
        tenure.commit([write])


def test_after_a_release_nothing_is_written(
    database: Database, jobs: Jobs, tenure: Tenure, lease: Lease
) -> None:
    job = submit(jobs, "a")
    Leases(database).release(lease)
    with nothing_moves(database), pytest.raises(LeaseLost):
        tenure.commit([write_of(job, status=JobStatus.STARTING)])


def test_a_later_job_of_the_same_id_is_not_touched(database: Database, jobs: Jobs) -> None:
    old = finish(database, submit(jobs, "a", uid="old"))
    jobs.delete(old.job_id, old.uid)
    submit(jobs, "a", uid="new")
    other = submit(jobs, "b")
    tenure = Tenure(database, take_lease(database))
    with only_the_lease_moves(database):
        late = write_of(old, status=JobStatus.FAILED, message="late", events=[STARTED], **ROWS)
        tenure.commit([late])
    tenure.commit([write_of(old, **ROWS), write_of(other, message="on")])
    assert Workers(database).of_job(old.job_id) == []
    assert jobs.get(other.job_id).message == "on"


def test_a_deleted_job_does_not_come_back(database: Database, jobs: Jobs) -> None:
    old = finish(database, submit(jobs, "a"))
    jobs.delete(old.job_id, old.uid)
    tenure = Tenure(database, take_lease(database))
    with only_the_lease_moves(database):
        tenure.commit([write_of(old, **ROWS)])


def test_an_illegal_move_undoes_the_whole_commit(
    database: Database, jobs: Jobs, tenure: Tenure
) -> None:
    a, b = submit(jobs, "a"), submit(jobs, "b")
    legal = write_of(a, status=JobStatus.STARTING, **ROWS)
    illegal = write_of(b, status=JobStatus.COMPLETED)
    with nothing_moves(database), pytest.raises(IllegalMove):
        tenure.commit([legal, illegal])


def test_what_the_api_wrote_meanwhile_survives_a_commit(jobs: Jobs, tenure: Tenure) -> None:
    job = submit(jobs, "a")
    jobs.request_stop(job.job_id, StopRequest.GRACEFUL, 5.0)
    tenure.commit([write_of(job, status=JobStatus.STARTING)])
    after = jobs.get(job.job_id)
    assert (after.status, after.stop_request) == (JobStatus.STARTING, StopRequest.GRACEFUL)
    assert after.version == job.version + 2


@dataclass
class Faltering:
    """A database that goes away during commits: what is said is never heard, or heard too late."""

    database: Database
    fates: list[str]
    """Of the next commits: "lost", "durable" though nobody was told, or "told"."""

    def upsert(self, *arguments: object) -> object:
        return self.database.upsert(*arguments)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        fate = self.fates.pop(0)
        with suppress(_Lost), self.database.writing() as connection:
            yield connection
            if fate == "lost":
                raise _Lost
        if fate != "told":
            raise StoreUnavailable(fate)


class _Lost(Exception):
    pass


@pytest.mark.parametrize(
    "fates",
    [
        ["durable", "told"],
        ["lost", "durable", "told"],
        ["durable", "lost", "told"],
        ["durable", "durable", "lost", "lost", "told"],
        ["told", "lost", "durable", "told", "durable", "told"],
    ],
    ids=" ".join,
)
def test_a_commit_in_doubt_is_repeated_and_no_event_is_there_twice(
    database: Database, jobs: Jobs, fates: list[str]
) -> None:
    a, b = submit(jobs, "a"), submit(jobs, "b")
    tenure = Tenure(Faltering(database, list(fates)), take_lease(database))
    before = {job.job_id: len(Events(database).of_job(job.job_id, 99)) for job in (a, b)}
    untold: list[Event] = []
    for number, fate in enumerate(fates):
        untold.append(Event(at=NOON, kind="counted", message=str(number)))
        # The second job has nothing to tell at first.
        writes = [write_of(a, events=untold), write_of(b, events=untold if number else [])]
        with nullcontext() if fate == "told" else pytest.raises(StoreUnavailable):
            tenure.commit(writes)
        if fate == "told":
            untold = []
    for job, first in ((a, 0), (b, 0 if fates[0] != "told" else 1)):
        told = Events(database).of_job(job.job_id, 99)[before[job.job_id] :]
        assert [event.message for event in told] == [str(n) for n in range(first, len(fates))]
