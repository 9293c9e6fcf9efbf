"""Pool members, and which of them may be asked to leave."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from database.engine import Database
from database.errors import DepartureRefused, JobMissing, JobOver, MemberMissing
from database.fenced_writer import FencedWriter
from database.history import History
from database.jobs import Jobs, NewJob
from database.records import Job, MemberRecord
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid, StopRequest
from tests.support.database_samples import (
    NOON,
    SteppingClock,
    bring_to,
    finish,
    member,
    nothing_moves,
    store,
    submit,
    take_lease,
    write_of,
)

MIN_TWO = JobSpec(mode="synchronous", world_size=4, min_workers=2)
WIDE = JobSpec(mode="synchronous", world_size=32, min_workers=1)
FOUR = [member(number) for number in range(4)]


@pytest.fixture
def history(database: Database, clock: SteppingClock) -> History:
    return History(database, clock)


def write(database: Database, job: Job, *pool: MemberRecord) -> None:
    FencedWriter(database, take_lease(database)).commit([write_of(job, members=pool)])


def pooled(database: Database, jobs: Jobs, *pool: MemberRecord, spec: JobSpec = MIN_TWO) -> Job:
    """Return a running job with these members."""
    job = store(jobs, NewJob(JobId("a"), JobUid("uid-a"), spec))
    job = bring_to(database, job, JobStatus.STARTING, JobStatus.RUNNING)
    write(database, job, *pool)
    return jobs.get(job.job_id)


def test_members_are_replaced_by_id_and_kept_when_gone(
    database: Database, jobs: Jobs, history: History
) -> None:
    kept = member(1, state="syncing", joined_step=None)
    job = pooled(database, jobs, member(0), kept)
    gone = member(0, state="failed", last_heartbeat_at=NOON)
    newcomer = member(2**40, rank=0, attempt=1, node=None, gpu_count=8, backend="tcp")
    write(database, job, newcomer, gone)
    assert history.members_by_job([job.job_id])[job.job_id] == [gone, kept, newcomer]


def test_members_of_several_jobs_are_read_together(
    database: Database, jobs: Jobs, history: History
) -> None:
    a, b = submit(jobs, "a"), submit(jobs, "b")
    write(database, a, member(0))
    found = history.members_by_job([a.job_id, b.job_id, JobId("none")])
    assert found == {"a": [member(0)], "b": [], "none": []}
    assert history.members_by_job([]) == {}


def test_departures_are_read_together_with_the_size_that_they_leave(
    database: Database, jobs: Jobs, history: History
) -> None:
    job = pooled(database, jobs, *(member(number) for number in range(WIDE.world_size)), spec=WIDE)
    with ThreadPoolExecutor(1) as executor:
        asking = executor.submit(
            lambda: [history.request_departure(job.job_id, it) for it in range(WIDE.world_size - 1)]
        )
        seen, left = {0}, frozenset[int]()
        while not asking.done() or len(left) < WIDE.world_size - 1:
            (row,), departures = jobs.unfinished_with_departures(())
            left = departures[job.job_id]
            assert row.world_size + len(left) == WIDE.world_size
            seen.add(len(left))
    assert len(seen) > 1


def test_a_departure_takes_one_rank_from_the_job(
    database: Database, jobs: Jobs, history: History
) -> None:
    job = pooled(database, jobs, *FOUR)
    changed = history.request_departure(job.job_id, 1)
    assert changed == jobs.get(job.job_id)
    assert (changed.world_size, changed.wanted_world_size, changed.spec) == (3, 3, job.spec)
    assert changed.version == job.version + 1
    asked = [member(it, state="draining" if it == 1 else "active") for it in range(4)]
    assert history.members_by_job([job.job_id])[job.job_id] == asked
    (event,) = History(database).events(job.job_id, 1)
    assert (event.kind, event.message) == ("departure_requested", "worker 1 was asked to leave")


def pool_of(*states: str) -> list[MemberRecord]:
    return [member(number, state=state) for number, state in enumerate(states)]


ACTIVE = ["active"] * 4
REFUSED = {
    "syncing": (pool_of("syncing", *ACTIVE), [], 0, "it is syncing, not active"),
    "draining": (pool_of("draining", *ACTIVE), [], 0, "it is draining, not active"),
    "failed": (pool_of("failed", *ACTIVE), [], 0, "it is failed, not active"),
    "left": (pool_of("left", *ACTIVE), [], 0, "it is left, not active"),
    "asked before": (FOUR, [3], 3, "asked to already"),
    "too few stay": (FOUR, [0, 1], 2, r"min_workers \(2\) would be left"),
    "only active ones count": (
        pool_of("active", "active", "syncing", "failed", "left", "draining"),
        [],
        0,
        "would be left",
    ),
    "unknown": (FOUR, [], 7, "job a has no worker 7"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "asked", "worker_id", "why"), REFUSED.values(), ids=REFUSED)
def test_a_departure_is_refused(
    database: Database,
    jobs: Jobs,
    history: History,
    pool: list[MemberRecord],
    asked: list[int],
    worker_id: int,
    why: str,
) -> None:
    job = pooled(database, jobs, *pool)
    for each in asked:
        history.request_departure(job.job_id, each)
    error = MemberMissing if worker_id == 7 else DepartureRefused
    with nothing_moves(database), pytest.raises(error, match=why):
        history.request_departure(job.job_id, worker_id)


def test_no_departure_from_a_job_that_shrinks_or_ends(
    database: Database, jobs: Jobs, history: History
) -> None:
    job = pooled(database, jobs, *FOUR)
    for change, error in (
        (lambda: jobs.scale(job.job_id, 2), DepartureRefused),
        (lambda: jobs.request_stop(job.job_id, StopRequest.GRACEFUL, None), JobOver),
        (lambda: finish(database, job), JobOver),
        (lambda: jobs.delete(job.job_id, job.uid), JobMissing),
    ):
        change()
        with nothing_moves(database), pytest.raises(error):
            history.request_departure(job.job_id, 0)
