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

from muster.contracts.job import move
from store.clock import Clock, utc_now
from store.commits import prune_commits
from store.database import Database
from store.leases import beat
from store.records import JobChange, JobWrite, Lease
from store.rows import append_events, values_of
from store.tables import COMMITS, EPOCHS, INCARNATIONS, JOBS, MEMBERS, WORKERS

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
_REPLACED: Final = {
    "workers": WORKERS,
    "incarnations": INCARNATIONS,
    "members": MEMBERS,
    "commits": COMMITS,
    "epochs": EPOCHS,
}
"""By the field of `JobWrite` that holds their rows."""

_KEPT: Final = {"incarnations": ("pid", "started_at", "step_at_start")}
"""What a coordinator that came later would know less well."""


class Tenure:
    """A coordinator's writes for as long as it holds `lease`."""

    def __init__(self, database: Database, lease: Lease, clock: Clock = utc_now) -> None:
        self._database = database
        self._lease = lease
        self._clock = clock
        self._beats = lease.beat
        """As of the last commit that is known to be durable."""
        self._told: Mapping[str, int] = {}
        """How many of a job's events are durable though their commit has failed."""
        self._in_doubt: Mapping[str, int] = {}
        """How many will be if the last attempt, which has failed, was durable."""
        self._upserts = {
            field: database.upsert(table, _KEPT.get(field, ()))
            for field, table in _REPLACED.items()
        }

    def commit(self, writes: Sequence[JobWrite]) -> None:
        """Write all of it or nothing, and renew the lease; it is durable on return.

        What concerns a job that was deleted meanwhile is dropped, also if its id belongs to
        another job by now. A job's row that has its values already is not touched.

        After `StoreUnavailable` all of it, with what came to it since, has to be committed again;
        of each job the events in the same order. What was durable nevertheless is not repeated.

        Raises `LeaseLost` if the lease is no longer held, and `IllegalMove` for a status that
        cannot follow the present one, which is a bug of the caller.
        """
        with self._database.writing() as connection:
            beats = beat(connection, self._lease)
            self._settle(beats)
            self._in_doubt = {write.change.uid: len(write.events) for write in writes}
            self._write(connection, writes)
        self._beats, self._told, self._in_doubt = beats, {}, {}

    def _settle(self, beats: int) -> None:
        """Learn what became of the last attempt; nobody else writes now, so it is over."""
        if beats > self._beats + 1:
            self._told = self._in_doubt
        self._beats = beats - 1

    def _write(self, connection: Connection, writes: Sequence[JobWrite]) -> None:
        if not writes:
            return
        present = _present(connection, writes)
        ours = [write for write in writes if write.change.uid in present]
        _change(connection, present, ours, self._clock())
        self._replace(connection, ours)
        prune_commits(connection, [write.change.job_id for write in ours if write.commits])
        for write in ours:
            untold = write.events[self._told.get(write.change.uid, 0) :]
            append_events(connection, write.change.job_id, untold)

    def _replace(self, connection: Connection, writes: Sequence[JobWrite]) -> None:
        for field, upsert in self._upserts.items():
            rows = [
                values_of(record) | {"job_id": write.change.job_id}
                for write in writes
                for record in getattr(write, field)
            ]
            if rows:
                connection.execute(upsert, rows)


def _present(connection: Connection, writes: Sequence[JobWrite]) -> dict[str, Row[Any]]:
    """Return the rows of those jobs that still exist, by uid."""
    rows = connection.execute(_PRESENT, {"uids": [write.change.uid for write in writes]})
    return {row.uid: row for row in rows}


def _change(
    connection: Connection,
    present: Mapping[str, Row[Any]],
    writes: Sequence[JobWrite],
    now: datetime,
) -> None:
    changed = []
    for change in (write.change for write in writes):
        row = present[change.uid]
        if JobChange(**row._asdict()) == change:
            continue
        if row.status is not change.status:
            move(row.status, change.status)
        changed.append(_parameters(change, now))
    if changed:
        connection.execute(_CHANGE, changed)


def _parameters(change: JobChange, now: datetime) -> dict[str, Any]:
    new = {f"new_{name}": getattr(change, name) for name in _CHANGED}
    return new | {"id": change.job_id, "identity": change.uid, "now": now}
