"""Between the rows of a pool and its snapshot, and from what was saved to the rows of the audit."""

from collections.abc import Collection, Sequence

from coordinator.moment import Moment
from coordinator.snapshot import JobSnapshot
from muster.contracts import pool as pools
from muster.contracts.messages import Saved
from muster.contracts.pool import Newcomer, Pool, WorkerId, WorkerState
from muster.contracts.spec import JobSpec
from store.records import Commit, EpochRecord, Member


def pool_of(spec: JobSpec, members: Sequence[Member], now: Moment, living: Collection[int]) -> Pool:
    """Return the pool that a coordinator finds, with processes of the `living` members alone."""
    pool = Pool(
        min_workers=spec.min_workers,
        max_workers=spec.max_workers or spec.world_size,
        timeout_seconds=spec.heartbeat_timeout,
        members=tuple(_member_of(member, now) for member in members),
    )
    for member in pool.members:
        if member.worker_id not in living:
            pool = pools.gone(pool, member.worker_id)
    return pool


def members_of(snapshot: JobSnapshot, now: Moment) -> list[Member]:
    """Return the rows of everybody who is or was in the pool."""
    heard_at = {rank.worker_id: rank.heard_at for rank in snapshot.ranks if rank.is_alive}
    return [
        Member(
            worker_id=member.worker_id,
            rank=member.rank,
            incarnation=member.newcomer.incarnation,
            state=member.state,
            node=member.newcomer.node,
            gpu_count=member.newcomer.gpus,
            backend=member.newcomer.backend,
            joined_at=now.wall_of(member.joined_at) or now.wall,
            joined_step=None if member.state is WorkerState.SYNCING else member.joined_step,
            last_heartbeat_at=now.wall_of(heard_at.get(member.worker_id, member.last_heartbeat)),
        )
        for member in snapshot.pool.members
    ]


def commit_of(saved: Saved, now: Moment) -> Commit:
    """Return the row of a checkpoint that is durable."""
    return Commit(
        step=saved.step,
        generation=saved.generation,
        epoch=saved.epoch,
        digest=saved.digest,
        consumed=saved.consumed,
        consumed_hash=saved.consumed_hash,
        saved_at=now.wall,
    )


def epochs_of(saved: Saved) -> list[EpochRecord]:
    """Return the rows of the passes that are durable with it."""
    return [
        EpochRecord(
            epoch=epoch.epoch,
            samples=epoch.samples,
            hash_sum=epoch.hash_sum,
            expected_samples=epoch.expected_samples,
            expected_hash_sum=epoch.expected_hash_sum,
        )
        for epoch in saved.epochs
    ]


def _member_of(row: Member, now: Moment) -> pools.Member:
    heard_at = row.last_heartbeat_at or row.joined_at
    return pools.Member(
        worker_id=WorkerId(row.worker_id),
        state=WorkerState(row.state),
        newcomer=Newcomer(
            rank=row.rank,
            incarnation=row.incarnation,
            node=row.node or "",
            gpus=row.gpu_count,
            backend=row.backend or "",
            epoch=0,
        ),
        joined_at=now.monotonic_of(row.joined_at),
        joined_step=row.joined_step or 0,
        last_heartbeat=now.monotonic_of(heard_at),
    )
