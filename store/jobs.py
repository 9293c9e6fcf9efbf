"""The API's side of a job: what is wanted. What became of it is written by `store.tenure`."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Connection, Select, bindparam, delete, func, select, tuple_

from muster.contracts.job import OPEN, JobId, JobStatus, JobUid, StopRequest
from muster.contracts.spec import JobSpec
from store.clock import Clock, utc_now
from store.company import Work
from store.database import Database
from store.errors import JobChanged, JobExists, JobMissing, JobNotTerminal
from store.idempotency import AnswerBook, IdempotencyKey, find_answer
from store.records import Event, Job, RowVersion
from store.rows import (
    append_event,
    find_job,
    get_continuing_job,
    get_job,
    job_of,
    status_shown_in,
    update_job,
    values_of,
)
from store.selection import Selection, conditions
from store.tables import JOBS

_IS_UNFINISHED: Final = JOBS.c.status.in_(sorted(OPEN))
"""By "in", so that the index can be used."""
_UNFINISHED: Final = (
    select(JOBS.c.job_id, JOBS.c.uid, JOBS.c.version)
    .where(_IS_UNFINISHED)
    .order_by(JOBS.c.created_at, JOBS.c.job_id)
)
_THESE: Final = select(JOBS).where(JOBS.c.job_id.in_(bindparam("ids", expanding=True)))
_NOT_OVER: Final = select(JOBS.c.uid).where(
    JOBS.c.uid.in_(bindparam("uids", expanding=True)), _IS_UNFINISHED
)
_AT_ONCE: Final = 500
"""Ids in one statement."""
_NEWEST: Final = select(func.max(JOBS.c.created_at))
_OLDEST_FIRST: Final = (JOBS.c.created_at, JOBS.c.job_id)
_NEWEST_FIRST: Final = (JOBS.c.created_at.desc(), JOBS.c.job_id.desc())


class Jobs:
    """All jobs. A filter by status acts on `status_shown`; an empty one lets nothing through.

    An `actor` is who asked for a change, as its event says.
    """

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database = database
        self._clock = clock
        self._insert = database.insert_new(JOBS)
        self._answers = AnswerBook(database)

    def create(
        self,
        job_id: JobId,
        uid: JobUid,
        spec: JobSpec,
        *,
        message: str | None,
        idempotency: IdempotencyKey | None,
        actor: str | None = None,
    ) -> Job:
        """Return the new job, which is durable together with its event ``submitted``.

        With a key that was used before for the same request, the job as it was first answered.
        Raises `JobExists` or `IdempotencyConflict`.
        """
        work = self.creation(
            job_id, uid, spec, message=message, idempotency=idempotency, actor=actor
        )
        (outcome,) = self.create_all([work])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def create_all(self, creations: Sequence[Work[Job]]) -> list[Job | Exception]:
        """Do what `creation` has prepared, in one transaction; return what `create` would."""
        return self._database.write_together(creations)

    def creation(
        self,
        job_id: JobId,
        uid: JobUid,
        spec: JobSpec,
        *,
        message: str | None,
        idempotency: IdempotencyKey | None,
        actor: str | None = None,
    ) -> Work[Job]:
        """Return what `create` would do, for `create_all`."""

        def write(connection: Connection) -> Job:
            now = self._clock()
            if idempotency and (answered := find_answer(connection, idempotency, now)):
                return answered
            job = _submitted(job_id, uid, spec, message, _next_moment(connection, now))
            if connection.execute(self._insert, values_of(job)).rowcount == 0:
                raise JobExists(job_id)
            told = f"the job was submitted: {message}" if message else "the job was submitted"
            event = Event(at=now, kind="submitted", message=told, actor=actor)
            append_event(connection, job_id, event)
            if idempotency:
                self._answers.keep(connection, idempotency, job, now)
            return job

        return write

    def find(self, job_id: JobId) -> Job | None:
        with self._database.reading() as connection:
            return find_job(connection, job_id)

    def get(self, job_id: JobId) -> Job:
        """Return the job, or raise `JobMissing`."""
        with self._database.reading() as connection:
            return get_job(connection, job_id)

    def page(
        self, selection: Selection, limit: int, after: tuple[datetime, JobId] | None
    ) -> list[Job]:
        """Return up to `limit` jobs in the order of `selection`.

        `after` is (created_at, job_id) of the last one seen: whatever is created or deleted
        meanwhile, a job is neither shown twice nor left out.
        """
        order = _OLDEST_FIRST if selection.oldest_first else _NEWEST_FIRST
        query = select(JOBS).order_by(*order).limit(limit)
        query = query.where(*conditions(self._database, selection))
        if after is not None:
            seen = tuple_(*after, types=[JOBS.c.created_at.type, JOBS.c.job_id.type])
            place = tuple_(JOBS.c.created_at, JOBS.c.job_id)
            query = query.where(place > seen if selection.oldest_first else place < seen)
        return self._list(query)

    def count(self, selection: Selection) -> int:
        """Return how many jobs `selection` has on all pages."""
        query = select(func.count()).select_from(JOBS)
        query = query.where(*conditions(self._database, selection))
        with self._database.reading() as connection:
            return connection.execute(query).scalar_one()

    def unfinished(self, known: Iterable[Job] = ()) -> list[Job]:
        """Return what a coordinator works on, in the order of creation.

        A job that is `known` is read again only if its row has changed.
        """
        found = {job.row_version: job for job in known}
        with self._database.reading() as connection:
            rows = connection.execute(_UNFINISHED).all()
            new = [row.job_id for row in rows if (row.uid, row.version) not in found]
            for start in range(0, len(new), _AT_ONCE):
                read = connection.execute(_THESE, {"ids": new[start : start + _AT_ONCE]})
                found |= {job.row_version: job for job in map(job_of, read)}
        return [found[row.uid, row.version] for row in rows]

    def not_over(self, uids: Collection[JobUid]) -> set[JobUid]:
        """Return which of these jobs are not over; one that is gone is."""
        asked = list(uids)
        with self._database.reading() as connection:
            return {
                uid
                for start in range(0, len(asked), _AT_ONCE)
                for uid in connection.execute(
                    _NOT_OVER, {"uids": asked[start : start + _AT_ONCE]}
                ).scalars()
            }

    def finished_before(
        self, cutoff: datetime | None, statuses: Collection[JobStatus]
    ) -> list[Job]:
        """Return the jobs older than `cutoff` (None: of any age), oldest first.

        Age counts from the end of a job, and from its creation if it is not over.
        """
        since = func.coalesce(JOBS.c.finished_at, JOBS.c.created_at, type_=JOBS.c.created_at.type)
        query = select(JOBS).where(status_shown_in(statuses)).order_by(since, JOBS.c.job_id)
        return self._list(query if cutoff is None else query.where(since < cutoff))

    def request_stop(
        self,
        job_id: JobId,
        request: StopRequest,
        grace_seconds: float | None,
        why: str | None = None,
        *,
        actor: str | None = None,
        uid: JobUid | None = None,
    ) -> Job:
        """Ask for the end of a job, and return it as it then is.

        A job that is over stays as it is, and so does a request at least as strong as this one.
        `why` is for people. Raises `JobMissing`, also if the id is not that of the job `uid` now.
        """
        with self._database.writing() as connection:
            job = get_job(connection, job_id)
            if uid not in {None, job.uid}:
                raise JobMissing(job_id)
            if job.is_terminal or job.stop_request in (request, StopRequest.FORCED):
                return job
            now = self._clock()
            sentence = f"a {request} stop was requested" + (f": {why}" if why else "")
            event = Event(at=now, kind="stop_requested", message=sentence, actor=actor)
            append_event(connection, job_id, event)
            asked = {"stop_request": request, "stop_grace_seconds": grace_seconds}
            return update_job(connection, job_id, now, asked)

    def scale(
        self,
        job_id: JobId,
        world_size: int,
        only: RowVersion | None = None,
        *,
        actor: str | None = None,
    ) -> Job:
        """Ask for another number of ranks, and return the job as it then is.

        Whether its spec allows that number is the caller's to know. Raises `JobMissing`,
        `JobOver`, or `JobChanged` if the row is not in the version `only` any more.
        """
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            if only is not None and job.row_version != only:
                raise JobChanged(job_id)
            if job.world_size == world_size:
                return job
            now = self._clock()
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            sentence = f"the job is to have {ranks} instead of {job.world_size}"
            event = Event(at=now, kind="scale_requested", message=sentence, actor=actor)
            append_event(connection, job_id, event)
            return update_job(connection, job_id, now, {"wanted_world_size": world_size})

    def set_pause(self, job_id: JobId, *, paused: bool, actor: str | None = None) -> Job:
        """Ask for a pause, or for its end, and return the job as it then is.

        Raises `JobMissing` or `JobOver`.
        """
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            if job.pause_request == paused:
                return job
            now = self._clock()
            kind, wish = ("pause", "pause") if paused else ("resume", "go on")
            sentence = f"the job is to {wish}"
            event = Event(at=now, kind=f"{kind}_requested", message=sentence, actor=actor)
            append_event(connection, job_id, event)
            return update_job(connection, job_id, now, {"pause_request": paused})

    @contextmanager
    def keeping(self, job_id: JobId, uid: JobUid) -> Iterator[None]:
        """Let nobody delete a job that is over inside the block: its id can be no other job's.

        Nobody writes anything meanwhile, so it is for a moment. Raises as `delete` does.
        """
        with self._database.writing() as connection:
            _refuse_delete(connection, job_id, uid)
            yield

    def delete(self, job_id: JobId, uid: JobUid) -> None:
        """Remove a job that is over, with its workers and events.

        Raises `JobMissing` if the id is free or another job's by now, and `JobNotTerminal`.
        """
        with self._database.writing() as connection:
            _refuse_delete(connection, job_id, uid)
            connection.execute(delete(JOBS).where(JOBS.c.job_id == job_id))

    def _list(self, query: Select[Any]) -> list[Job]:
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
        return [job_of(row) for row in rows]


def _next_moment(connection: Connection, now: datetime) -> datetime:
    """Return `now`, or where a clock has gone back the first moment after the newest job.

    Who reads on from the last job that they have seen misses none that came later.
    """
    newest = connection.execute(_NEWEST).scalar_one()
    return now if newest is None else max(now, newest + timedelta(microseconds=1))


def _refuse_delete(connection: Connection, job_id: JobId, uid: JobUid) -> None:
    job = get_job(connection, job_id)
    if job.uid != uid:
        raise JobMissing(job_id)
    if not job.is_terminal:
        raise JobNotTerminal(job_id, job.status_shown)


def _submitted(
    job_id: JobId, uid: JobUid, spec: JobSpec, message: str | None, now: datetime
) -> Job:
    return Job(
        job_id=job_id,
        uid=uid,
        spec=spec,
        status=JobStatus.QUEUED,
        reason=None,
        message=message,
        created_at=now,
        updated_at=now,
        started_at=None,
        finished_at=None,
        exit_code=None,
        stop_request=None,
        stop_grace_seconds=None,
        generation=0,
        agent=None,
        agent_token_sha256=None,
        version=1,
    )
