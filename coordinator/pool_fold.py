"""What happened → what is known, for the pool of a synchronous job. Pure, as `coordinator.fold`."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final, TypeAlias, assert_never

from coordinator import actions, happenings
from coordinator.snapshot import Cause, JobSnapshot, RankSnapshot
from muster.contracts import pool as pools
from muster.contracts.job import Reason
from muster.contracts.messages import Disputed, Ready, Saved, Stranded, TookUp
from muster.contracts.pool import Newcomer, Pool, WorkerState

LOCAL_NODE: Final = "local"
"""Until the process is there and says which machine it is on."""

DIFFERED: Final = Cause(
    reason=Reason.DIFFERENT_BITS,
    message="held other bits than the other workers and was stopped before its next step",
)

PoolMessage: TypeAlias = Ready | TookUp | Stranded | Disputed | Saved


def asked(
    snapshot: JobSnapshot,
    happening: happenings.Scaled | happenings.PauseAsked | happenings.LeaveAsked,
) -> JobSnapshot:
    """Note what a person wants; `plan` does it."""
    match happening:
        case happenings.Scaled():
            return replace(snapshot, wanted_world_size=happening.world_size)
        case happenings.PauseAsked():
            return replace(snapshot, pause_asked=happening.paused)
        case happenings.LeaveAsked():
            return _asked_to_leave(snapshot, happening.worker_id)
    assert_never(happening)


def taken(
    snapshot: JobSnapshot,
    action: actions.Enlist | actions.Retire | actions.Announce,
    now: float,
) -> JobSnapshot:
    match action:
        case actions.Enlist():
            return _enlisted(snapshot, action.rank)
        case actions.Retire():
            return _retired(snapshot, snapshot.ranks[action.rank])
        case actions.Announce():
            return _announced(snapshot, action, now)
    assert_never(action)


def followed(
    snapshot: JobSnapshot, rank: RankSnapshot, action: actions.RankAction, now: float
) -> JobSnapshot:
    """Note what an action on a rank means for its worker."""
    if not snapshot.is_synchronous:
        return snapshot
    match action:
        case actions.Start():
            return _joined(snapshot, rank, now)
        case actions.Terminate():
            return replace(snapshot, pool=_asked_away(snapshot.pool, rank))
        case _:
            return snapshot


def _joined(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> JobSnapshot:
    """A process is being started for `rank`: it is a new worker."""
    newcomer = Newcomer(
        rank=rank.rank,
        incarnation=rank.incarnation,
        node=LOCAL_NODE,
        gpus=0,
        backend=snapshot.spec.effective_backend,
        epoch=rank.epoch,
    )
    pool = pools.join(snapshot.pool, newcomer, now=now, step=snapshot.step)
    changed = replace(rank, worker_id=pool.members[-1].worker_id)
    return replace(snapshot.with_rank(changed), pool=pool)


def located(snapshot: JobSnapshot, rank: RankSnapshot, node: str) -> JobSnapshot:
    """A worker's process is there, on that machine."""
    if not snapshot.is_synchronous or rank.worker_id is None:
        return snapshot
    return replace(snapshot, pool=pools.located(snapshot.pool, rank.worker_id, node))


def left_by_the_dead(pool: Pool, ranks: Iterable[RankSnapshot]) -> Pool:
    """Return the pool with the workers of these ranks that are alive, and no other."""
    living = {rank.worker_id for rank in ranks if rank.is_alive}
    for member in pool.members:
        if member.worker_id not in living:
            pool = pools.gone(pool, member.worker_id)
    return pool


def said(
    snapshot: JobSnapshot, rank: RankSnapshot, message: PoolMessage, now: float
) -> JobSnapshot:
    match message:
        case Ready():
            return snapshot.with_rank(replace(rank, ready=message))
        case TookUp():
            return _took_up(snapshot, rank, message, now)
        case Stranded():
            return snapshot.with_rank(replace(rank, stranded=message.generation))
        case Disputed():
            return replace(snapshot, disputed=snapshot.disputed | set(message.workers))
        case Saved():
            return snapshot
    assert_never(message)


