"""A job's ranks, attempts, pool members, checkpoints and events.

`database.fenced_writer` writes the rows; the API adds only requests to join or leave a pool.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, TypeAlias, TypeVar

import sqlalchemy as sa

from database.engine import Database
from database.errors import DepartureRefused, JobChanged, MemberMissing, PoolFull
from database.job_rows import append_events, departures_of, get_continuing_job, update_job
from database.records import (
    AgentRecord,
    Attempt,
    Audit,
    CheckpointRecord,
    Clock,
    Event,
    HostRanks,
    Job,
    MemberRecord,
    RankRecord,
    RowVersion,
    WorkerRecord,
    utc_now,
    values_of,
)
from database.tables import (
    AGENTS,
    ATTEMPTS,
    COMMITS,
    DEPARTURES,
    EPOCHS,
    EVENTS,
    MEMBERS,
    SERIES,
    WORKERS,
)
from muster.contracts.job.status import JobId
from muster.contracts.messages.rank import EpochDone
from muster.contracts.pool import WorkerState
from muster.contracts.rank import ProcessState
from muster.contracts.series import ABANDONED_KEPT, LIVE_KEPT, SERIES_LIMIT, Point, compact

COMMITS_KEPT: Final = 1000
"""Checkpoint records per job; the audit shows no more, and a job may save every second."""

NEWEST: Final = 64
"""Points of a series that do not merge."""

Record = TypeVar("Record")

AttemptPosition: TypeAlias = tuple[datetime, int, int]
"""Start time, rank and number of an attempt: its place in the order of pages."""


def _of_job(table: sa.Table) -> sa.Select[Any]:
    columns = [column for column in table.c if column.name != "job_id"]
    return sa.select(*columns).where(table.c.job_id == sa.bindparam("id"))


def _of_jobs(table: sa.Table) -> sa.Select[Any]:
    wanted = table.c.job_id.in_(sa.bindparam("ids", expanding=True))
    return sa.select(table).where(wanted).order_by(*table.primary_key)


def _equal(one: sa.Table, other: sa.Table, *columns: str) -> sa.ColumnElement[bool]:
    return sa.and_(*(one.c[name] == other.c[name] for name in columns))


def _count(table: sa.Table) -> sa.Select[int]:
    return sa.select(sa.func.count()).select_from(table).where(table.c.job_id == sa.bindparam("id"))


def _last(table: sa.Table, *order: sa.Column[Any]) -> sa.Select[Any]:
    newest_first = [column.desc() for column in order]
    return _of_job(table).order_by(*newest_first).limit(sa.bindparam("most"))


def _end(column: str, order: Callable[[sa.Column[Any]], sa.UnaryExpression[Any]]) -> sa.Label[Any]:
    """Select a column of the first finite point, in an order of time, of a series."""
    point = SERIES.alias()
    is_own = sa.and_(point.c.job_id == sa.bindparam("id"), point.c.name == SERIES.c.name)
    found = sa.select(point.c[column]).where(is_own, point.c["count"] > 0)
    return found.order_by(order(point.c.at)).limit(1).scalar_subquery().label(column)


_AGENTS: Final = _of_jobs(AGENTS)
_RANKS: Final = _of_jobs(WORKERS)
_MEMBERS: Final = _of_jobs(MEMBERS)
_IS_ASKED: Final = sa.exists().where(_equal(DEPARTURES, MEMBERS, "job_id", "worker_id"))
_IS_LEAVING: Final = sa.and_(MEMBERS.c.state == WorkerState.ACTIVE.value, _IS_ASKED)
_STATE: Final = sa.case((_IS_LEAVING, WorkerState.DRAINING.value), else_=MEMBERS.c.state)
_POOL: Final = _MEMBERS.with_only_columns(
    *(_STATE.label("state") if column.name == "state" else column for column in MEMBERS.c)
)
# A newer attempt of its rank may be another member.
_PRESENT: Final = _POOL.join(WORKERS, _equal(WORKERS, MEMBERS, "job_id", "rank", "attempt"))
_POSITION: Final = (ATTEMPTS.c.started_at, ATTEMPTS.c.rank, ATTEMPTS.c.attempt)
_ATTEMPTS: Final = _last(ATTEMPTS, *_POSITION)
_LAST_EVENTS: Final = _last(EVENTS, EVENTS.c.event_id)
_NEXT_EVENTS: Final = (
    _of_job(EVENTS)
    .where(EVENTS.c.event_id > sa.bindparam("seen"))
    .order_by(EVENTS.c.event_id)
    .limit(sa.bindparam("most"))
)
_LAST_COMMITS: Final = _last(COMMITS, COMMITS.c.step)
_LAST_EPOCHS: Final = _last(EPOCHS, EPOCHS.c.epoch)
_PRUNE: Final = sa.delete(COMMITS).where(
    COMMITS.c.job_id == sa.bindparam("id"),
    COMMITS.c.step
    <= sa.select(COMMITS.c.step)
    .where(COMMITS.c.job_id == sa.bindparam("id"))
    .order_by(COMMITS.c.step.desc())
    .offset(COMMITS_KEPT)
    .limit(1)
    .scalar_subquery(),
)
_SERIES: Final = _of_job(SERIES).order_by(SERIES.c.name, SERIES.c.at)
_LAST_POINTS: Final = _last(SERIES, SERIES.c.at)
_SERIES_NAMES: Final = (
    sa.select(SERIES.c.name).where(SERIES.c.job_id == sa.bindparam("id")).distinct()
)
_EXTREMES: Final = (
    sa.select(
        SERIES.c.name,
        _end("first", sa.asc),
        sa.func.min(SERIES.c.least).label("least"),
        sa.func.max(SERIES.c.greatest).label("greatest"),
        _end("last", sa.desc),
        sa.cast(sa.func.sum(SERIES.c.not_finite), sa.BigInteger).label("not_finite"),
    )
    .where(SERIES.c.job_id == sa.bindparam("id"))
    .group_by(SERIES.c.name)
)
_IS_COMPLETE: Final = EPOCHS.c.samples == EPOCHS.c.expected_samples
_IS_EQUAL: Final = EPOCHS.c.hash_sum == EPOCHS.c.expected_hash_sum
# The rule of `EpochDone.exactly_once`, for all epochs of a job in one query.
_VERDICTS: Final = sa.select(
    sa.func.count().filter(sa.and_(_IS_COMPLETE, _IS_EQUAL)),
    sa.func.count().filter(
        sa.or_(EPOCHS.c.samples > EPOCHS.c.expected_samples, sa.and_(_IS_COMPLETE, ~_IS_EQUAL))
    ),
    sa.func.count(),
).where(EPOCHS.c.job_id == sa.bindparam("id"))


class History:
    """What happened to all jobs and to their ranks; each read sees one snapshot."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database = database
        self._clock = clock

    def agents_by_job(self, job_ids: Collection[JobId]) -> dict[JobId, list[AgentRecord]]:
        """Return the present or last agents of each of the jobs, by host."""
        with self._database.reading() as connection:
            return _records(connection, _AGENTS, job_ids, AgentRecord)

    def ranks(self, job_id: JobId) -> list[RankRecord]:
        """Return the job's ranks, lowest first; empty if there is no such job."""
        return self.ranks_by_job([job_id])[job_id]

    def ranks_by_job(self, job_ids: Collection[JobId]) -> dict[JobId, list[RankRecord]]:
        """Return the ranks of each of the jobs."""
        with self._database.reading() as connection:
            return _records(connection, _RANKS, job_ids, RankRecord)

    def workers(self, job_id: JobId) -> list[WorkerRecord]:
        """Return the job's ranks with their members of the pool, as views show them."""
        return self.workers_by_job([job_id])[job_id]

    def workers_by_job(self, job_ids: Collection[JobId]) -> dict[JobId, list[WorkerRecord]]:
        """Return the same of each of the jobs."""
        with self._database.reading() as connection:
            workers = _records(connection, _RANKS, job_ids, WorkerRecord)
            present = _records(connection, _PRESENT, job_ids, MemberRecord)
        for job_id in filter(present.get, present):
            of_rank = {member.rank: member for member in present[job_id]}
            workers[job_id] = [
                replace(worker, member=of_rank.get(worker.rank)) for worker in workers[job_id]
            ]
        return workers

    def attempts(
        self, job_id: JobId, limit: int, after: AttemptPosition | None = None
    ) -> list[Attempt]:
        """Return up to `limit` attempts of the job, the last one started first.

        `after` is the position of the last one seen: no attempt is shown twice or left out,
        whatever is started meanwhile.
        """
        query = _ATTEMPTS
        if after is not None:
            types = [column.type for column in _POSITION]
            query = query.where(sa.tuple_(*_POSITION) < sa.tuple_(*after, types=types))
        with self._database.reading() as connection:
            rows = connection.execute(query, {"id": job_id, "most": limit})
            return [Attempt(**row._asdict()) for row in rows]

    def attempt_count(self, job_id: JobId) -> int:
        with self._database.reading() as connection:
            return connection.execute(_count(ATTEMPTS), {"id": job_id}).scalar_one()

    def members_by_job(self, job_ids: Collection[JobId]) -> dict[JobId, list[MemberRecord]]:
        """Return the present and former members of each of the jobs, by worker id.

        One that was asked to leave is draining at once. Otherwise a new coordinator, which shrinks
        from the top, would remove others in their place.
        """
        with self._database.reading() as connection:
            return _records(connection, _POOL, job_ids, MemberRecord)

    def ranks_on_hosts(self, job_ids: Collection[JobId]) -> dict[JobId, HostRanks]:
        """Return how many ranks of each of the jobs are on each host."""
        with self._database.reading() as connection:
            return _ranks_on_hosts(connection, job_ids)

    def request_join(
        self,
        job_id: JobId,
        host: str,
        message: str,
        only: RowVersion | None = None,
        *,
        actor: str | None = None,
    ) -> Job:
        """Ask the job for one rank more, on `host` if it has room; return the changed job.

        Raises `JobMissing`, `JobOver`, `PoolFull`, or `JobChanged` if the row no longer has the
        version `only`.
        """
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            if only is not None and job.row_version != only:
                raise JobChanged(job_id)
            if job.world_size >= job.spec.largest_world_size:
                raise PoolFull(job_id, job.spec.largest_world_size)
            expected = job.expected_on(host, _ranks_on_hosts(connection, [job_id])[job_id])
            now = self._clock()
            event = Event(at=now, kind="join_requested", message=message, actor=actor)
            append_events(connection, job_id, [event])
            values = {
                "wanted_world_size": job.world_size + 1,
                "wanted_hosts": job.wanted_hosts | {host: expected + 1},
            }
            return update_job(connection, job_id, now, values)

    def request_departure(self, job_id: JobId, worker_id: int, *, actor: str | None = None) -> Job:
        """Ask a worker to leave and the job for one rank less; return the changed job.

        Raises `JobMissing`, `JobOver`, `MemberMissing`, or `DepartureRefused` for a worker that
        is not active, or if fewer than the job's `min_workers` would remain.
        """
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            pool = _records(connection, _MEMBERS, [job_id], MemberRecord)[job_id]
            _check_departure(job, pool, departures_of(connection, [job_id])[job_id], worker_id)
            now = self._clock()
            connection.execute(sa.insert(DEPARTURES).values(job_id=job_id, worker_id=worker_id))
            message = f"worker {worker_id} was asked to leave"
            event = Event(at=now, kind="departure_requested", message=message, actor=actor)
            append_events(connection, job_id, [event])
            values = {"wanted_world_size": job.world_size - 1, "wanted_hosts": {}}
            return update_job(connection, job_id, now, values)

    def events(self, job_id: JobId, limit: int, after: int | None = None) -> list[Event]:
        """Return the last events of the job, or the first ones after an id; oldest first."""
        with self._database.reading() as connection:
            if after is None:
                return _last_rows(connection, _LAST_EVENTS, job_id, limit, Event)
            rows = connection.execute(_NEXT_EVENTS, {"id": job_id, "seen": after, "most": limit})
            return [Event(**row._asdict()) for row in rows]

    def series(self, job_id: JobId, names: Collection[str]) -> tuple[list[str], list[Point]]:
        """Return the names of all series of the job, and the points of `names`; without any, all.

        The points of a name are in the order of time.
        """
        with self._database.reading() as connection:
            known = sorted(connection.execute(_SERIES_NAMES, {"id": job_id}).scalars())
            # Only known names: PostgreSQL refuses a text with a NUL character.
            wanted = [name for name in known if not names or name in names]
            query = _SERIES.where(SERIES.c.name.in_(wanted))
            rows = connection.execute(query, {"id": job_id})
            return known, [Point(**row._asdict()) for row in rows]

    def points_after(self, job_id: JobId, at: datetime | None) -> list[Point]:
        """Return the points of all series of the job after a time; without one only the last."""
        with self._database.reading() as connection:
            if at is None:
                return _last_rows(connection, _LAST_POINTS, job_id, 1, Point)
            query = _of_job(SERIES).where(SERIES.c.at > at).order_by(SERIES.c.at)
            return [Point(**row._asdict()) for row in connection.execute(query, {"id": job_id})]

    def last_points(self, job_ids: Collection[JobId]) -> dict[JobId, datetime]:
        """Return the time of the last point of each of the jobs that have any."""
        query = sa.select(SERIES.c.job_id, sa.func.max(SERIES.c.at)).group_by(SERIES.c.job_id)
        with self._database.reading() as connection:
            rows = connection.execute(query.where(SERIES.c.job_id.in_(job_ids)))
            return {job_id: at for job_id, at in rows}  # noqa: C416  rows are no pairs

    def series_extremes(self, job_id: JobId) -> dict[str, dict[str, float | None]]:
        """Return of each series, with what was abandoned: first, least, greatest, last value.

        `not_finite` is how many were not.
        """
        with self._database.reading() as connection:
            rows = connection.execute(_EXTREMES, {"id": job_id}).mappings()
            return {row["name"]: {key: row[key] for key in row if key != "name"} for row in rows}

    def audit(self, job_id: JobId, limit: int) -> Audit:
        """Return the last `limit` checkpoints and epochs of the job, and counts over all epochs."""
        with self._database.reading() as connection:
            exact, inexact, all_epochs = connection.execute(_VERDICTS, {"id": job_id}).one()
            all_commits = connection.execute(_count(COMMITS), {"id": job_id}).scalar_one()
            commits = _last_rows(connection, _LAST_COMMITS, job_id, limit, CheckpointRecord)
            epochs = _last_rows(connection, _LAST_EPOCHS, job_id, limit, EpochDone)
        return Audit(
            commits=commits,
            epochs=epochs,
            exact=exact,
            inexact=inexact,
            epochs_omitted=all_epochs - len(epochs),
            commits_omitted=all_commits - len(commits),
        )


