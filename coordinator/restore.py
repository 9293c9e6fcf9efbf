"""From rows to a snapshot: what a new coordinator starts from.

Rows hold wall-clock times for people, snapshots hold monotonic times for decisions.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count, islice
from typing import Final

from coordinator.decide.events import describe_exit
from coordinator.decide.fold_pool import keep_living, release_others
from coordinator.decide.fold_rank import end_unobserved
from coordinator.decide.liveness import FORMER_HOST_SECONDS, HOST_SILENCE_SECONDS
from coordinator.decide.state.job import (
    LAST,
    AgentSnapshot,
    GangRestore,
    GroupSnapshot,
    JobCode,
    JobSnapshot,
    new_rank,
)
from coordinator.decide.state.job_end import GOING, EndKind, JobEnd, JobFailure
from coordinator.decide.state.rank import (
    NEVER,
    Attempt,
    AttemptEnd,
    Cause,
    RankSnapshot,
    RetryBudget,
)
from coordinator.persistence import SAME_OF_ATTEMPT, SAME_OF_BUDGET, SAME_OF_RANK, Moment, fields_of
from database.records import AgentRecord, Job, MemberRecord, RankRecord
from muster.checkpoints.manifest import RestorePoint
from muster.contracts import pool as pools
from muster.contracts.agent import AgentState
from muster.contracts.job.retry import RetryClass
from muster.contracts.job.status import JobStatus, Reason
from muster.contracts.pool import Newcomer, Pool, WorkerId, WorkerState
from muster.contracts.rank import ProcessState

COORDINATOR_RESTARTED: Final = AttemptEnd(
    retry_class=RetryClass.INFRASTRUCTURE,
    reason=Reason.COORDINATOR_RESTARTED,
    message="was ended because its coordinator was restarted",
)

LEAP: Final = 1000
"""Group rounds that are left out when another machine has led: more than any copy is behind."""

_NOT_YET_RUN: Final = frozenset({JobStatus.QUEUED, JobStatus.STARTING})
"""In these a rank may be down without a failure."""

_REQUESTED: Final = frozenset({Reason.STOPPED_BY_USER, Reason.INTERRUPTED})
"""Reasons of a STOPPING job that has not failed."""

_STAYING: Final = frozenset({WorkerState.SYNCING, WorkerState.ACTIVE})


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRows:
    """What the database holds of one job."""

    job: Job
    agents: Sequence[AgentRecord] = ()
    ranks: Sequence[RankRecord] = ()
    members: Sequence[MemberRecord] = ()
    code: Mapping[str, str] = field(default_factory=dict)  # digests by path
    series_until: datetime | None = None  # the time of the last point


def snapshot_of(
    rows: JobRows,
    now: Moment,
    *,
    hosts: Mapping[str, AgentSnapshot],
    node: str,
    agents: Collection[str] = (),
    living: Collection[int] = (),
    former: str = "",
) -> JobSnapshot:
    """Return the snapshot of a job that may use these `hosts`; `node` is the id of our own.

    `agents` are the hosts whose agent lives and is about to connect; it reports the ends of its
    ranks. On other hosts the ranks in `living` run without an agent; the next one reports what is
    not in the rows: heartbeats, readiness, ends. The next group round is for all, so the present
    one is not restored. `former` is another host, whose coordinator we have succeeded.
    """
    job, members = rows.job, rows.members

    def may_live(rank: RankRecord) -> bool:
        return rank.state != ProcessState.EXITED if rank.host in agents else rank.rank in living

    known = [
        _adopted(job, rank, members, now) if may_live(rank) else _ended(job, rank)
        for rank in rows.ranks
    ]
    fresh = hosts if len(hosts) == 1 else {}  # others get an agent with their first rank
    known_agents = {}
    for row in rows.agents:
        # A host that the cluster file has no more is one that does not answer. A row from before
        # there was a cluster file names this host by its id.
        unknown = AgentSnapshot(host=row.host, is_local=row.host == node, order=LAST)
        agent = _agent_of(row, hosts.get(row.host, unknown), agents, now)
        if row.host == former and job.spec.mode == "synchronous":
            silent_seconds = HOST_SILENCE_SECONDS - FORMER_HOST_SECONDS
            agent = replace(agent, seen_at=now.monotonic - silent_seconds)
        known_agents[row.host] = agent
    ids = [rank.attempt.worker_id for rank in known if rank.attempt.worker_id is not None]
    pool = Pool(
        min_workers=job.spec.min_workers,
        max_workers=job.spec.max_workers or job.spec.world_size,
        members=tuple(_pool_member(row, now) for row in members),
    )
    pool = keep_living(pool, ids)  # the others have lost their process
    ranks = {rank.rank: rank for rank in known}
    leaving = {member.worker_id for member in pool.members if member.state not in _STAYING}
    alive = (rank for rank in known if rank.is_alive)
    staying = sorted(rank.rank for rank in alive if rank.attempt.worker_id not in leaving)
    # The ranks the job should have: living ones first, then the lowest numbers.
    in_service = set(staying[: job.world_size])
    vacant = (rank for rank in count() if rank not in in_service)
    in_service |= set(islice(vacant, job.world_size - len(in_service)))
    if job.exporter is not None:
        in_service.add(job.exporter)
    snapshot = JobSnapshot(
        job_id=job.job_id,
        uid=job.uid,
        spec=job.spec,
        status=job.status,
        ranks=tuple(
            replace(ranks.get(number) or new_rank(hosts, number), in_service=number in in_service)
            for number in range(max([job.world_size, *(number + 1 for number in ranks)]))
        ),
        pool=pool,
        # The last coordinator may have announced one round more than it made durable. One on
        # another host may have made more of them durable there than our copy of the rows shows.
        group=GroupSnapshot(round=job.group_round and job.group_round + (LEAP if former else 1)),
        wanted_world_size=job.world_size,
        wanted_hosts=job.wanted_hosts,
        pause_requested=job.pause_request,
        checkpoint_requests=job.checkpoint_requests,
        checkpoint_requests_done=job.checkpoint_requests_done,
        reason=None if job.reason is None else Reason(job.reason),
        message=job.message,
        # The message of a job without a reason is its note, until training is over.
        note=job.message if job.reason is None and job.exporter is None else None,
        hosts=hosts,
        agents={**fresh, **known_agents},
        restore=_restore_of(job, rows.ranks),
        code=JobCode(files=rows.code),
        end=_end_of(job, ranks.values(), now),
    )
    return release_others(snapshot)


def _agent_of(
    row: AgentRecord, fresh: AgentSnapshot, living: Collection[str], now: Moment
) -> AgentSnapshot:
    agent = replace(fresh, agent_number=row.agent_number, seen_at=now.monotonic, is_inherited=True)
    if row.host not in living:
        return agent
    return replace(agent, state=AgentState.UNREACHABLE, since=now.monotonic)


def _restore_of(job: Job, rows: Sequence[RankRecord]) -> GangRestore:
    """Return from where the present attempt of a gang has resumed."""
    attempt = max((worker.attempt for worker in rows), default=-1)
    point = None if job.restore_from is None else RestorePoint.parse(job.restore_from)
    return GangRestore(attempt=attempt, point=point)


def _end_of(job: Job, ranks: Iterable[RankSnapshot], now: Moment) -> JobEnd:
    """Return how a job is ending; a request of a user follows.

    The grace period starts again, as its beginning is not recorded, nor the exit code of a failure.
    """
    spec = job.spec
    going = GOING if job.exporter is None else GOING.end_loop(job.exporter)
    finished = {rank.rank for rank in ranks if rank.finished and not rank.is_alive}
    is_done = bool(finished) if job.exporter is None else job.exporter in finished
    if spec.mode == "synchronous" and is_done:
        grace = spec.exit_grace_seconds + spec.stop_grace_seconds
        return going.move(EndKind.DONE, now.monotonic, grace)
    if job.status is not JobStatus.STOPPING:
        return going
    if job.reason is not None and job.reason not in _REQUESTED:
        words = job.message or "it could not go on"
        failure = JobFailure(reason=Reason(job.reason), message=words)
        return going.fail(failure, now.monotonic, spec.stop_grace_seconds)
    if job.stop_request is not None:
        return going
    # Neither a user nor a failure stops this job, so the service was shutting down.
    return going.move(EndKind.INTERRUPTED, now.monotonic, spec.stop_grace_seconds)


def _adopted(
    job: Job, worker: RankRecord, members: Sequence[MemberRecord], now: Moment
) -> RankSnapshot:
    """Return a rank that lives on; all its deadlines start again."""
    rank = _rank_of(worker)
    key = (rank.rank, rank.attempt.number)
    ids = [member.worker_id for member in members if (member.rank, member.attempt) == key]
    is_starting = rank.attempt.process is ProcessState.SPAWNED
    attempt = replace(
        rank.attempt,
        worker_id=next(iter(ids), None),
        # A managed program sends heartbeats once it is alive; a command may never do so, and one
        # that joins a group only then.
        sends_heartbeats=job.spec.command is None and not is_starting,
        spawned_at=now.monotonic,
        seen_at=now.monotonic,
        progressed_at=now.monotonic,
        exiting_at=now.monotonic if rank.is_exiting else NEVER,
        live_at=NEVER if is_starting else now.monotonic,
        checkpoints_saved=worker.checkpoints_saved - worker.checkpoints_before,
    )
    return replace(rank, attempt=attempt, checkpoints_before=worker.checkpoints_before)


def _ended(job: Job, worker: RankRecord) -> RankSnapshot:
    """Return a rank without a process; one with work left gets the cause why it does not run."""
    rank = _rank_of(worker)
    if job.status in _NOT_YET_RUN:
        return replace(end_unobserved(rank, COORDINATOR_RESTARTED), trouble=None)
    if rank.is_alive:
        return end_unobserved(rank, COORDINATOR_RESTARTED)
    # The message of a recovering gang names the rank that ended first already.
    is_named = job.spec.restart_scope == "gang" and job.status is JobStatus.RECOVERING
    if rank.finished or is_named:
        return rank
    words = describe_exit(rank.attempt)
    return replace(rank, trouble=Cause(reason=Reason.WORKER_EXITED, message=words))


def _rank_of(worker: RankRecord) -> RankSnapshot:
    attempt = Attempt(
        **fields_of(worker, SAME_OF_ATTEMPT),
        number=worker.attempt,
        process=ProcessState(worker.state),
        identity=worker.process,
        has_told_step=worker.last_heartbeat_at is not None,
        checkpoints_saved=worker.checkpoints_saved,
    )
    endings = {RetryClass(kind): number for kind, number in worker.endings.items()}
    budget = RetryBudget(**fields_of(worker, SAME_OF_BUDGET), endings=endings)
    return RankSnapshot(**fields_of(worker, SAME_OF_RANK), attempt=attempt, budget=budget)


def _pool_member(row: MemberRecord, now: Moment) -> pools.Member:
    return pools.Member(
        worker_id=WorkerId(row.worker_id),
        state=WorkerState(row.state),
        newcomer=Newcomer(
            rank=row.rank,
            attempt=row.attempt,
            node=row.node or "",
            gpus=row.gpu_count,
            backend=row.backend or "",
            transport=row.transport or "",
            epoch=0,
        ),
        joined_at=now.monotonic_of(row.joined_at),
        joined_step=row.joined_step or 0,
        last_heartbeat=now.monotonic_of(row.last_heartbeat_at or row.joined_at),
    )
