"""The only way a coordinator writes: one tick in one transaction, fenced by its lease.

The transaction checks the lease's epoch, and no other transaction can write before it ends. So a
coordinator that was displaced without noticing changes nothing, however late its commit arrives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Final

from sqlalchemy import Connection, bindparam, select, update

from database.engine import Database
from database.history import prune_commits, prune_series
from database.job_rows import append_events
from database.leases import renew
from database.records import Clock, JobChange, JobWrite, Lease, utc_now, values_of
from database.tables import AGENTS, ATTEMPTS, COMMITS, EPOCHS, JOBS, MEMBERS, SERIES, WORKERS
from muster.contracts.errors import move
from muster.contracts.job.status import TRANSITIONS

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
_TABLES: Final = {
    "agents": AGENTS,
    "ranks": WORKERS,
    "attempts": ATTEMPTS,
    "members": MEMBERS,
    "commits": COMMITS,
    "epochs": EPOCHS,
    "series": SERIES,
}
"""By the field of `JobWrite` that holds their rows."""

_KEPT: Final = {"attempts": ("pid", "started_at", "step_at_start")}
"""A coordinator that took over knows these less exactly than the one before."""


class FencedWriter:
    """A coordinator's writes for as long as it holds `lease`."""

    def __init__(self, database: Database, lease: Lease, clock: Clock = utc_now) -> None:
        self._database = database
        self._lease = lease
        self._clock = clock
        self._beat = lease.beat
        """As of the last commit known to be durable."""
        self._durable_events: Mapping[str, int] = {}
        """By job uid: how many of the next events are durable although their commit failed."""
        self._attempted_events: Mapping[str, int] = {}
        """By job uid: how many events the last, failed commit contained."""
        self._upserts = {
            name: database.upsert(table, _KEPT.get(name, ())) for name, table in _TABLES.items()
        }

    def commit(self, writes: Sequence[JobWrite]) -> None:
        """Write all of it or nothing, and renew the lease; it is durable on return.

        Writes for a job that was deleted meanwhile are dropped, also if another job has its id now.
        A job's row that has its values already is not touched.

        After `DatabaseUnavailable` commit all of it again, together with what came since, each
        job's events in the same order. Events that turn out to be durable are not written twice.

        Raises `LeaseLost` if the lease is no longer held, and `IllegalMove` for a status that
        cannot follow the present one, which is a bug in the caller.
        """
        with self._database.writing() as connection:
            beat = renew(connection, self._lease)
            # No other transaction writes now, so the last attempt is over: if it was durable, it
            # has renewed the lease as well.
            if beat > self._beat + 1:
                self._durable_events = self._attempted_events
            self._beat = beat - 1
            self._attempted_events = {write.change.uid: len(write.events) for write in writes}
            if writes:
                self._write(connection, writes)
        self._beat, self._durable_events, self._attempted_events = beat, {}, {}

    async def acknowledge(self) -> bool:
        """Return whether followers have what was committed, see `Database.acknowledge`."""
        return await self._database.acknowledge()

    def _write(self, connection: Connection, writes: Sequence[JobWrite]) -> None:
        uids = [write.change.uid for write in writes]
        present = {row.uid: row for row in connection.execute(_PRESENT, {"uids": uids})}
        writes = [write for write in writes if write.change.uid in present]
        now = self._clock()
        changes = []
        for change in (write.change for write in writes):
            row = present[change.uid]
            if JobChange(**row._asdict()) == change:
                continue
            if row.status is not change.status:
                move(TRANSITIONS, row.status, change.status)
            new = {f"new_{name}": getattr(change, name) for name in _CHANGED}
            changes.append(new | {"id": change.job_id, "identity": change.uid, "now": now})
        if changes:
            connection.execute(_CHANGE, changes)
        for name, upsert in self._upserts.items():
            rows = [
                values_of(record) | {"job_id": write.change.job_id}
                for write in writes
                for record in getattr(write, name)
            ]
            if rows:
                connection.execute(upsert, rows)
        prune_commits(connection, [write.change.job_id for write in writes if write.commits])
        for write in writes:
            for name in write.series_due:
                prune_series(connection, write.change.job_id, name)
            new_events = write.events[self._durable_events.get(write.change.uid, 0) :]
            append_events(connection, write.change.job_id, new_events)
