"""The API's side of jobs: the desired state. `database.fenced_writer` writes the actual state."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
import sqlalchemy as sa

from database.engine import Database
from database.errors import (
    CheckpointPending,
    JobChanged,
    JobExists,
    JobMissing,
    JobOver,
)
from database.hosts import Hosts
from database.idempotency import Answers, IdempotencyKey, answer_to
from database.job_rows import (
    APPEND_EVENTS,
    COLUMNS,
    IS_UNFINISHED,
    append_events,
    check_deletion,
    departures_of,
    event_row,
    find_job,
    get_continuing_job,
    get_job,
    job_of,
    unfinished_jobs,
    update_job,
    values_to_store,
)
from database.records import Clock, Event, Job, RowVersion, utc_now
from database.tables import AGENTS, HOSTS, JOBS
from muster.contracts.job.spec import JobSpec
from muster.contracts.job.status import OPEN, TERMINAL, JobId, JobStatus, JobUid, StopRequest
from muster.contracts.leaderboard import SWEEP_LABEL
from muster.contracts.location import HOME_MARK, expand_home, moved
from muster.contracts.views.history import FaultView

_MICROSECOND: Final = timedelta(microseconds=1)

FAULTS_KEPT: Final = 16
"""A coordinator takes them at once; of more between two of its reads the first are lost."""

_BY_UID: Final = sa.select(*COLUMNS).where(JOBS.c.uid.in_(sa.bindparam("uids", expanding=True)))
_NOT_OVER: Final = sa.select(JOBS.c.uid).where(IS_UNFINISHED)
_TAKEN: Final = sa.select(JOBS.c.job_id).where(
    JOBS.c.job_id.in_(sa.bindparam("ids", expanding=True))
)
_ACTIVE: Final = sa.select(*COLUMNS).where(JOBS.c.status.in_(sorted(OPEN - {JobStatus.QUEUED})))
_STATUSES: Final = sa.select(JOBS.c.status, sa.func.count()).group_by(JOBS.c.status)
_STOPPING: Final = _STATUSES.where(IS_UNFINISHED, JOBS.c.stop_request.is_not(None))
_NEWEST: Final = sa.select(sa.func.max(JOBS.c.created_at))
_CREATE: Final = sa.insert(JOBS)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobQuery:
    """Filters, all of which must match, and an order; without a filter it selects all jobs."""

    statuses: Collection[JobStatus] = tuple(JobStatus)
    """Compared with `Job.status_shown`; an empty collection selects nothing."""
    name: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    """No label name contains a quote, a backslash or a control character."""
    created_after: datetime | None = None
    created_before: datetime | None = None
    oldest_first: bool = False


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be stored; `actor` is the caller who submits it."""

    job_id: JobId
    uid: JobUid
    spec: JobSpec
    message: str | None = None
    idempotency: IdempotencyKey | None = None
    actor: str | None = None


