"""Rows of jobs, inside the transaction of a caller."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from database.errors import JobMissing, JobNotTerminal, JobOver
from database.records import Event, Job, values_of
from database.tables import DEPARTURES, EVENTS, JOBS
from muster.contracts.job.status import OPEN, JobId, JobUid
from muster.contracts.location import HOME_MARK, expand_home, moved_job

_BATCH: Final = 500  # ids in one statement

IS_UNFINISHED: Final = JOBS.c.status.in_(sorted(OPEN))
_UNFINISHED: Final = (
    sa.select(JOBS.c.job_id, JOBS.c.uid, JOBS.c.version)
    .where(IS_UNFINISHED)
    .order_by(JOBS.c.created_at, JOBS.c.job_id)
)
COLUMNS: Final = [JOBS.c[field.name] for field in fields(Job)]
_ONE: Final = sa.select(*COLUMNS).where(JOBS.c.job_id == sa.bindparam("id"))
_SEVERAL: Final = sa.select(*COLUMNS).where(JOBS.c.job_id.in_(sa.bindparam("ids", expanding=True)))
_DEPARTURES: Final = sa.select(DEPARTURES).where(
    DEPARTURES.c.job_id.in_(sa.bindparam("ids", expanding=True))
)
APPEND_EVENTS: Final = sa.insert(EVENTS)


def get_continuing_job(connection: sa.Connection, job_id: JobId) -> Job:
    """Return the job; raise `JobMissing`, or `JobOver` if it is over or a stop was requested."""
    job = get_job(connection, job_id)
    if job.is_terminal or job.stop_request is not None:
        raise JobOver(job_id, job.status_shown)
    return job


def update_job(
    connection: sa.Connection, job_id: JobId, now: datetime, values: Mapping[str, object]
) -> Job:
    """Set columns of the job's row, and return the job."""
    changed = {**values, "updated_at": now, "version": JOBS.c.version + 1}
    connection.execute(sa.update(JOBS).where(JOBS.c.job_id == job_id).values(changed))
    return get_job(connection, job_id)


def append_events(connection: sa.Connection, job_id: JobId, events: Collection[Event]) -> None:
    """Append to a job's events; the database numbers them."""
    if events:
        connection.execute(APPEND_EVENTS, [event_row(job_id, event) for event in events])


def departures_of(
    connection: sa.Connection, job_ids: Collection[JobId]
) -> dict[JobId, frozenset[int]]:
    """Return which workers of each of the jobs were asked to leave, present or not."""
    found: dict[JobId, set[int]] = {job_id: set() for job_id in job_ids}
    for row in connection.execute(_DEPARTURES, {"ids": list(found)}):
        found[row.job_id].add(row.worker_id)
    return {job_id: frozenset(workers) for job_id, workers in found.items()}


def unfinished_jobs(connection: sa.Connection, known: Iterable[Job]) -> list[Job]:
    found = {job.row_version: job for job in known}
    rows = connection.execute(_UNFINISHED).all()
    new = [row.job_id for row in rows if (row.uid, row.version) not in found]
    for start in range(0, len(new), _BATCH):
        read = connection.execute(_SEVERAL, {"ids": new[start : start + _BATCH]})
        found |= {job.row_version: job for job in map(job_of, read)}
    return [found[row.uid, row.version] for row in rows]


def event_row(job_id: JobId, event: Event) -> dict[str, Any]:
    row = values_of(event) | {"job_id": job_id}
    del row["event_id"]
    return row


def find_job(connection: sa.Connection, job_id: JobId) -> Job | None:
    row = connection.execute(_ONE, {"id": job_id}).one_or_none()
    return None if row is None else job_of(row)


def get_job(connection: sa.Connection, job_id: JobId) -> Job:
    job = find_job(connection, job_id)
    if job is None:
        raise JobMissing(job_id)
    return job


def job_of(row: sa.Row[Any]) -> Job:
    job = Job(**row._asdict())
    spec = moved_job(job.spec, ((HOME_MARK, expand_home("~")),))
    return job if spec is job.spec else dataclasses.replace(job, spec=spec)


def values_to_store(job: Job, *, is_at_home: bool) -> dict[str, Any]:
    """Return the values of a new row; in a household paths are those of the node that leads."""
    if is_at_home:
        job = dataclasses.replace(job, spec=moved_job(job.spec, ((expand_home("~"), HOME_MARK),)))
    return values_of(job)


def check_deletion(connection: sa.Connection, job_id: JobId, uid: JobUid) -> None:
    job = get_job(connection, job_id)
    if job.uid != uid:
        raise JobMissing(job_id)
    if not job.is_terminal:
        raise JobNotTerminal(job_id, job.status_shown)
