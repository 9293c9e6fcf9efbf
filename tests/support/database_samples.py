"""Sample rows and helpers for tests that use a database."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import select

from database.engine import Database
from database.fenced_writer import FencedWriter
from database.idempotency import IdempotencyKey
from database.jobs import Jobs, NewJob
from database.leases import Leases
from database.records import (
    Attempt,
    CheckpointRecord,
    Job,
    JobChange,
    JobWrite,
    Lease,
    MemberRecord,
    ProcessRecord,
    RankRecord,
)
from database.tables import METADATA
from muster.contracts.host import HostFacts
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import JobId, JobStatus, JobUid
from muster.contracts.messages.rank import EpochDone
from muster.contracts.rank import NO_PROGRESS, RankProgress
from muster.contracts.series import Point, aggregate

NOON = datetime(2026, 3, 1, 12, 0, 0, 123457, tzinfo=UTC)
PROCESS = ProcessRecord(pid=4711, start_ticks=2**40, boot_id="b00t", node="höst-1", pid_namespace=1)
FACTS = HostFacts(
    version="0.3.0",
    python="3.12.1",
    machine="x86_64",
    blas_kernel="Haswell",
    numpy="2.4.6",
    simd=("X86_V3",),
    cpu_cores=8,
    ram_mb=16_000,
    gpus=("GPU 0: NVIDIA H100 (UUID: GPU-1)",),
)
EVERY_STATUS = list(JobStatus)


@dataclass
class SteppingClock:
    """A clock that advances by `step` with every reading."""

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
    new = NewJob(
        JobId(job_id),
        JobUid(uid or f"uid-{job_id}"),
        spec or JobSpec(world_size=2),
        idempotency=None if key is None else idempotency_key(key),
    )
    return store(jobs, new)


def store(jobs: Jobs, new: NewJob) -> Job:
    """Return the stored job, or raise why it is not stored."""
    (outcome,) = jobs.create([new])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def idempotency_key(key: str, *, principal: str = "ada", body: str = "body") -> IdempotencyKey:
    return IdempotencyKey(principal=principal, key=key, request_sha256=body)


def change_of(job: Job, **new: object) -> JobChange:
    """Return the change of `job` to the values in `new`."""
    return JobChange(
        **{name: new.get(name, getattr(job, name)) for name in JobChange.__dataclass_fields__}
    )


def write_of(job: Job, **new: object) -> JobWrite:
    """Return the write of `new` for `job`: rows, or values of the job itself."""
    rows = {name: new.pop(name) for name in list(new) if name in JobWrite.__dataclass_fields__}
    return JobWrite(change=change_of(job, **new), **rows)


def worker(rank: int, **new: object) -> RankRecord:
    """Return a rank that lives; `new` are fields of it or of its progress."""
    facts = {name: new.pop(name) for name in RankProgress.__struct_fields__ if name in new}
    progress = msgspec.structs.replace(NO_PROGRESS, **facts)
    row = {"rank": rank, "attempt": 0, "state": "live", "process": PROCESS, **new}
    return RankRecord(**{"progress": progress, **row})


def points(*losses: float, name: str = "loss", since: int = 0, second: int = 0) -> list[Point]:
    """Return points of a series, one for each step after `since` and for each second."""
    return [
        Point(
            **msgspec.structs.asdict(aggregate([loss])),
            name=name,
            at=NOON + timedelta(seconds=second + number),
            since=since + number,
            step=since + number + 1,
        )
        for number, loss in enumerate(losses)
    ]


def attempt(rank: int, number: int, **new: object) -> Attempt:
    return Attempt(
        **{
            "rank": rank,
            "attempt": number,
            "pid": 4711,
            "started_at": NOON,
            "step_at_start": 5,
            **new,
        }
    )


def member(worker_id: int, **new: object) -> MemberRecord:
    return MemberRecord(
        **{
            "worker_id": worker_id,
            "rank": worker_id,
            "attempt": 0,
            "state": "active",
            "node": "höst-1",
            "joined_at": NOON,
            "joined_step": 0,
            **new,
        }
    )


def commit(step: int, **new: object) -> CheckpointRecord:
    return CheckpointRecord(
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


def epoch(number: int, **new: object) -> EpochDone:
    """Return an epoch that was read exactly once, unless `new` says otherwise."""
    return EpochDone(
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
    seen = leases.current()
    return leases.take(owner, PROCESS, "127.0.0.1:1", displacing=seen)


def bring_to(database: Database, job: Job, *statuses: JobStatus) -> Job:
    """Move `job` through `statuses` as a coordinator does, and return it."""
    writer = FencedWriter(database, take_lease(database))
    for status in statuses:
        writer.commit([write_of(job, status=status)])
    return Jobs(database).get(job.job_id)


def finish(database: Database, job: Job, *, at: datetime | None = None) -> Job:
    """Move `job` to FAILED."""
    writer = FencedWriter(database, take_lease(database))
    writer.commit([write_of(job, status=JobStatus.FAILED, finished_at=at)])
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
    """Assert that the block changes no row."""
    before = everything(database)
    yield
    assert everything(database) == before


@contextmanager
def only_the_lease_moves(database: Database) -> Iterator[None]:
    """Assert that the block renews the lease and changes no other row."""
    before = everything(database)
    yield
    after = everything(database)
    assert before.pop("leases") != after.pop("leases")
    assert after == before