class Jobs:
    """All jobs. `actor` is the caller who asked for a change, for the job's event."""

    def __init__(self, database: Database, clock: Clock = utc_now) -> None:
        self._database = database
        self._clock = clock
        self._answers = Answers(database, clock)
        self._hosts = Hosts(database)

    def create(self, new_jobs: Sequence[NewJob]) -> list[Job | Exception]:
        """Return each new job, which is durable together with its event ``submitted``.

        A key that was used before for the same request returns the original response. In place of
        a job that is not stored stands a `JobExists`, `IdempotencyConflict` or `DatabaseError`.
        """
        return self._database.write_together(new_jobs, self._create_in)

    def _create_in(
        self, connection: sa.Connection, new_jobs: Sequence[NewJob]
    ) -> list[Job | Exception]:
        """Create all with as many statements as one takes; no other transaction writes now."""
        now = self._clock()
        keys = [new.idempotency for new in new_jobs if new.idempotency]
        answers = self._answers.find_in(connection, keys, now)
        taken = set(connection.scalars(_TAKEN, {"ids": [new.job_id for new in new_jobs]}))
        # If a clock has gone back: a reader who pages on from the newest job misses none.
        newest = connection.scalar(_NEWEST)
        created_at = max(now, newest + _MICROSECOND) if newest else now
        created: list[Job] = []
        events: list[dict[str, Any]] = []
        kept: list[tuple[IdempotencyKey, Job]] = []
        outcomes: list[Job | Exception] = []
        for new in new_jobs:
            key = new.idempotency
            answer = answer_to(key, answers) if key else None
            if answer is not None or new.job_id in taken:
                outcomes.append(answer or JobExists(new.job_id))
                continue
            job = Job(
                job_id=new.job_id,
                uid=new.uid,
                spec=new.spec,
                status=JobStatus.QUEUED,
                message=new.message,
                created_at=created_at,
                updated_at=created_at,
            )
            created_at += _MICROSECOND
            taken.add(job.job_id)
            created.append(job)
            outcomes.append(job)
            text = "the job was submitted" + (f": {new.message}" if new.message else "")
            event = Event(at=now, kind="submitted", message=text, actor=new.actor)
            events.append(event_row(job.job_id, event))
            if key:
                answers[key.principal, key.key] = key.request_sha256, job
                kept.append((key, job))
        if created:
            is_at_home = self._database.replication is not None
            values = [values_to_store(job, is_at_home=is_at_home) for job in created]
            connection.execute(_CREATE, values)
            connection.execute(APPEND_EVENTS, events)
            self._answers.keep_in(connection, kept, now)
        return outcomes

    def find(self, job_id: JobId) -> Job | None:
        with self._database.reading() as connection:
            return find_job(connection, job_id)

    def get(self, job_id: JobId) -> Job:
        """Return the job, or raise `JobMissing`."""
        with self._database.reading() as connection:
            return get_job(connection, job_id)

    def page(self, query: JobQuery, limit: int, after: tuple[datetime, JobId] | None) -> list[Job]:
        """Return up to `limit` jobs in the order of `query`.

        `after` is (created_at, job_id) of the last one seen: no job is shown twice or left out,
        whatever is created or deleted meanwhile.
        """
        position = (JOBS.c.created_at, JOBS.c.job_id)
        order = position if query.oldest_first else [column.desc() for column in position]
        rows = sa.select(*COLUMNS).where(*self._conditions(query)).order_by(*order).limit(limit)
        if after is not None:
            seen = sa.tuple_(*after, types=[column.type for column in position])
            here = sa.tuple_(*position)
            rows = rows.where(here > seen if query.oldest_first else here < seen)
        return self._list(rows)

    def count(self, query: JobQuery) -> int:
        """Return how many jobs match `query`."""
        rows = sa.select(sa.func.count()).select_from(JOBS).where(*self._conditions(query))
        with self._database.reading() as connection:
            return connection.execute(rows).scalar_one()

    def statuses(self) -> dict[JobStatus, int]:
        """Return how many jobs have each status that `Job.status_shown` may be."""
        with self._database.reading() as connection:
            # Without a condition an index holds all that is counted.
            found, hidden = (
                dict.fromkeys(JobStatus, 0) | {row[0]: row[1] for row in connection.execute(query)}
                for query in (_STATUSES, _STOPPING)
            )
        found[JobStatus.STOPPING] += sum(hidden.values())
        return {status: count - hidden[status] for status, count in found.items()}

    def lately_active(self, ended_after: datetime, limit: int) -> list[Job]:
        """Return the jobs that have left the queue and are not over, and the last that ended.

        Those ended after a time, and are `limit` at most.
        """
        ended = sa.select(*COLUMNS).where(JOBS.c.finished_at > ended_after)
        # Not one query: SQLite would read all jobs in the order of its index.
        newest_first = ended.order_by(JOBS.c.finished_at.desc()).limit(limit)
        with self._database.reading() as connection:
            return [
                job_of(row)
                for query in (_ACTIVE, newest_first)
                for row in connection.execute(query)
            ]

    def unfinished(self, known: Iterable[Job] = ()) -> list[Job]:
        """Return the jobs that a coordinator works on, in the order of creation.

        A job in `known` is read again only if its row has changed.
        """
        with self._database.reading() as connection:
            return unfinished_jobs(connection, known)

    def unfinished_with_departures(
        self, known: Iterable[Job]
    ) -> tuple[list[Job], dict[JobId, frozenset[int]]]:
        """Return them, and which workers of the synchronous ones were asked to leave.

        Both are of one moment, because a request to leave also takes a rank from its job.
        """
        with self._database.reading() as connection:
            jobs = unfinished_jobs(connection, known)
            synchronous = [job.job_id for job in jobs if job.spec.mode == "synchronous"]
            return jobs, departures_of(connection, synchronous)

    def by_uid(self, uids: Collection[JobUid]) -> dict[JobUid, Job]:
        """Return those of these jobs that exist."""
        with self._database.reading() as connection:
            rows = connection.execute(_BY_UID, {"uids": list(uids)})
            return {job.uid: job for job in map(job_of, rows)}

    def not_over(self, uids: Collection[JobUid]) -> set[JobUid]:
        """Return which of these jobs are not over; a deleted job is over."""
        with self._database.reading() as connection:
            return {*uids}.intersection(connection.scalars(_NOT_OVER))

    def finished_before(
        self, cutoff: datetime | None, statuses: Collection[JobStatus]
    ) -> list[Job]:
        """Return the jobs older than `cutoff` (None: of any age), oldest first.

        Age counts from the end of a job, or from its creation if it is not over.
        """
        since = sa.func.coalesce(
            JOBS.c.finished_at, JOBS.c.created_at, type_=JOBS.c.created_at.type
        )
        query = sa.select(*COLUMNS).where(_has_status(statuses)).order_by(since, JOBS.c.job_id)
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
        """Request the end of a job, and return the job.

        A job that is over, or has a request at least as strong, stays as it is. `why` goes into the
        event. Raises `JobMissing`, also if `uid` is given and another job has the id now.
        """
        with self._database.writing() as connection:
            job = get_job(connection, job_id)
            if uid not in {None, job.uid}:
                raise JobMissing(job_id)
            if job.is_terminal or job.stop_request in (request, StopRequest.FORCED):
                return job
            text = f"a {request} stop was requested" + (f": {why}" if why else "")
            values = {"stop_request": request, "stop_grace_seconds": grace_seconds}
            return self._request(connection, job, "stop_requested", text, actor, values)

    def scale(
        self,
        job_id: JobId,
        world_size: int,
        only: RowVersion | None = None,
        *,
        actor: str | None = None,
    ) -> Job:
        """Request another number of ranks, and return the job.

        The caller checks that the spec allows that number. Raises `JobMissing`, `JobOver`, or
        `JobChanged` if the row no longer has the version `only`.
        """
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            if only is not None and job.row_version != only:
                raise JobChanged(job_id)
            if job.world_size == world_size:
                return job
            ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
            text = f"a change from {job.world_size} to {ranks} was requested"
            values: dict[str, object] = {"wanted_world_size": world_size}
            if world_size < job.world_size:
                values["wanted_hosts"] = {}
            return self._request(connection, job, "scale_requested", text, actor, values)

    def set_pause(self, job_id: JobId, *, paused: bool, actor: str | None = None) -> Job:
        """Request a pause, or its end, and return the job. Raises `JobMissing` or `JobOver`."""
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            if job.pause_request == paused:
                return job
            kind = "pause" if paused else "resume"
            text = f"a {kind} was requested"
            values = {"pause_request": paused}
            return self._request(connection, job, f"{kind}_requested", text, actor, values)

    def request_checkpoint(self, job_id: JobId, *, actor: str | None = None) -> Job:
        """Request a checkpoint of a running job, and return the job.

        Raises `JobMissing`, `JobOver` or `CheckpointPending`.
        """
        with self._database.writing() as connection:
            job = get_continuing_job(connection, job_id)
            if job.is_checkpoint_pending:
                raise CheckpointPending(job_id)
            values = {"checkpoint_requests": job.checkpoint_requests + 1}
            kind, text = "checkpoint_requested", "a checkpoint was requested"
            return self._request(connection, job, kind, text, actor, values)

    def request_fault(self, job: Job, fault: FaultView, *, actor: str | None = None) -> FaultView:
        """Request a fault, and return it with its number. Raises `JobMissing` or `JobOver`."""
        with self._database.writing() as connection:
            now = get_job(connection, job.job_id)
            if now.is_terminal or now.uid != job.uid:
                raise JobOver(job.job_id, now.status)
            number = now.faults[-1].number + 1 if now.faults else 1
            fault = msgspec.structs.replace(fault, number=number)
            what = "all" if fault.agent is not None else f"rank {fault.processes[0].rank}"
            text = f"{fault.signal.name} was requested for {what} on {fault.host}"
            values = {"faults": (*now.faults, fault)[-FAULTS_KEPT:]}
            self._request(connection, now, "fault_requested", text, actor, values)
            return fault

    @contextmanager
    def keeping(self, job_id: JobId, uid: JobUid) -> Iterator[None]:
        """Prevent the deletion of a job that is over inside the block, and the reuse of its id.

        It blocks all other writers, so keep it short. Raises the errors of `delete`.
        """
        with self._database.writing() as connection:
            check_deletion(connection, job_id, uid)
            yield

    def delete(self, job_id: JobId, uid: JobUid, *, with_files: bool = False) -> None:
        """Delete a job that is over, with its ranks and events.

        Hosts that have run it are asked to remove its files if it goes `with_files`. Raises
        `JobMissing` if the id is free or another job has it now, and `JobNotTerminal`.
        """
        with self._database.writing() as connection:
            check_deletion(connection, job_id, uid)
            if with_files:
                hosts = sa.select(AGENTS.c.host).join(HOSTS, HOSTS.c.host == AGENTS.c.host)
                for host in connection.scalars(hosts.where(AGENTS.c.job_id == job_id)).all():
                    self._hosts.request_sweep_in(connection, host, [uid])
            connection.execute(sa.delete(JOBS).where(JOBS.c.job_id == job_id))

    def checkpoint_dirs(self) -> list[str]:
        """Return the directories of all jobs, each once."""
        directory = self._database.json(JOBS.c.spec)["checkpoint_dir"].as_string()
        with self._database.reading() as connection:
            found = filter(None, connection.scalars(sa.select(directory).distinct()))
            return sorted(moved(each, ((HOME_MARK, expand_home("~")),)) for each in found)

    def sweeps(self) -> list[str]:
        """Return the values of the label by which jobs are compared, each once."""
        sweep = self._database.json(JOBS.c.spec)["labels"][SWEEP_LABEL].as_string()
        with self._database.reading() as connection:
            return sorted(filter(None, connection.scalars(sa.select(sweep).distinct())))

    def _request(
        self,
        connection: sa.Connection,
        job: Job,
        kind: str,
        text: str,
        actor: str | None,
        values: Mapping[str, object],
    ) -> Job:
        now = self._clock()
        event = Event(at=now, kind=kind, message=text, actor=actor)
        append_events(connection, job.job_id, [event])
        return update_job(connection, job.job_id, now, values)

    def _conditions(self, query: JobQuery) -> list[sa.ColumnElement[bool]]:
        """Return no condition for a filter that is not set: counting all rows is fast."""
        spec = self._database.json(JOBS.c.spec)
        # Step by step: in a path PostgreSQL would interpret commas, braces and NULL in a name.
        found = [spec["labels"][name].as_string() == value for name, value in query.labels.items()]
        if set(query.statuses) != set(JobStatus):
            found.append(_has_status(query.statuses))
        if query.name is not None:
            found.append(spec["name"].as_string() == query.name)
        if query.created_after is not None:
            found.append(JOBS.c.created_at > query.created_after)
        if query.created_before is not None:
            found.append(JOBS.c.created_at < query.created_before)
        return found

    def _list(self, query: sa.Select[Any]) -> list[Job]:
        with self._database.reading() as connection:
            return [job_of(row) for row in connection.execute(query)]


def _has_status(statuses: Collection[JobStatus]) -> sa.ColumnElement[bool]:
    """Return the condition that `Job.status_shown` is one of `statuses`.

    It can use the index on the status, however many jobs are over.
    """
    wanted = frozenset(statuses)
    # A stop request hides the status of an unfinished job.
    found: sa.ColumnElement[bool] = JOBS.c.status.in_(sorted(wanted & TERMINAL))
    if wanted & OPEN:
        is_asked = JOBS.c.stop_request.is_not(None)
        found = sa.or_(found, sa.and_(JOBS.c.status.in_(sorted(wanted & OPEN)), ~is_asked))
        if JobStatus.STOPPING in wanted:
            found = sa.or_(found, sa.and_(IS_UNFINISHED, is_asked))
    return found
