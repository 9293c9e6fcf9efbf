"""The pools of synchronous jobs. `store.tenure` writes the members, the API who is to leave."""

from collections.abc import Collection, Sequence
from typing import Any, Final

from sqlalchemy import Connection, Row, bindparam, insert, select

from muster.contracts.job import JobId
from muster.contracts.pool import WorkerState
from store.clock import Clock, utc_now
from store.database import Database
from store.errors import DepartureRefused, MemberMissing
from store.records import Event, Job, Member
from store.rows import append_event, get_continuing_job, update_job
from store.tables import DEPARTURES, MEMBERS

_OF_JOBS: Final = (
    select(MEMBERS)
    .where(MEMBERS.c.job_id.in_(bindparam("ids", expanding=True)))
    .order_by(MEMBERS.c.job_id, MEMBERS.c.worker_id)
)
_LEAVING: Final = select(DEPARTURES).where(
    DEPARTURES.c.job_id.in_(bindparam("ids", expanding=True))
)


class Members:
    """The workers of all pools, the living and those that are gone."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database = database
        self._clock = clock

    def of_job(self, job_id: JobId) -> list[Member]:
        """Return the job's members by worker id; none if it has no pool, or there is no job."""
        return self.of_jobs([job_id])[job_id]

    def of_jobs(self, job_ids: Collection[JobId]) -> dict[JobId, list[Member]]:
        """Return the members of each of the jobs, of one moment."""
        with self._database.reading() as connection:
            return _members(connection, job_ids)

    def departures(self, job_ids: Collection[JobId]) -> dict[JobId, frozenset[int]]:
        """Return which workers of each of the jobs were asked to leave, gone or not."""
        with self._database.reading() as connection:
            return _departures(connection, job_ids)

    def request_departure(self, job_id: JobId, worker_id: int, *, actor: str | None = None) -> Job:
        """Ask a worker to leave and the job for one rank less; return the job as it then is.

        Raises `JobMissing`, `JobOver`, `MemberMissing`, or `DepartureRefused` for a worker that
        is not active, and where fewer than the job's `min_workers` would be left.
        """
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            pool = _members(connection, [job_id])[job_id]
            _refuse(job, pool, _departures(connection, [job_id])[job_id], worker_id)
            now = self._clock()
            connection.execute(insert(DEPARTURES).values(job_id=job_id, worker_id=worker_id))
            sentence = f"worker {worker_id} is to leave"
            event = Event(at=now, kind="departure_requested", message=sentence, actor=actor)
            append_event(connection, job_id, event)
            return update_job(connection, job_id, now, {"wanted_world_size": job.world_size - 1})


def _refuse(job: Job, pool: Sequence[Member], leaving: Collection[int], worker_id: int) -> None:
    """Raise what forbids the departure of `worker_id`, if anything does."""
    states = {member.worker_id: member.state for member in pool}
    if worker_id not in states:
        raise MemberMissing(job.job_id, worker_id)
    is_active = states[worker_id] == WorkerState.ACTIVE
    if worker_id in leaving and is_active:
        raise DepartureRefused(job.job_id, worker_id, "it was asked to already")
    if not is_active:
        why = f"it is {states[worker_id]}, not {WorkerState.ACTIVE}"
        raise DepartureRefused(job.job_id, worker_id, why)
    staying = [
        one for one, state in states.items() if state == WorkerState.ACTIVE and one not in leaving
    ]
    if min(len(staying), job.world_size) <= job.spec.min_workers:
        raise DepartureRefused(
            job.job_id,
            worker_id,
            f"fewer than its min_workers ({job.spec.min_workers}) would be left",
        )


def _members(connection: Connection, job_ids: Collection[JobId]) -> dict[JobId, list[Member]]:
    found: dict[JobId, list[Member]] = {job_id: [] for job_id in job_ids}
    for row in connection.execute(_OF_JOBS, {"ids": list(found)}):
        found[row.job_id].append(_member(row))
    return found


def _departures(connection: Connection, job_ids: Collection[JobId]) -> dict[JobId, frozenset[int]]:
    found: dict[JobId, set[int]] = {job_id: set() for job_id in job_ids}
    for row in connection.execute(_LEAVING, {"ids": list(found)}):
        found[row.job_id].add(row.worker_id)
    return {job_id: frozenset(workers) for job_id, workers in found.items()}


def _member(row: Row[Any]) -> Member:
    values = row._asdict()
    del values["job_id"]
    return Member(**values)
