"""Between rows and records, inside a transaction. A column is named like its field."""

from collections.abc import Collection
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, and_, bindparam, insert, or_, select, update

from muster.contracts.job import OPEN, TERMINAL, JobId, JobStatus
from muster.contracts.token import Token
from store.errors import JobMissing, JobOver
from store.records import (
    Commit,
    EpochRecord,
    Event,
    Incarnation,
    Job,
    JobChange,
    Lease,
    Member,
    Worker,
)
from store.tables import EVENTS, JOBS

_ONE: Final = select(JOBS).where(JOBS.c.job_id == bindparam("id"))
_APPEND: Final = insert(EVENTS)


def job_of(row: Row[Any]) -> Job:
    return Job(**row._asdict())


def find_job(connection: Connection, job_id: JobId) -> Job | None:
    row = connection.execute(_ONE, {"id": job_id}).one_or_none()
    return None if row is None else job_of(row)


def get_job(connection: Connection, job_id: JobId) -> Job:
    """Return the job, or raise `JobMissing`."""
    job = find_job(connection, job_id)
    if job is None:
        raise JobMissing(job_id)
    return job


def get_continuing_job(connection: Connection, job_id: JobId) -> Job:
    """Return the job, or raise `JobMissing`, or `JobOver` if it is over or was asked to end."""
    job = get_job(connection, job_id)
    if job.is_terminal or job.stop_request is not None:
        raise JobOver(job_id, job.status_shown)
    return job


def update_job(connection: Connection, job_id: JobId, now: datetime, values: dict[str, Any]) -> Job:
    """Give the job's row new `values`, and return what it then is."""
    changed = values | {"updated_at": now, "version": JOBS.c.version + 1}
    connection.execute(update(JOBS).where(JOBS.c.job_id == job_id).values(changed))
    return get_job(connection, job_id)


def values_of(
    record: Job | Worker | Incarnation | Member | Commit | EpochRecord | JobChange | Lease | Token,
) -> dict[str, Any]:
    """Return the fields of `record` by the names of their columns."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def status_shown_in(statuses: Collection[JobStatus]) -> ColumnElement[bool]:
    """Return the condition that `Job.status_shown` is one of `statuses`.

    In words that an index on the status answers, however many jobs are over.
    """
    wanted = frozenset(statuses)
    # A request to stop hides what an open job's row says.
    shown: ColumnElement[bool] = JOBS.c.status.in_(sorted(wanted & TERMINAL))
    if wanted & OPEN:
        unasked = JOBS.c.stop_request.is_(None)
        shown = or_(shown, and_(JOBS.c.status.in_(sorted(wanted & OPEN)), unasked))
    if JobStatus.STOPPING in wanted:
        asked = JOBS.c.stop_request.is_not(None)
        shown = or_(shown, and_(JOBS.c.status.in_(sorted(OPEN)), asked))
    return shown


def append_events(connection: Connection, job_id: JobId, events: Collection[Event]) -> None:
    """Add to the end of a job's events; the database numbers them."""
    if events:
        connection.execute(
            _APPEND,
            [
                {
                    "job_id": job_id,
                    "at": event.at,
                    "kind": event.kind,
                    "message": event.message,
                    "rank": event.rank,
                    "incarnation": event.incarnation,
                    "actor": event.actor,
                }
                for event in events
            ],
        )


def append_event(connection: Connection, job_id: JobId, event: Event) -> None:
    """Add one event."""
    append_events(connection, job_id, [event])