def prune_commits(connection: sa.Connection, job_ids: Sequence[JobId]) -> None:
    """Delete all but the newest `COMMITS_KEPT` checkpoint records of these jobs."""
    if job_ids:
        connection.execute(_PRUNE, [{"id": job_id} for job_id in job_ids])


def prune_series(connection: sa.Connection, job_id: JobId, name: str) -> None:
    """Merge points of a series if there are too many."""
    is_own = sa.and_(SERIES.c.job_id == job_id, SERIES.c.name == name)
    count = sa.select(sa.func.count()).select_from(SERIES).where(is_own)
    if connection.execute(count).scalar_one() <= SERIES_LIMIT:
        return
    rows = connection.execute(_SERIES.where(SERIES.c.name == name), {"id": job_id})
    points = [Point(**row._asdict()) for row in rows]
    # The newest ones stay as they are: a commit that seems to have failed writes them once more.
    kept = compact(points[:-NEWEST], LIVE_KEPT, ABANDONED_KEPT) + points[-NEWEST:]
    connection.execute(sa.delete(SERIES).where(is_own))
    values = [values_of(point) | {"job_id": job_id} for point in kept]
    connection.execute(sa.insert(SERIES), values)


def _records(
    connection: sa.Connection, query: sa.Select[Any], job_ids: Collection[JobId], kind: type[Record]
) -> dict[JobId, list[Record]]:
    found: dict[JobId, list[Record]] = {job_id: [] for job_id in job_ids}
    result = connection.execute(query, {"ids": list(found)})
    names = list(result.keys())[1:]  # the first one is the job's id
    for row in result:
        found[row.job_id].append(kind(**dict(zip(names, row[1:], strict=True))))
    return found


