"""The part of `fold` that concerns the pool of a synchronous job. Pure."""

from collections.abc import Collection
from dataclasses import replace
from typing import TypeAlias, assert_never

import msgspec

from coordinator.decide.events import excerpt
from coordinator.decide.state.job import GroupSnapshot, JobSnapshot, Partition, new_rank
from coordinator.decide.state.job_end import EndKind, JobFailure
from coordinator.decide.state.rank import Cause, RankSnapshot
from muster.contracts import pool as pools
from muster.contracts.agent import is_node_id
from muster.contracts.job.status import Reason
from muster.contracts.messages.rank import (
    JoinedGroup,
    LoopEnded,
    PeerLost,
    Ready,
    Saved,
    StateMismatch,
)
from muster.contracts.pool import Newcomer, Pool, WorkerState

PoolMessage: TypeAlias = Ready | JoinedGroup | LoopEnded | PeerLost | StateMismatch | Saved


def publish(snapshot: JobSnapshot, group: GroupSnapshot, now: float) -> JobSnapshot:
    """Begin a group round; members that waited for it have the full timeout for their next step."""
    for rank in snapshot.ranks:
        waiting = replace(rank.attempt, progressed_at=now)
        snapshot = snapshot.with_attempt(rank, waiting)
    return replace(snapshot, group=group)


def apply_message(
    snapshot: JobSnapshot, rank: RankSnapshot, message: PoolMessage, now: float
) -> JobSnapshot:
    """Take in what a member of the pool reports."""
    attempt, member = rank.attempt, rank.attempt.member
    match message:
        case Ready():
            # It may be another process of the same script.
            member = replace(member, ready=message, is_past_loop=False)
            return snapshot.with_attempt(rank, replace(attempt, member=member))
        case JoinedGroup():
            return _join_group(snapshot, rank, message, now)
        case LoopEnded():
            member = replace(member, is_past_loop=True)
            snapshot = snapshot.with_attempt(rank, replace(attempt, member=member))
            return _end_loop(snapshot, message.exporter, now)
        case PeerLost():
            member = replace(member, peer_lost_round=message.round)
            lost = snapshot.with_attempt(rank, replace(attempt, member=member))
            return replace(lost, partition=_partition_after(snapshot, rank, message))
        case StateMismatch():
            return _diverge(snapshot, message, now)
        case Saved():
            # A save of an earlier round may be older than the request.
            served = snapshot.group.save if message.generation == snapshot.group.round else 0
            done = max(snapshot.checkpoint_requests_done, served)
            return replace(snapshot, checkpoint_requests_done=done)
    assert_never(message)


def _diverge(snapshot: JobSnapshot, said: StateMismatch, now: float) -> JobSnapshot:
    """A flipped bit hits another entry each time. The same one twice is changed by the program.

    Unless a worker was lost in between: its successor may not have what it had.
    """
    before, divergent = snapshot.mismatch, snapshot.divergent | set(said.workers)
    snapshot = replace(snapshot, divergent=divergent)
    if said.round <= before.round:
        return snapshot  # every member of the group says so
    members = snapshot.pool.members
    failed = {member.worker_id for member in members if member.state is WorkerState.FAILED}
    lost = len(failed - divergent)
    is_same = lost == snapshot.lost_before and not {*before.entries}.isdisjoint(said.entries)
    snapshot = replace(snapshot, mismatch=said, lost_before=lost)
    if not is_same:
        return snapshot
    message = f"the same values differ a second time: {excerpt(said.message)}"
    failure = JobFailure(reason=Reason.INVALID_PROGRAM, message=message)
    return snapshot.fail(failure, now)


def divergence(snapshot: JobSnapshot, rank: RankSnapshot) -> Cause | None:
    """Return why a rank is stopped whose state differs from that of the others, else None."""
    if rank.attempt.worker_id not in snapshot.divergent:
        return None
    entries = excerpt(", ".join(snapshot.mismatch.entries))
    where = f" in {entries}" if entries else ""
    words = f"held other bits than the other workers{where} and was stopped before its next step"
    return Cause(reason=Reason.DIFFERENT_BITS, message=words)


