"""The only way a coordinator writes: everything of one tick in one transaction, under its lease.

The lease's epoch is checked in that same transaction, and no other transaction can write before
it ends. So a coordinator that was displaced without noticing changes nothing, however late its
commit arrives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, select, update

from muster.contracts.job import JobId, move
from store.clock import Clock, utc_now
from store.database import Database
from store.leases import beat
from store.records import Event, JobChange, Lease, Worker
from store.rows import append_events, values_of
from store.tables import JOBS, WORKERS

_CHANGED: Final = [field.name for field in fields(JobChange) if field.name not in ("job_id", "uid")]
_PRESENT: Final = select(JOBS.c.job_id, JOBS.c.uid, *[JOBS.c[name] for name in _CHANGED]).where(
    JOBS.c.uid.in_(bindparam("uids", expanding=True))
)
_CHANGE: Final = (
    update(JOBS)
    .where(JOBS.c.job_id == bindparam("id"), JOBS.c.uid == bindparam("identity"))
    .values(
        {JOBS.c[name]: bindparam(f"new_{name}", type_=JOBS.c[name].type) for name in _CHANGED}
        | {JOBS.c.updated_at: bindparam("now"), JOBS.c.version: JOBS.c.version + 1}
    )
)


class Tenure:
    """A coordinator's writes for as long as it holds `lease`."""

    def __init__(self, database: Database, lease: Lease, clock: Clock = utc_now) -> None:
        self._database = database
        self._lease = lease
        self._clock = clock
        self._write_workers = database.upsert(WORKERS)

    def commit(
        self,
        jobs: Sequence[JobChange],
        workers: Mapping[JobId, Sequence[Worker]],
        events: Mapping[JobId, Sequence[Event]],
    ) -> None:
        """Write all of it or nothing, and renew the lease; it is durable on return.

        What concerns a job that was deleted meanwhile is dropped, also if its id belongs to
        another job by now: so `jobs` must name every job of `workers` and `events`, changed or
        not (a ValueError otherwise). A job's row that has these values already is not touched.

        Raises `LeaseLost` if the lease is no longer held, and `IllegalMove` for a status that
        cannot follow the present one, which is a bug of the caller.
        """
        _check_named(jobs, workers, events)
        with self._database.writing() as connection:
            beat(connection, self._lease)
            if not jobs:
                return
            present = _present(connection, jobs)
            _change(connection, present, jobs, self._clock())
            ours = {change.job_id for change in jobs if change.uid in present}
            self._replace(connection, {key: workers[key] for key in workers.keys() & ours})
            for job_id, happened in events.items():
                if job_id in ours:
                    append_events(connection, job_id, happened)

    def _replace(self, connection: Connection, workers: Mapping[JobId, Sequence[Worker]]) -> None:
        rows = [
            values_of(worker) | {"job_id": job_id}
            for job_id, ranks in workers.items()
            for worker in ranks
        ]
        if rows:
            connection.execute(self._write_workers, rows)


def _check_named(
    jobs: Sequence[JobChange],
    workers: Mapping[JobId, Sequence[Worker]],
    events: Mapping[JobId, Sequence[Event]],
) -> None:
    unnamed = (workers.keys() | events.keys()) - {change.job_id for change in jobs}
    if unnamed:
        raise ValueError(f"no JobChange says which jobs these are: {', '.join(sorted(unnamed))}")


def _present(connection: Connection, jobs: Sequence[JobChange]) -> dict[str, Row[Any]]:
    """Return the rows of those jobs that still exist, by uid."""
    rows = connection.execute(_PRESENT, {"uids": [change.uid for change in jobs]})
    return {row.uid: row for row in rows}


def _change(
    connection: Connection,
    present: Mapping[str, Row[Any]],
    jobs: Sequence[JobChange],
    now: datetime,
) -> None:
    changed = []
    for change in jobs:
        row = present.get(change.uid)
        if row is None or JobChange(**row._asdict()) == change:
            continue
        if row.status is not change.status:
            move(row.status, change.status)
        changed.append(_parameters(change, now))
    if changed:
        connection.execute(_CHANGE, changed)


def _parameters(change: JobChange, now: datetime) -> dict[str, Any]:
    new = {f"new_{name}": getattr(change, name) for name in _CHANGED}
    return new | {"id": change.job_id, "identity": change.uid, "now": now}
