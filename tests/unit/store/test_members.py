"""Who is in a pool, and who may be asked to leave it."""

import pytest
from store_samples import (
    NOON,
    SteppingClock,
    bring_to,
    finish,
    member,
    nothing_moves,
    submit,
    take_lease,
    write_of,
)

from muster.contracts.job import JobId, JobStatus, JobUid, StopRequest
from muster.contracts.spec import JobSpec
from store.database import Database
from store.errors import DepartureRefused, JobMissing, JobOver, MemberMissing
from store.events import Events
from store.jobs import Jobs
from store.members import Members
from store.records import Job, Member
from store.tenure import Tenure

FOUR_OF_MIN_TWO = JobSpec(mode="synchronous", world_size=4, min_workers=2)


@pytest.fixture
def members(database: Database, clock: SteppingClock) -> Members:
    return Members(database, clock)


def pooled(database: Database, jobs: Jobs, *pool: Member) -> Job:
    """Return a running job with these members."""
    job = jobs.create(JobId("a"), JobUid("uid-a"), FOUR_OF_MIN_TWO, message=None, idempotency=None)
    job = bring_to(database, job, JobStatus.STARTING, JobStatus.RUNNING)
    Tenure(database, take_lease(database)).commit([write_of(job, members=pool)])
    return jobs.get(job.job_id)


def test_members_are_written_over_by_id_and_kept_when_they_are_gone(
    database: Database, jobs: Jobs, members: Members
) -> None:
    job = pooled(database, jobs, member(0), member(1, state="syncing", joined_step=None))
    gone = member(0, state="failed", last_heartbeat_at=NOON)
    newcomer = member(2**40, rank=0, incarnation=1, node=None, gpu_count=8, backend="tcp")
    tenure = Tenure(database, take_lease(database))
    tenure.commit([write_of(job, members=[newcomer, gone])])
    kept = member(1, state="syncing", joined_step=None)
    assert members.of_job(job.job_id) == [gone, kept, newcomer]


def test_the_members_of_several_jobs_are_read_together(
    database: Database, jobs: Jobs, members: Members
) -> None:
    a, b = submit(jobs, "a"), submit(jobs, "b")
    tenure = Tenure(database, take_lease(database))
    tenure.commit([write_of(a, members=[member(0)]), write_of(b)])
    found = members.of_jobs([a.job_id, b.job_id, JobId("nobody")])
    assert {job_id: len(pool) for job_id, pool in found.items()} == {"a": 1, "b": 0, "nobody": 0}
    assert members.departures([a.job_id]) == {"a": frozenset()}
    assert members.of_jobs([]) == members.departures([]) == {}


def test_who_is_asked_to_leave_takes_a_place_along(
    database: Database, jobs: Jobs, members: Members
) -> None:
    job = pooled(database, jobs, *[member(number) for number in range(4)])
    asked = members.request_departure(job.job_id, 1)
    assert asked == jobs.get(job.job_id)
    assert (asked.world_size, asked.wanted_world_size, asked.spec) == (3, 3, job.spec)
    assert asked.version == job.version + 1
    assert members.departures([job.job_id]) == {job.job_id: frozenset({1})}
    (told,) = Events(database).of_job(job.job_id, 1)
    assert (told.kind, told.message) == ("departure_requested", "worker 1 is to leave")


STATES = [
    ("syncing", "it is syncing, not active"),
    ("draining", "it is draining, not active"),
    ("failed", "it is failed, not active"),
    ("left", "it is left, not active"),
]


@pytest.mark.parametrize(("state", "sentence"), STATES)
def test_only_an_active_worker_can_be_asked_to_leave(
    database: Database, jobs: Jobs, members: Members, state: str, sentence: str
) -> None:
    pool = [member(0, state=state), *[member(number) for number in range(1, 5)]]
    job = pooled(database, jobs, *pool)
    with nothing_moves(database), pytest.raises(DepartureRefused, match=sentence):
        members.request_departure(job.job_id, 0)


def test_nobody_is_asked_twice(database: Database, jobs: Jobs, members: Members) -> None:
    job = pooled(database, jobs, *[member(number) for number in range(4)])
    members.request_departure(job.job_id, 3)
    with nothing_moves(database), pytest.raises(DepartureRefused, match="asked to already"):
        members.request_departure(job.job_id, 3)


def test_those_who_were_asked_count_no_more(
    database: Database, jobs: Jobs, members: Members
) -> None:
    job = pooled(database, jobs, *[member(number) for number in range(4)])
    for number in (0, 1):
        members.request_departure(job.job_id, number)
    with (
        nothing_moves(database),
        pytest.raises(DepartureRefused, match=r"min_workers \(2\) would be left"),
    ):
        members.request_departure(job.job_id, 2)


def test_those_who_do_not_take_part_yet_or_any_more_count_not_either(
    database: Database, jobs: Jobs, members: Members
) -> None:
    states = ["active", "active", "syncing", "failed", "left", "draining"]
    pool = [member(number, state=state) for number, state in enumerate(states)]
    job = pooled(database, jobs, *pool)
    with nothing_moves(database), pytest.raises(DepartureRefused, match="would be left"):
        members.request_departure(job.job_id, 0)


def test_a_job_on_its_way_to_the_minimum_lets_nobody_go(
    database: Database, jobs: Jobs, members: Members
) -> None:
    job = pooled(database, jobs, *[member(number) for number in range(4)])
    jobs.scale(job.job_id, 2)
    with nothing_moves(database), pytest.raises(DepartureRefused, match="would be left"):
        members.request_departure(job.job_id, 0)


def test_an_unknown_worker_or_job_is_an_error(
    database: Database, jobs: Jobs, members: Members
) -> None:
    job = pooled(database, jobs, member(0))
    with nothing_moves(database):
        with pytest.raises(MemberMissing, match="job a has no worker 7"):
            members.request_departure(job.job_id, 7)
        with pytest.raises(JobMissing):
            members.request_departure(JobId("nobody"), 0)


def test_nobody_leaves_a_job_that_ends(database: Database, jobs: Jobs, members: Members) -> None:
    job = pooled(database, jobs, *[member(number) for number in range(4)])
    jobs.request_stop(job.job_id, StopRequest.GRACEFUL, None)
    with nothing_moves(database), pytest.raises(JobOver, match="STOPPING"):
        members.request_departure(job.job_id, 0)
    finish(database, job)
    with nothing_moves(database), pytest.raises(JobOver, match="FAILED"):
        members.request_departure(job.job_id, 0)