def _end_loop(snapshot: JobSnapshot, exporter: int, now: float) -> JobSnapshot:
    """Training is over: from now on the job waits for one rank."""
    if snapshot.is_past_loop or exporter >= len(snapshot.ranks):
        return snapshot
    if (failure := _unproven(snapshot)) is not None:
        return snapshot.fail(failure, now)
    # It may have been about to leave.
    snapshot = snapshot.with_rank(replace(snapshot.ranks[exporter], in_service=True))
    ended = replace(snapshot, end=snapshot.end.end_loop(exporter))
    return release_others(serve_requests(ended))


def _unproven(snapshot: JobSnapshot) -> JobFailure | None:
    """Return a failure if a process differed, and its rank has not trained again since."""
    raised, by = snapshot.raised, snapshot.raised_by
    if raised is None or raised.key == "" or by is None:
        return None
    rank = snapshot.ranks[by]
    began, total = rank.attempt.step_at_start, rank.progress.total_steps or 0
    if rank.attempt.raised is None and began is not None and began < total:
        return None
    words = "and training was over before another process could be compared"
    message = f"{snapshot.rank_name(rank)}: {excerpt(raised.message)}, {words}"
    return JobFailure(reason=Reason.INVALID_PROGRAM, message=message)


def release_others(snapshot: JobSnapshot) -> JobSnapshot:
    """After the loop no rank is started again but the one that exports."""
    for rank in snapshot.ranks:
        if rank.is_down and not snapshot.is_needed(rank):
            snapshot = snapshot.with_rank(replace(rank, finished=True, trouble=None))
    return snapshot


def serve_requests(snapshot: JobSnapshot) -> JobSnapshot:
    """After the loop the checkpoint that a user may request is durable already."""
    if not snapshot.is_past_loop:
        return snapshot
    return replace(snapshot, checkpoint_requests_done=snapshot.checkpoint_requests)


def _partition_after(snapshot: JobSnapshot, rank: RankSnapshot, lost: PeerLost) -> Partition | None:
    """Return the two hosts that cannot reach each other once a rank has reported a lost peer."""
    before, number = snapshot.partition, lost.unreachable
    is_known = number is not None and 0 <= number < len(snapshot.ranks)
    if number is None or not is_known or lost.round != snapshot.group.round:
        return before
    hosts = frozenset({rank.host, snapshot.ranks[number].host})
    if len(hosts) == 1 or (before is not None and before.round == lost.round):
        return before
    is_same = before is not None and before.hosts == hosts
    return Partition(hosts, lost.round, before.count + 1 if before and is_same else 1)


def locate(snapshot: JobSnapshot, rank: RankSnapshot, node: str) -> JobSnapshot:
    """Record on which machine a worker's process runs, where the cluster file does not name it."""
    worker_id = rank.attempt.worker_id
    if not snapshot.is_synchronous or worker_id is None or not is_node_id(rank.host):
        return snapshot
    return replace(snapshot, pool=pools.set_node(snapshot.pool, worker_id, node))


def keep_living(pool: Pool, living: Collection[int | None]) -> Pool:
    """Return the pool after the processes of all workers but `living` have ended."""
    for member in pool.members:
        if member.worker_id not in living:
            pool = pools.process_ended(pool, member.worker_id)
    return pool


def confirm_finished(snapshot: JobSnapshot, ended: RankSnapshot) -> RankSnapshot:
    """Return a rank of a pool that exits, finished only if the last step was taken.

    A program can exit with code 0 at any time; that does not end the training.
    """
    if not snapshot.is_synchronous or not ended.finished:
        return ended
    total = ended.progress.total_steps
    step = max(snapshot.step, ended.progress.step)
    is_through = ended.has_joined and total is not None and step >= total
    if snapshot.is_past_loop:
        is_through = ended.attempt.member.is_past_loop
    return replace(ended, finished=is_through and ended.in_service)


