"""What a coordinator may write, and what a fenced one may not."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import pytest
from sqlalchemy import Connection

from database.engine import Database
from database.errors import DatabaseUnavailable, LeaseLost
from database.fenced_writer import FencedWriter
from database.history import History
from database.jobs import Jobs
from database.leases import Leases
from database.records import AgentRecord, Event, JobWrite, Lease
from muster.contracts.errors import IllegalMove
from muster.contracts.job.status import JobId, JobStatus, StopRequest
from tests.support.database_samples import (
    NOON,
    PROCESS,
    SteppingClock,
    attempt,
    change_of,
    commit,
    epoch,
    finish,
    member,
    nothing_moves,
    only_the_lease_moves,
    points,
    submit,
    take_lease,
    worker,
    write_of,
)

STARTED = Event(at=NOON, kind="rank_started", message="rank 0 was started", rank=0, attempt=0)
ROWS = {
    "agents": [AgentRecord(host="local", agent_number=3, process=PROCESS, token_sha256="t" * 64)],
    "ranks": [worker(0, endings={"crash": 2}, fruitless=1, proven_step=5)],
    "attempts": [attempt(0, 0)],
    "members": [member(0)],
    "commits": [commit(5)],
    "epochs": [epoch(0)],
    "series": points(0.5),
}


@pytest.fixture
def lease(database: Database) -> Lease:
    return take_lease(database)


@pytest.fixture
def writer(database: Database, lease: Lease, clock: SteppingClock) -> FencedWriter:
    return FencedWriter(database, lease, clock)


def test_a_commit_writes_every_kind_of_row_and_the_beat(
    database: Database, jobs: Jobs, writer: FencedWriter, lease: Lease
) -> None:
    job = submit(jobs, "a")
    change = change_of(
        job,
        status=JobStatus.STARTING,
        reason="because",
        started_at=NOON,
        master_port=29500,
    )
    ranks = [worker(0, loss=0.1, last_heartbeat_at=NOON, line_idx=2**40), worker(1, finished=True)]
    writer.commit([JobWrite(change=change, **ROWS | {"ranks": ranks}, events=[STARTED])])
    after = jobs.get(job.job_id)
    assert change_of(after) == change
    assert after.version == job.version + 1
    assert after.updated_at > job.updated_at
    assert History(database).agents_by_job([job.job_id])[job.job_id] == ROWS["agents"]
    assert History(database).ranks(job.job_id) == ranks
    members = {it.rank: it for it in ROWS["members"]}
    assert [it.member for it in History(database).workers(job.job_id)] == [
        members.get(it.rank) for it in ranks
    ]
    assert History(database).attempts(job.job_id, 9, None) == ROWS["attempts"]
    assert History(database).members_by_job([job.job_id])[job.job_id] == ROWS["members"]
    audit = History(database).audit(job.job_id, 9)
    assert (audit.commits, audit.epochs) == (ROWS["commits"], ROWS["epochs"])
    assert History(database).series(job.job_id, ()) == (["loss"], ROWS["series"])
    assert History(database).events(job.job_id, 1)[0].message == STARTED.message
    assert Leases(database).current().beat == lease.beat + 1


def test_series_are_summed_up(database: Database, jobs: Jobs, writer: FencedWriter) -> None:
    job, nan = submit(jobs, "a"), math.nan
    loss = [*points(nan, 3.0, 1.0, nan), *points(0.25, since=1, second=5)]
    writer.commit([JobWrite(change=change_of(job), series=[*loss, *points(nan, name="lr")])])
    found = History(database).series_extremes(job.job_id)
    assert found["loss"].pop("not_finite") == 2
    assert found["loss"] == {"first": 3.0, "least": 0.25, "greatest": 3.0, "last": 0.25}
    assert found["lr"].pop("not_finite") == 1
    assert set(found["lr"].values()) == {None}
    last = loss[-1]
    assert History(database).last_points([job.job_id]) == {job.job_id: last.at}
    assert History(database).points_after(job.job_id, None) == [last]
    assert History(database).points_after(job.job_id, loss[-2].at) == [last]


def test_an_empty_commit_renews_the_lease(
    database: Database, jobs: Jobs, writer: FencedWriter
) -> None:
    job = submit(jobs, "a")
    for nothing in ([], [write_of(job)]):
        with only_the_lease_moves(database):
            writer.commit(nothing)


def test_a_rank_replaces_its_row(database: Database, jobs: Jobs, writer: FencedWriter) -> None:
    job = submit(jobs, "a")
    for ranks in ([worker(1), worker(0)], [worker(1, attempt=1, step=7, process=None)]):
        writer.commit([write_of(job, ranks=ranks)])
    assert History(database).ranks(job.job_id) == [
        worker(0),
        worker(1, attempt=1, step=7, process=None),
    ]


def test_ranks_of_several_jobs_are_read_together(
    database: Database, jobs: Jobs, writer: FencedWriter
) -> None:
    a, b, c = (submit(jobs, name) for name in "abc")
    writer.commit([write_of(a, ranks=[worker(0)]), write_of(b, ranks=[worker(0), worker(1)])])
    found = History(database).ranks_by_job([a.job_id, b.job_id, c.job_id])
    assert {key: len(ranks) for key, ranks in found.items()} == {"a": 1, "b": 2, "c": 0}
    assert History(database).ranks_by_job([]) == {}


@pytest.mark.slow
def test_events_keep_their_order(database: Database, jobs: Jobs, writer: FencedWriter) -> None:
    job = submit(jobs, "a")
    events = [Event(at=NOON, kind="counted", message=str(number)) for number in range(9)]
    writer.commit([write_of(job, events=events)])
    last = History(database).events(job.job_id, 3)
    assert [event.message for event in last] == ["6", "7", "8"]
    assert last[0].event_id < last[1].event_id < last[2].event_id
    assert History(database).events(JobId("none"), 3) == []


@pytest.mark.parametrize("is_taken", [False, True], ids=["released", "taken"])
def test_a_fenced_coordinator_changes_no_row(
    database: Database, jobs: Jobs, writer: FencedWriter, lease: Lease, *, is_taken: bool
) -> None:
    job = submit(jobs, "a")
    if is_taken:
        take_lease(database, "second")
    else:
        Leases(database).release(lease)
    write = write_of(job, status=JobStatus.STARTING, events=[STARTED], **ROWS)
    with nothing_moves(database), pytest.raises(LeaseLost, match="stop deciding"):
        writer.commit([write])


def test_a_deleted_job_and_its_successor_are_not_touched(database: Database, jobs: Jobs) -> None:
    old = finish(database, submit(jobs, "a", uid="old"))
    jobs.delete(old.job_id, old.uid)
    writer = FencedWriter(database, take_lease(database))
    with only_the_lease_moves(database):
        writer.commit([write_of(old, **ROWS)])
    submit(jobs, "a", uid="new")
    other = submit(jobs, "b")
    with only_the_lease_moves(database):
        late = write_of(old, status=JobStatus.FAILED, message="late", events=[STARTED], **ROWS)
        writer.commit([late])
    writer.commit([write_of(old, **ROWS), write_of(other, message="on")])
    assert History(database).ranks(old.job_id) == []
    assert jobs.get(other.job_id).message == "on"


def test_an_illegal_move_undoes_the_whole_commit(
    database: Database, jobs: Jobs, writer: FencedWriter
) -> None:
    a, b = submit(jobs, "a"), submit(jobs, "b")
    legal = write_of(a, status=JobStatus.STARTING, **ROWS)
    illegal = write_of(b, status=JobStatus.COMPLETED)
    with nothing_moves(database), pytest.raises(IllegalMove):
        writer.commit([legal, illegal])


def test_a_commit_keeps_what_the_api_wrote(jobs: Jobs, writer: FencedWriter) -> None:
    job = submit(jobs, "a")
    jobs.request_stop(job.job_id, StopRequest.GRACEFUL, 5.0)
    writer.commit([write_of(job, status=JobStatus.STARTING)])
    after = jobs.get(job.job_id)
    assert (after.status, after.stop_request) == (JobStatus.STARTING, StopRequest.GRACEFUL)
    assert after.version == job.version + 2


@dataclass
class Faltering:
    """A database that is lost during commits."""

    database: Database
    fates: list[str]
    """Of the next commits: "lost", "durable" without an answer, or "acknowledged"."""

    def upsert(self, *arguments: object) -> object:
        return self.database.upsert(*arguments)

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        fate = self.fates.pop(0)
        with suppress(_Lost), self.database.writing() as connection:
            yield connection
            if fate == "lost":
                raise _Lost
        if fate != "acknowledged":
            raise DatabaseUnavailable(fate)


class _Lost(Exception):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "fates",
    [
        ["durable", "acknowledged"],
        ["lost", "durable", "acknowledged"],
        ["durable", "lost", "acknowledged"],
        ["durable", "durable", "lost", "lost", "acknowledged"],
        ["acknowledged", "lost", "durable", "acknowledged", "durable", "acknowledged"],
    ],
    ids=" ".join,
)
def test_a_repeated_commit_writes_no_event_twice(
    database: Database, jobs: Jobs, fates: list[str]
) -> None:
    a, b = submit(jobs, "a"), submit(jobs, "b")
    writer = FencedWriter(Faltering(database, list(fates)), take_lease(database))
    before = {job.job_id: len(History(database).events(job.job_id, 99)) for job in (a, b)}
    pending: list[Event] = []
    for number, fate in enumerate(fates):
        pending.append(Event(at=NOON, kind="counted", message=str(number)))
        # The second job has no event at first.
        writes = [write_of(a, events=pending), write_of(b, events=pending if number else [])]
        with nullcontext() if fate == "acknowledged" else pytest.raises(DatabaseUnavailable):
            writer.commit(writes)
        if fate == "acknowledged":
            pending = []
    for job, first in ((a, 0), (b, 0 if fates[0] != "acknowledged" else 1)):
        found = History(database).events(job.job_id, 99)[before[job.job_id] :]
        assert [event.message for event in found] == [str(n) for n in range(first, len(fates))]