def judged(snapshot: JobSnapshot, ended: RankSnapshot) -> RankSnapshot:
    """Return a rank that has exited, finished only if the last step was taken.

    A program can end its process with code 0 wherever it likes: that is no end of the training.
    """
    if not snapshot.is_synchronous or not ended.finished:
        return ended
    total = ended.total_steps
    is_through = ended.took_up >= 0 and total is not None and snapshot.step >= total
    return replace(ended, finished=is_through and ended.in_service)


def dispute(snapshot: JobSnapshot, rank: RankSnapshot) -> Cause | None:
    """Return why a rank has ended that the others, or it itself, found to be different."""
    return DIFFERED if rank.worker_id in snapshot.disputed else None


def gone(snapshot: JobSnapshot, rank: RankSnapshot, ended: RankSnapshot, now: float) -> JobSnapshot:
    """The process of a worker has ended."""
    if not snapshot.is_synchronous or rank.worker_id is None:
        return snapshot
    # Who exits well was through, or was asked to go, by whomever.
    pool = _asked_away(snapshot.pool, rank) if ended.exit_code == 0 else snapshot.pool
    changed = replace(snapshot, pool=pools.gone(pool, rank.worker_id))
    if snapshot.is_ending or not ended.finished:
        return changed
    return replace(
        changed, done=True, stop_at=now, stop_grace_seconds=snapshot.spec.stop_grace_seconds
    )


def _announced(snapshot: JobSnapshot, action: actions.Announce, now: float) -> JobSnapshot:
    """Who had to wait for this layout has its whole time for the next step."""
    ranks = tuple(replace(rank, progressed_at=now) for rank in snapshot.ranks)
    return replace(snapshot, layout=action.layout, ranks=ranks)


def _took_up(snapshot: JobSnapshot, rank: RankSnapshot, message: TookUp, now: float) -> JobSnapshot:
    layout = snapshot.layout
    if not layout.workers:
        # Told of a predecessor's layout: whose it is nobody knows, but this rank holds the state.
        return snapshot.with_rank(_arrived(rank, message))
    if message.generation != layout.generation or rank.worker_id not in layout.workers:
        return snapshot
    pool = snapshot.pool
    if pool.members[rank.worker_id].state is WorkerState.SYNCING:
        pool = pools.activate(pool, rank.worker_id, now=now, step=message.step)
    changed = replace(snapshot, pool=pool).with_rank(_arrived(rank, message))
    in_force = all(changed.ranks[number].took_up == message.generation for number in layout.ranks)
    return replace(changed, pool=pools.settled(pool)) if in_force else changed


def _arrived(rank: RankSnapshot, message: TookUp) -> RankSnapshot:
    began = message.step if rank.step_at_start is None else rank.step_at_start
    return replace(
        rank,
        took_up=message.generation,
        step=message.step,
        step_at_start=began,
        has_told_step=True,
    )


def _asked_to_leave(snapshot: JobSnapshot, worker_id: int) -> JobSnapshot:
    for rank in snapshot.in_service:
        if rank.worker_id == worker_id:
            return _retired(snapshot, rank)
    return snapshot


def _enlisted(snapshot: JobSnapshot, number: int) -> JobSnapshot:
    missing = range(len(snapshot.ranks), number + 1)
    fresh = tuple(RankSnapshot(rank=rank, in_service=False) for rank in missing)
    grown = replace(snapshot, ranks=snapshot.ranks + fresh)
    return grown.with_rank(replace(grown.ranks[number], in_service=True, finished=False))


def _retired(snapshot: JobSnapshot, rank: RankSnapshot) -> JobSnapshot:
    changed = replace(rank, in_service=False, trouble=None)
    return replace(snapshot.with_rank(changed), pool=_asked_away(snapshot.pool, rank))


def _asked_away(pool: Pool, rank: RankSnapshot) -> Pool:
    """Return the pool without counting on the worker of `rank` any more."""
    if rank.worker_id is None or not pool.is_active(rank.worker_id):
        return pool
    return pools.leave(pool, rank.worker_id)
