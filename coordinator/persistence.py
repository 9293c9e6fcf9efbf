"""From a snapshot to rows: what of a job is durable, and how soon it has to be.

Rows hold wall-clock times for people, snapshots hold monotonic times for decisions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from operator import attrgetter
from typing import Any, Final

import msgspec

from coordinator.decide.state.job import JobSnapshot
from coordinator.decide.state.rank import NEVER, RankSnapshot
from database.records import (
    AgentRecord,
    Attempt,
    CheckpointRecord,
    JobChange,
    MemberRecord,
    RankRecord,
)
from muster.contracts.job.status import TERMINAL, JobStatus
from muster.contracts.messages.rank import Saved
from muster.contracts.pool import WorkerState
from muster.contracts.rank import ProcessRecord, ProcessState

SAME_OF_RANK: Final = ("rank", "host", "finished", "in_service", "progress")
SAME_OF_ATTEMPT: Final = ("exit_code", "exit_signal")
SAME_OF_BUDGET: Final = ("restarts", "failures", "fruitless", "proven_step")
"""Fields that a rank, its attempt and its budget share with its row; a successor starts there."""

_NO_TIME: Final = datetime.fromtimestamp(0, UTC)


class Urgency(IntEnum):
    """How soon a change has to be written."""

    NONE = 0  # the row says the same
    HEARTBEAT = 1  # only the time of the last heartbeat has changed
    PROGRESS = 2  # a user may be watching
    SOON = 3  # a successor can find it out, and such changes come in bursts
    NOW = 4  # a successor would go wrong without it


COMMIT_AFTER_SECONDS: Final[Mapping[Urgency, float]] = {
    Urgency.NOW: 0.0,
    Urgency.SOON: 0.05,
    Urgency.PROGRESS: 1.0,
    Urgency.HEARTBEAT: 2.0,
    Urgency.NONE: 2.0,  # renews the lease, well within its length
}
"""How long after the last commit the next one follows; each renews the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One instant on two clocks: monotonic for decisions, wall clock for people."""

    monotonic: float
    wall: datetime

    def wall_of(self, monotonic: float) -> datetime | None:
        """Return the wall-clock time of a monotonic one; None for never."""
        if monotonic == NEVER:
            return None
        return self.wall - timedelta(seconds=self.monotonic - monotonic)

    def monotonic_of(self, wall: datetime) -> float:
        """Return the monotonic time of a wall-clock one, which may be before this process."""
        return self.monotonic - (self.wall - wall).total_seconds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What is in the rows of a job and its agents although no decision depends on it."""

    started_at: datetime | None
    agents: Mapping[str, ProcessRecord] = field(default_factory=dict)
    """By host: the agents that may run."""
    tokens_sha256: Mapping[str, str] = field(default_factory=dict)
    """By host: of the token with which the agent there proves itself."""
    master_port: int = 0
    numeric_environment: dict[str, dict[str, str]] | None = None
    """See `database.records.Job`. It is durable before a rank starts, as decisions to start one are
    in the same transaction or a later one."""


def job_row(snapshot: JobSnapshot, attachment: Attachment, now: Moment) -> JobChange:
    """Return the coordinator's fields of the job's row."""
    exit_code = 0 if snapshot.status is JobStatus.COMPLETED else None
    if snapshot.status is JobStatus.FAILED and snapshot.failure is not None:
        exit_code = snapshot.failure.exit_code
    return JobChange(
        job_id=snapshot.job_id,
        uid=snapshot.uid,
        status=snapshot.status,
        reason=snapshot.reason,
        message=snapshot.message,
        started_at=attachment.started_at,
        finished_at=now.wall if snapshot.status in TERMINAL else None,
        exit_code=exit_code,
        group_round=snapshot.group.round,
        master_port=attachment.master_port,
        numeric_environment=attachment.numeric_environment,
        restore_from=str(point) if (point := snapshot.restore.point) else None,
        checkpoint_requests_done=snapshot.checkpoint_requests_done,
        exporter=snapshot.end.exporter,
    )


def agent_rows(snapshot: JobSnapshot, attachment: Attachment) -> list[AgentRecord]:
    """Return the rows of the job's agents; a host that never had one has none."""
    return [
        AgentRecord(
            host=host,
            agent_number=agent.agent_number,
            state=agent.state,
            process=attachment.agents.get(host),
            token_sha256=attachment.tokens_sha256.get(host),
        )
        for host, agent in snapshot.agents.items()
        if agent.agent_number > 0
    ]