def _ranks_on_hosts(
    connection: sa.Connection, job_ids: Collection[JobId]
) -> dict[JobId, HostRanks]:
    return {
        job_id: HostRanks(
            running=Counter(rank.host for rank in ranks if rank.state != ProcessState.EXITED),
            down=Counter(
                rank.host
                for rank in ranks
                if rank.state == ProcessState.EXITED and rank.in_service and not rank.finished
            ),
        )
        for job_id, ranks in _records(connection, _RANKS, job_ids, RankRecord).items()
    }


def _last_rows(
    connection: sa.Connection, query: sa.Select[Any], job_id: JobId, limit: int, kind: type[Record]
) -> list[Record]:
    rows = connection.execute(query, {"id": job_id, "most": limit}).all()
    return [kind(**row._asdict()) for row in reversed(rows)]


def _check_departure(
    job: Job, pool: Sequence[MemberRecord], leaving: Collection[int], worker_id: int
) -> None:
    """Raise the reason why `worker_id` cannot be asked to leave, if there is one."""
    states = {member.worker_id: member.state for member in pool}
    if worker_id not in states:
        raise MemberMissing(job.job_id, worker_id)
    if states[worker_id] != WorkerState.ACTIVE:
        why = f"it is {states[worker_id]}, not {WorkerState.ACTIVE}"
        raise DepartureRefused(job.job_id, worker_id, why)
    if worker_id in leaving:
        raise DepartureRefused(job.job_id, worker_id, "it was asked to already")
    staying = [
        one for one, state in states.items() if state == WorkerState.ACTIVE and one not in leaving
    ]
    if min(len(staying), job.world_size) <= job.spec.min_workers:
        raise DepartureRefused(
            job.job_id,
            worker_id,
            f"fewer than its min_workers ({job.spec.min_workers}) would be left",
        )
