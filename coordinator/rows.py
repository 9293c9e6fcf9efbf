"""Between rows and snapshots: what of a job is durable, and what a new coordinator starts from.

Rows hold wall-clock times for people, snapshots monotonic ones for decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import IntEnum
from typing import Final

from coordinator.moment import Moment
from coordinator.pool_rows import pool_of
from coordinator.rank_fold import ended_unseen
from coordinator.snapshot import Cause, JobSnapshot, LayoutSnapshot, RankSnapshot, Verdict
from coordinator.wording import describe_exit
from muster.contracts.endings import RetryClass
from muster.contracts.job import TERMINAL, JobStatus, Reason
from muster.contracts.process import ProcessRecord
from muster.contracts.rank import ProcessState
from store.records import Job, JobChange, Member, Worker

COORDINATOR_RESTARTED = Cause(
    reason=Reason.COORDINATOR_RESTARTED,
    message="was ended because its coordinator had been restarted",
)

_NOT_YET_RUN: Final = frozenset({JobStatus.QUEUED, JobStatus.STARTING})
"""In these a rank may be down without anything being wrong."""


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


def snapshot_of(
    job: Job, workers: Sequence[Worker], members: Sequence[Member], now: Moment
) -> JobSnapshot:
    """Return what a coordinator that has just come knows. No process of the job is left."""
    ranks = {worker.rank: _rank_of(worker) for worker in workers}
    if job.status in _NOT_YET_RUN:
        ranks = {number: _absent(rank) for number, rank in ranks.items()}
    else:
        ranks = {number: _in_trouble(rank) for number, rank in ranks.items()}
    return JobSnapshot(
        job_id=job.job_id,
        uid=job.uid,
        spec=job.spec,
        status=job.status,
        ranks=tuple(
            replace(
                ranks.get(number, RankSnapshot(rank=number)), in_service=number < job.world_size
            )
            for number in range(max([job.world_size, *(number + 1 for number in ranks)]))
        ),
        done=job.spec.mode == "synchronous" and any(rank.finished for rank in ranks.values()),
        pool=pool_of(job.spec, members, now),
        layout=LayoutSnapshot(generation=job.layout_generation),
        wanted_world_size=job.world_size,
        pause_asked=job.pause_request,
        reason=None if job.reason is None else Reason(job.reason),
        message=job.message,
        # Where nothing is wrong, what the job says of itself is its note.
        note=job.message if job.reason is None else None,
        generation=job.generation,
        # Nobody asked this job to stop, so it was the service that was going down.
        interrupting=job.status is JobStatus.STOPPING and job.stop_request is None,
    )


def _absent(rank: RankSnapshot) -> RankSnapshot:
    """Return the rank without its process, which is nothing to mention."""
    return replace(ended_unseen(rank, COORDINATOR_RESTARTED), trouble=None)


def _in_trouble(rank: RankSnapshot) -> RankSnapshot:
    """Return the rank without its process; what has work left has to say why it does not run."""
    if rank.is_alive:
        return ended_unseen(rank, COORDINATOR_RESTARTED)
    if rank.finished:
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
        last_checkpoint_step=rank.last_checkpoint_step,
        last_heartbeat_at=now.wall_of(rank.heard_at) if rank.beats else None,
        exit_code=rank.exit_code,
        exit_signal=rank.exit_signal,
    )
