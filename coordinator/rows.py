"""Between rows and snapshots: what of a job is durable, and what a new coordinator starts from.

Rows hold wall-clock times for people, snapshots monotonic ones for decisions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from itertools import count, islice
from typing import Final

from coordinator.moment import Moment
from coordinator.pool_rows import pool_of
from coordinator.rank_fold import ended_unseen
from coordinator.snapshot import (
    NEVER,
    AgentState,
    Cause,
    Ending,
    JobSnapshot,
    LayoutSnapshot,
    RankSnapshot,
    Verdict,
)
from coordinator.wording import describe_exit
from muster.contracts.endings import RetryClass
from muster.contracts.job import TERMINAL, JobStatus, Reason
from muster.contracts.pool import Pool, WorkerState
from muster.contracts.process import ProcessRecord
from muster.contracts.rank import ProcessState
from store.records import Job, JobChange, Member, Worker

COORDINATOR_RESTARTED = Ending(
    retry_class=RetryClass.INFRASTRUCTURE,
    reason=Reason.COORDINATOR_RESTARTED,
    message="was ended because its coordinator had been restarted",
)

_NOT_YET_RUN: Final = frozenset({JobStatus.QUEUED, JobStatus.STARTING})
"""In these a rank may be down without anything being wrong."""

_ASKED: Final = frozenset({Reason.STOPPED_BY_USER, Reason.INTERRUPTED})
"""Why a job that is STOPPING has not failed."""

_STAYING: Final = frozenset({WorkerState.SYNCING, WorkerState.ACTIVE})


class Haste(IntEnum):
    """How soon something has to be in the rows."""

    NONE = 0
    """It is there."""
    BEAT = 1
    """A rank is alive, as it was."""
    PROGRESS = 2
    """Somebody may be watching."""
    AT_ONCE = 3
    """A successor would go wrong without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What belongs to a job's row and decides nothing."""

    started_at: datetime | None
    agent: ProcessRecord | None = None
    agent_token_sha256: str | None = None
    master_port: int = 0


def snapshot_of(
    job: Job, workers: Sequence[Worker], members: Sequence[Member], now: Moment
) -> JobSnapshot:
    """Return what a coordinator that has just come knows. No process of the job is left."""
    ranks = [_ended(job, _rank_of(worker)) for worker in workers]
    return _snapshot(job, ranks, pool_of(job.spec, members, now, living=()), now)


def inherited(
    job: Job,
    workers: Sequence[Worker],
    members: Sequence[Member],
    now: Moment,
    living: Collection[int],
) -> JobSnapshot:
    """Return what a coordinator knows that finds these ranks of a job running, without an agent.

    What is not in the rows their next agent says when it connects: who beats, is ready, or has
    ended. Who takes part in which layout is not asked: the next one is for all.
    """
    ranks = [
        _adopted(job, rank, worker, members, now) if rank.rank in living else _ended(job, rank)
        for rank, worker in ((_rank_of(worker), worker) for worker in workers)
    ]
    ids = [rank.worker_id for rank in ranks if rank.worker_id is not None]
    return _snapshot(job, ranks, pool_of(job.spec, members, now, living=ids), now)


def inherited_with_agent(
    job: Job, workers: Sequence[Worker], members: Sequence[Member], now: Moment
) -> JobSnapshot:
    """Return the same where their agent lives, too, and is about to connect."""
    alive = [worker.rank for worker in workers if worker.state != ProcessState.EXITED]
    return replace(
        inherited(job, workers, members, now, living=alive),
        agent=AgentState.UNREACHABLE,
        agent_since=now.monotonic,
    )