def fields_of(value: object, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def rank_rows(snapshot: JobSnapshot, now: Moment) -> list[RankRecord]:
    """Return the rows of the job's ranks; a rank that was never started has none."""
    return [_rank_row(rank, now) for rank in snapshot.ranks if rank.attempt.number >= 0]


def _rank_row(rank: RankSnapshot, now: Moment) -> RankRecord:
    attempt, budget = rank.attempt, rank.budget
    return RankRecord(
        **fields_of(rank, SAME_OF_RANK),
        **fields_of(attempt, SAME_OF_ATTEMPT),
        **fields_of(budget, SAME_OF_BUDGET),
        attempt=attempt.number,
        state=attempt.process,
        process=attempt.identity,
        endings={kind.value: number for kind, number in budget.endings.items()},
        throughput_steps_per_sec=attempt.throughput.steps_per_sec,
        checkpoints_saved=rank.checkpoints_before + attempt.checkpoints_saved,
        checkpoints_before=rank.checkpoints_before,
        last_heartbeat_at=now.wall_of(attempt.seen_at) if attempt.sends_heartbeats else None,
    )


def rank_urgency(before: RankRecord | None, after: RankRecord) -> Urgency:
    """Return how soon a rank's row has to be written."""
    if before is None or _essentials(before) != _essentials(after):
        return Urgency.NOW
    if (before.state, before.process) != (after.state, after.process):
        return Urgency.SOON
    if before == after:
        return Urgency.NONE
    is_heartbeat = replace(before, last_heartbeat_at=after.last_heartbeat_at) == after
    return Urgency.HEARTBEAT if is_heartbeat else Urgency.PROGRESS


# The fields without which a successor would go wrong.
_essentials: Final = attrgetter(
    *("attempt", "restarts", "failures", "endings", "fruitless", "proven_step"),
    *("finished", "in_service"),
)


def member_rows(snapshot: JobSnapshot, now: Moment) -> list[MemberRecord]:
    """Return the rows of all present and former members of the pool."""
    attempts = (rank.attempt for rank in snapshot.ranks if rank.is_alive)
    seen_at = {attempt.worker_id: attempt.seen_at for attempt in attempts}
    return [
        MemberRecord(
            worker_id=member.worker_id,
            rank=member.rank,
            attempt=member.newcomer.attempt,
            state=member.state,
            node=member.newcomer.node,
            gpu_count=member.newcomer.gpus,
            backend=member.newcomer.backend,
            transport=member.newcomer.transport,
            joined_at=now.wall_of(member.joined_at) or now.wall,
            joined_step=None if member.state is WorkerState.SYNCING else member.joined_step,
            last_heartbeat_at=now.wall_of(seen_at.get(member.worker_id, member.last_heartbeat)),
        )
        for member in snapshot.pool.members
    ]


def timeless(member: MemberRecord) -> MemberRecord:
    """Return a member without its times, for comparison.

    A heartbeat changes one, and the other is computed from two clocks that drift apart.
    """
    return replace(member, joined_at=_NO_TIME, last_heartbeat_at=None)


def commit_row(saved: Saved, now: Moment) -> CheckpointRecord:
    """Return the row of a durable checkpoint."""
    facts = msgspec.structs.asdict(saved)
    del facts["epochs"]  # rows of their own
    return CheckpointRecord(**facts, saved_at=now.wall)


# Attempts: when each began, how it ended, what that means


def attempt_rows(before: JobSnapshot, after: JobSnapshot, now: Moment) -> list[Attempt]:
    """Return the rows of attempts that began, told their process or first step, or ended."""
    return [
        _attempt_row(new, _pid(old, new), now)
        for old, new in zip(before.ranks, after.ranks, strict=False)
        if old is not new and _milestones(old) != _milestones(new)
    ]


def ended_attempt_rows(
    snapshot: JobSnapshot, rows: Sequence[RankRecord], now: Moment
) -> list[Attempt]:
    """Return the rows of attempts that ran under the previous coordinator and are gone now."""
    return [
        _attempt_row(snapshot.ranks[row.rank], row.process.pid if row.process else None, now)
        for row in rows
        if row.state != ProcessState.EXITED and not snapshot.ranks[row.rank].is_alive
    ]


def _milestones(rank: RankSnapshot) -> tuple[object, ...]:
    attempt = rank.attempt
    return attempt.number, attempt.identity, attempt.step_at_start, rank.is_alive


def _pid(before: RankSnapshot, after: RankSnapshot) -> int | None:
    """Return the attempt's pid; at its end the snapshot has lost it already."""
    is_same = before.attempt.number == after.attempt.number
    identity = after.attempt.identity or (before.attempt.identity if is_same else None)
    return identity.pid if identity else None


def _attempt_row(rank: RankSnapshot, pid: int | None, now: Moment) -> Attempt:
    attempt, end, step_at_end = rank.attempt, rank.ending, None
    is_over, step_at_start = not rank.is_alive, attempt.step_at_start
    if is_over and attempt.has_told_step:
        step_at_end = rank.progress.step
        # An attempt that never reported where it began has made no progress.
        step_at_start = step_at_end if step_at_start is None else step_at_start
    row = Attempt(
        rank=rank.rank,
        attempt=attempt.number,
        pid=pid,
        started_at=now.wall_of(attempt.spawned_at) or now.wall,
        step_at_start=step_at_start,
        step_at_end=step_at_end,
        ended_at=now.wall if is_over else None,
        exit_code=attempt.exit_code,
        exit_signal=attempt.exit_signal,
    )
    if end is None or not is_over:  # it is the end of the attempt before
        return row
    return msgspec.structs.replace(
        row, retry_class=end.retry_class, reason=end.reason, message=end.message
    )