def end_worker(
    snapshot: JobSnapshot, rank: RankSnapshot, ended: RankSnapshot, now: float
) -> JobSnapshot:
    """Record that a worker's process has ended; `rank` is the rank before, `ended` after that."""
    if not snapshot.is_synchronous or rank.attempt.worker_id is None:
        return snapshot
    # A worker that exits with code 0 was finished, or asked to leave.
    has_left = ended.finished or ended.attempt.exit_code == 0
    pool = leave(snapshot.pool, rank) if has_left else snapshot.pool
    changed = replace(snapshot, pool=pools.process_ended(pool, rank.attempt.worker_id))
    if not ended.finished or not snapshot.is_needed(rank):
        return changed
    grace = snapshot.spec.exit_grace_seconds + snapshot.spec.stop_grace_seconds
    return replace(changed, end=snapshot.end.move(EndKind.DONE, now, grace))


def join(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> JobSnapshot:
    """Every new attempt in a synchronous job is a new worker."""
    if not snapshot.is_synchronous:
        return snapshot
    newcomer = Newcomer(
        rank=rank.rank,
        attempt=rank.attempt.number,
        node=rank.host,
        gpus=snapshot.spec.gpu_count,
        backend=snapshot.spec.device_type,
        transport="tcp" if snapshot.spans_hosts else snapshot.spec.effective_backend,
        epoch=rank.progress.epoch,
    )
    pool = pools.join(snapshot.pool, newcomer, now=now, step=snapshot.step)
    changed = replace(rank.attempt, worker_id=pool.members[-1].worker_id)
    return replace(snapshot.with_attempt(rank, changed), pool=pool)


def _join_group(
    snapshot: JobSnapshot, rank: RankSnapshot, message: JoinedGroup, now: float
) -> JobSnapshot:
    group, attempt, worker_id = snapshot.group, rank.attempt, rank.attempt.worker_id
    if not (agent := snapshot.agent_of(rank)).has_code:
        snapshot = snapshot.with_agent(replace(agent, has_code=True))
    began = message.step if attempt.step_at_start is None else attempt.step_at_start
    member = replace(attempt.member, joined_round=message.round)
    attempt = replace(attempt, member=member, step_at_start=began, has_told_step=True)
    progress = msgspec.structs.replace(rank.progress, step=message.step)
    joined = replace(rank, attempt=attempt, progress=progress)
    if not group.workers:
        # A round of the previous coordinator: its members are unknown, but this rank holds state.
        return snapshot.with_rank(joined)
    if worker_id not in group.workers:
        return snapshot
    # Also of an earlier round: a short training may be over before its members see the next one.
    pool = snapshot.pool
    if pool.members[worker_id].state is WorkerState.SYNCING:
        pool = pools.activate(pool, worker_id, now=now, step=message.step)
    changed = replace(snapshot, pool=pool).with_rank(joined)
    # A new rank that waits for its own round keeps the request for one.
    is_waiting = any(member.state is WorkerState.SYNCING for member in pool.members)
    if is_waiting or not changed.has_joined_group:
        return changed
    return replace(changed, pool=pools.mark_published(pool), partition=None)


def add(snapshot: JobSnapshot, number: int) -> JobSnapshot:
    """Put a rank into service."""
    missing = range(len(snapshot.ranks), number + 1)
    fresh = (replace(new_rank(snapshot.hosts, rank), in_service=False) for rank in missing)
    grown = replace(snapshot, ranks=(*snapshot.ranks, *fresh))
    rank = grown.ranks[number]
    # A rank that was here before would go back to its host; one for a newcomer is placed anew.
    host = new_rank(snapshot.hosts, number).host if snapshot.wanted_hosts else rank.host
    return grown.with_rank(replace(rank, host=host, in_service=True, finished=False))


def remove(snapshot: JobSnapshot, rank: RankSnapshot) -> JobSnapshot:
    """Take a rank out of service."""
    changed = replace(rank, in_service=False, trouble=None)
    return replace(snapshot.with_rank(changed), pool=leave(snapshot.pool, rank))


def leave(pool: Pool, rank: RankSnapshot) -> Pool:
    """Return the pool with the rank's worker draining, if it was active."""
    worker_id = rank.attempt.worker_id
    if worker_id is None or not pool.is_active(worker_id):
        return pool
    return pools.leave(pool, worker_id)