def _snapshot(job: Job, known: Sequence[RankSnapshot], pool: Pool, now: Moment) -> JobSnapshot:
    verdict = _verdict_of(job)
    ranks = {rank.rank: rank for rank in known}
    staying = [rank.rank for rank in known if rank.is_alive and _stays(rank, pool)]
    in_service = _in_service(job.world_size, staying)
    return JobSnapshot(
        job_id=job.job_id,
        uid=job.uid,
        spec=job.spec,
        status=job.status,
        ranks=tuple(
            replace(ranks.get(number, RankSnapshot(rank=number)), in_service=number in in_service)
            for number in range(max([job.world_size, *(number + 1 for number in ranks)]))
        ),
        done=job.spec.mode == "synchronous" and any(rank.finished for rank in ranks.values()),
        pool=pool,
        layout=LayoutSnapshot(generation=job.layout_generation),
        wanted_world_size=job.world_size,
        pause_asked=job.pause_request,
        reason=None if job.reason is None else Reason(job.reason),
        message=job.message,
        # Where nothing is wrong, what the job says of itself is its note.
        note=job.message if job.reason is None else None,
        generation=job.generation,
        verdict=verdict,
        # How much of it is gone already nobody has written down.
        stop_at=now.monotonic,
        stop_grace_seconds=job.spec.stop_grace_seconds,
        # Nobody asked this job to stop, so it was the service that was going down.
        interrupting=job.status is JobStatus.STOPPING and job.stop_request is None and not verdict,
    )


def _verdict_of(job: Job) -> Verdict | None:
    """Return why a job is ending that nobody has asked to; with which exit code is forgotten."""
    if job.status is not JobStatus.STOPPING or job.reason is None or job.reason in _ASKED:
        return None
    return Verdict(reason=Reason(job.reason), message=job.message or "it could not go on")


def _stays(rank: RankSnapshot, pool: Pool) -> bool:
    """Whether nobody has asked a living rank to leave."""
    return rank.worker_id is None or pool.members[rank.worker_id].state in _STAYING


def _in_service(world_size: int, staying: Sequence[int]) -> set[int]:
    """Return which ranks the job is to have: of those that live as many as fit, then the lowest."""
    serving = set(sorted(staying)[:world_size])
    vacant = (rank for rank in count() if rank not in serving)
    return serving | set(islice(vacant, world_size - len(serving)))


def _adopted(
    job: Job, rank: RankSnapshot, worker: Worker, members: Sequence[Member], now: Moment
) -> RankSnapshot:
    """Return a rank that lives on; every deadline that it has to meet begins anew."""
    here = (rank.rank, rank.incarnation)
    ids = [member.worker_id for member in members if (member.rank, member.incarnation) == here]
    return replace(
        rank,
        worker_id=next(iter(ids), None),
        # A training of ours beats from the moment it is alive; of a command nobody knows.
        beats=job.spec.command is None and rank.process is not ProcessState.SPAWNED,
        spawned_at=now.monotonic,
        heard_at=now.monotonic,
        progressed_at=now.monotonic,
        live_at=NEVER if rank.process is ProcessState.SPAWNED else now.monotonic,
        checkpoints_before=worker.checkpoints_before,
        checkpoints_saved=worker.checkpoints_saved - worker.checkpoints_before,
    )


def _ended(job: Job, rank: RankSnapshot) -> RankSnapshot:
    """Return the rank without its process; what has work left has to say why it does not run."""
    if job.status in _NOT_YET_RUN:
        return replace(ended_unseen(rank, COORDINATOR_RESTARTED), trouble=None)
    if rank.is_alive:
        return ended_unseen(rank, COORDINATOR_RESTARTED)
    is_told = job.spec.restart_scope == "gang" and job.status is JobStatus.RECOVERING
    if rank.finished or is_told:  # the job's message says which of a gang was the first to end
        return rank
    cause = Cause(reason=Reason.WORKER_EXITED, message=describe_exit(rank))
    return replace(rank, trouble=cause)


