"""Values and small helpers for whoever tests against the store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import select

from muster.contracts.job import JobId, JobStatus, JobUid
from muster.contracts.spec import JobSpec
from store.database import Database
from store.idempotency import IdempotencyKey
from store.jobs import Jobs
from store.leases import Leases
from store.records import (
    Commit,
    EpochRecord,
    Incarnation,
    Job,
    JobChange,
    JobWrite,
    Lease,
    Member,
    ProcessRecord,
    Worker,
)
from store.tables import METADATA
from store.tenure import Tenure

NOON = datetime(2026, 3, 1, 12, 0, 0, 123457, tzinfo=UTC)
PROCESS = ProcessRecord(pid=4711, start_ticks=2**40, boot_id="b00t", node="höst-1")
EVERY_STATUS = list(JobStatus)


@dataclass
class SteppingClock:
    """A clock that goes on by `step` whenever somebody looks at it."""

    now: datetime = NOON
    step: timedelta = field(default=timedelta(seconds=1))

    def __call__(self) -> datetime:
        self.now += self.step
        return self.now


def submit(
    jobs: Jobs,
    job_id: str,
    *,
    uid: str | None = None,
    key: str | None = None,
    spec: JobSpec | None = None,
) -> Job:
    return jobs.create(
        JobId(job_id),
        JobUid(uid or f"uid-{job_id}"),
        spec or JobSpec(world_size=2),
        message=None,
        idempotency=None if key is None else idempotency_key(key),
    )


def idempotency_key(key: str, *, principal: str = "ada", body: str = "body") -> IdempotencyKey:
    return IdempotencyKey(principal=principal, key=key, request_sha256=body)


def change_of(job: Job, **new: object) -> JobChange:
    """Return the change that leaves `job` as it is, but for `new`."""
    return JobChange(
        **{name: new.get(name, getattr(job, name)) for name in JobChange.__dataclass_fields__}
    )


def write_of(job: Job, **new: object) -> JobWrite:
    """Return the write that leaves `job` as it is, but for `new`: rows, or values of its own."""
    rows = {name: new.pop(name) for name in list(new) if name in JobWrite.__dataclass_fields__}
    return JobWrite(change=change_of(job, **new), **rows)


def worker(rank: int, **new: object) -> Worker:
    return Worker(**{"rank": rank, "incarnation": 0, "state": "live", "process": PROCESS, **new})


def incarnation(rank: int, number: int, **new: object) -> Incarnation:
    return Incarnation(
        **{
            "rank": rank,
            "incarnation": number,
            "pid": 4711,
            "started_at": NOON,
            "step_at_start": 5,
            **new,
        }
    )


def member(worker_id: int, **new: object) -> Member:
    return Member(
        **{
            "worker_id": worker_id,
            "rank": worker_id,
            "incarnation": 0,
            "state": "active",
            "node": "höst-1",
            "joined_at": NOON,
            "joined_step": 0,
            **new,
        }
    )


def commit(step: int, **new: object) -> Commit:
    return Commit(
        **{
            "step": step,
            "generation": 1,
            "epoch": 0,
            "digest": "d" * 64,
            "consumed": 64 * step,
            "consumed_hash": 2**64 - 1,
            "saved_at": NOON,
            **new,
        }
    )


def epoch(number: int, **new: object) -> EpochRecord:
    """Return the record of an epoch that was read exactly once, but for `new`."""
    return EpochRecord(
        **{
            "epoch": number,
            "samples": 100,
            "hash_sum": 2**63,
            "expected_samples": 100,
            "expected_hash_sum": 2**63,
            **new,
        }
    )


def take_lease(database: Database, owner: str = "first") -> Lease:
    leases = Leases(database)
    seen = leases.current("coordinator")
    return leases.take("coordinator", owner, PROCESS, "127.0.0.1:1", displacing=seen)


def bring_to(database: Database, job: Job, *statuses: JobStatus) -> Job:
    """Move `job` through `statuses` as a coordinator would, and return what became of it."""
    tenure = Tenure(database, take_lease(database))
    for status in statuses:
        tenure.commit([write_of(job, status=status)])
    return Jobs(database).get(job.job_id)


def finish(database: Database, job: Job, *, at: datetime | None = None) -> Job:
    """Let `job` fail."""
    tenure = Tenure(database, take_lease(database))
    tenure.commit([write_of(job, status=JobStatus.FAILED, finished_at=at)])
    return Jobs(database).get(job.job_id)


def everything(database: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Return every row of every table."""
    with database.reading() as connection:
        return {
            table.name: [
                tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))
            ]
            for table in METADATA.sorted_tables
        }


@contextmanager
def nothing_moves(database: Database) -> Iterator[None]:
    """Fail unless every table holds afterwards what it held before."""
    before = everything(database)
    yield
    assert everything(database) == before


@contextmanager
def only_the_lease_moves(database: Database) -> Iterator[None]:
    """Fail unless the lease was renewed and everything else is what it was before."""
    before = everything(database)
    yield
    after = everything(database)
    assert before.pop("leases") != after.pop("leases")
    assert after == before
