"""What happened → what is known, for the pool of a synchronous job. Pure, as `coordinator.fold`."""

from dataclasses import replace
from typing import assert_never

from coordinator import actions, happenings
from coordinator.snapshot import JobSnapshot, LayoutSnapshot, RankSnapshot
from muster.contracts.messages import Disputed, Ready, Saved, Stranded, TookUp
from muster.contracts.pool import Pool

PoolMessage = Ready | TookUp | Stranded | Disputed | Saved


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
    snapshot: JobSnapshot, action: actions.Enlist | actions.Retire | actions.Announce
) -> JobSnapshot:
    match action:
        case actions.Enlist():
            return _enlisted(snapshot, action.rank)
        case actions.Retire():
            return _retired(snapshot, snapshot.ranks[action.rank])
        case actions.Announce():
            return replace(snapshot, layout=action.layout)
    assert_never(action)


def joined(snapshot: JobSnapshot, rank: RankSnapshot, now: float) -> JobSnapshot:
    """A process is being started for `rank`: it is a new worker."""
    pool, member = snapshot.pool.join(rank=rank.rank, incarnation=rank.incarnation, now=now)
    changed = replace(rank, worker_id=member.worker_id)
    return replace(snapshot.with_rank(changed), pool=pool)


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


def gone(snapshot: JobSnapshot, rank: RankSnapshot, ended: RankSnapshot) -> JobSnapshot:
    """The process of a worker has ended."""
    if not snapshot.is_synchronous or rank.worker_id is None:
        return snapshot
    done = snapshot.done or (ended.finished and rank.in_service and rank.took_up >= 0)
    return replace(snapshot, pool=snapshot.pool.gone(rank.worker_id), done=done)


def _took_up(
    snapshot: JobSnapshot, rank: RankSnapshot, message: TookUp, now: float
) -> JobSnapshot:
    if message.generation != snapshot.layout.generation or rank.worker_id is None:
        return snapshot
    pool = snapshot.pool.activate(rank.worker_id, now=now, step=message.step)
    changed = replace(snapshot, pool=pool).with_rank(replace(rank, took_up=message.generation))
    in_force = all(
        changed.ranks[number].took_up == message.generation for number in snapshot.layout.ranks
    )
    return replace(changed, pool=pool.settled()) if in_force else changed


def _asked_to_leave(snapshot: JobSnapshot, worker_id: int) -> JobSnapshot:
    for rank in snapshot.in_service:
        if rank.worker_id == worker_id and rank.is_alive:
            wanted = snapshot.wanted_world_size - 1
            return _retired(replace(snapshot, wanted_world_size=wanted), rank)
    return snapshot


def _enlisted(snapshot: JobSnapshot, number: int) -> JobSnapshot:
    missing = range(len(snapshot.ranks), number + 1)
    fresh = tuple(RankSnapshot(rank=rank, in_service=False) for rank in missing)
    grown = replace(snapshot, ranks=snapshot.ranks + fresh)
    return grown.with_rank(replace(grown.ranks[number], in_service=True, finished=False))


def _retired(snapshot: JobSnapshot, rank: RankSnapshot) -> JobSnapshot:
    pool = snapshot.pool
    if rank.is_alive and rank.worker_id is not None and pool.is_active(rank.worker_id):
        pool = pool.leave(rank.worker_id)
    changed = replace(rank, in_service=False, trouble=None)
    return replace(snapshot.with_rank(changed), pool=pool)