def change_of(snapshot: JobSnapshot, attachment: Attachment, now: Moment) -> JobChange:
    """Return what the job's row has to say."""
    return JobChange(
        job_id=snapshot.job_id,
        uid=snapshot.uid,
        status=snapshot.status,
        reason=snapshot.reason,
        message=snapshot.message,
        started_at=attachment.started_at,
        finished_at=now.wall if snapshot.status in TERMINAL else None,
        exit_code=_exit_code(snapshot.status, snapshot.verdict),
        generation=snapshot.generation,
        layout_generation=snapshot.layout.generation,
        agent=attachment.agent,
        agent_token_sha256=attachment.agent_token_sha256,
        master_port=attachment.master_port,
    )


def workers_of(snapshot: JobSnapshot, now: Moment) -> list[Worker]:
    """Return the rows of the job's ranks; ranks that were never started have none."""
    return [_worker_of(rank, now) for rank in snapshot.ranks if rank.incarnation >= 0]


def haste(before: Worker | None, after: Worker) -> Haste:
    """Return how soon the row of a rank has to be written."""
    if before is None or _essence(before) != _essence(after):
        return Haste.AT_ONCE
    if before == after:
        return Haste.NONE
    only_beat = replace(before, last_heartbeat_at=after.last_heartbeat_at) == after
    return Haste.BEAT if only_beat else Haste.PROGRESS


def _essence(worker: Worker) -> tuple[object, ...]:
    """Return that without which a successor would go wrong."""
    return (
        worker.incarnation,
        worker.state,
        worker.process,
        worker.restarts,
        worker.failures,
        worker.endings,
        worker.fruitless,
        worker.proven_step,
        worker.finished,
    )


def _exit_code(status: JobStatus, verdict: Verdict | None) -> int | None:
    if status is JobStatus.COMPLETED:
        return 0
    if status is JobStatus.FAILED:
        return 1 if verdict is None or verdict.exit_code is None else verdict.exit_code
    return None


def _rank_of(worker: Worker) -> RankSnapshot:
    return RankSnapshot(
        rank=worker.rank,
        incarnation=worker.incarnation,
        process=ProcessState(worker.state),
        identity=worker.process,
        restarts=worker.restarts,
        failures=worker.failures,
        endings={RetryClass(kind): count for kind, count in worker.endings.items()},
        fruitless=worker.fruitless,
        proven_step=worker.proven_step,
        finished=worker.finished,
        step=worker.step,
        has_told_step=worker.last_heartbeat_at is not None,
        total_steps=worker.total_steps,
        epoch=worker.epoch,
        shard_idx=worker.shard_idx,
        line_idx=worker.line_idx,
        loss=worker.loss,
        metrics=worker.metrics,
        checkpoints_saved=worker.checkpoints_saved,
        last_checkpoint_step=worker.last_checkpoint_step,
        exit_code=worker.exit_code,
        exit_signal=worker.exit_signal,
    )


def _worker_of(rank: RankSnapshot, now: Moment) -> Worker:
    return Worker(
        rank=rank.rank,
        incarnation=rank.incarnation,
        state=rank.process,
        process=rank.identity,
        restarts=rank.restarts,
        failures=rank.failures,
        endings={kind.value: count for kind, count in rank.endings.items()},
        fruitless=rank.fruitless,
        proven_step=rank.proven_step,
        finished=rank.finished,
        step=rank.step,
        total_steps=rank.total_steps,
        epoch=rank.epoch,
        shard_idx=rank.shard_idx,
        line_idx=rank.line_idx,
        loss=rank.loss,
        metrics=dict(rank.metrics),
        throughput_steps_per_sec=rank.throughput_steps_per_sec,
        checkpoints_saved=rank.checkpoints_before + rank.checkpoints_saved,
        checkpoints_before=rank.checkpoints_before,
        last_checkpoint_step=rank.last_checkpoint_step,
        last_heartbeat_at=now.wall_of(rank.heard_at) if rank.beats else None,
        exit_code=rank.exit_code,
        exit_signal=rank.exit_signal,
    )
