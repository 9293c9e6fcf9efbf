"""Between rows and records. A column is named like its field, so that this is all there is."""

from collections.abc import Collection
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, and_, case, insert

from muster.contracts.job import TERMINAL, JobId, JobStatus
from store.records import Event, Job, JobChange, Lease, Worker
from store.tables import EVENTS, JOBS

_STATUS_SHOWN: Final = case(
    (
        and_(JOBS.c.stop_request.is_not(None), JOBS.c.status.not_in(sorted(TERMINAL))),
        JobStatus.STOPPING,
    ),
    else_=JOBS.c.status,
)


def job_of(row: Row[Any]) -> Job:
    return Job(**row._asdict())


def values_of(record: Job | Worker | JobChange | Lease) -> dict[str, Any]:
    """Return the fields of `record` by the names of their columns."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def status_shown_in(statuses: Collection[JobStatus]) -> ColumnElement[bool]:
    """Return the condition that `Job.status_shown` is one of `statuses`."""
    return _STATUS_SHOWN.in_(sorted(statuses))


def append_events(connection: Connection, job_id: JobId, events: Collection[Event]) -> None:
    """Add to the end of a job's events; the database numbers them."""
    if events:
        connection.execute(
            insert(EVENTS),
            [
                {
                    "job_id": job_id,
                    "at": event.at,
                    "kind": event.kind,
                    "message": event.message,
                    "rank": event.rank,
                    "incarnation": event.incarnation,
                }
                for event in events
            ],
        )


def append_event(
    connection: Connection, job_id: JobId, at: datetime, kind: str, message: str
) -> None:
    """Add one event of the job as a whole."""
    append_events(connection, job_id, [Event(at=at, kind=kind, message=message)])
