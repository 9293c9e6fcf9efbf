"""The elastic pool: the workers of a synchronous job, and how they join and leave.

Frozen values and pure functions: each returns the new pool, or raises `PoolError` and has changed
nothing. `now` is in seconds of any monotonic clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NewType

from muster.contracts.errors import MusterError, move

WorkerId = NewType("WorkerId", int)  # counts up from 0 over the life of a pool, and is never reused


class WorkerState(StrEnum):
    """The life of a worker, see `TRANSITIONS`."""

    SYNCING = "syncing"  # it was accepted and receives the weights; it contributes nothing yet
    ACTIVE = "active"  # it has the weights of the group and computes its part of every step
    DRAINING = "draining"  # it leaves at the next step boundary, and no longer counts
    FAILED = "failed"  # its process died, also for having missed its heartbeats
    LEFT = "left"  # it left because it was asked to


TRANSITIONS: Final[Mapping[WorkerState, frozenset[WorkerState]]] = {
    WorkerState.SYNCING: frozenset({WorkerState.ACTIVE, WorkerState.FAILED}),
    WorkerState.ACTIVE: frozenset({WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.DRAINING: frozenset({WorkerState.LEFT}),
    WorkerState.FAILED: frozenset(),
    WorkerState.LEFT: frozenset(),
}

LIVING: Final = frozenset({WorkerState.SYNCING, WorkerState.ACTIVE, WorkerState.DRAINING})
"""States with a running process."""

_COUNTED: Final = frozenset({WorkerState.SYNCING, WorkerState.ACTIVE})
"""States that count towards `max_workers`."""


class PoolError(MusterError):
    """The pool refused an operation and did not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """The facts with which a process joins."""

    rank: int  # a new rank, or that of a worker that failed or left
    attempt: int  # the attempt of that rank
    node: str
    gpus: int
    backend: str  # the type of its device: ``cpu`` or ``cuda``
    transport: str  # to its peers
    epoch: int  # the epoch it has reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker; it stays on the list after it has left or failed."""

    worker_id: WorkerId
    state: WorkerState
    newcomer: Newcomer
    joined_at: float
    joined_step: int
    """The step at which it was accepted; once active, the step of the weights it received."""
    last_heartbeat: float

    @property
    def rank(self) -> int:
        return self.newcomer.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """All workers that take part, took part, or are about to."""

    min_workers: int  # with fewer active workers training pauses
    max_workers: int
    members: tuple[Member, ...] = ()
    """Member i has the id i. No member is ever removed from the list."""
    reconfigure: bool = False  # the members have changed since the last group was published

    @property
    def active(self) -> tuple[Member, ...]:
        """The workers that compute; a worker's index in a collective is its index here."""
        return tuple(m for m in self.members if m.state is WorkerState.ACTIVE)

    @property
    def world_size(self) -> int:
        """The number of active workers."""
        return len(self.active)

    @property
    def is_paused(self) -> bool:
        """True while there are too few active workers to take a step."""
        return self.world_size < self.min_workers

    @property
    def room(self) -> int:
        """The number of newcomers that would be accepted."""
        return self.max_workers - sum(m.state in _COUNTED for m in self.members)

    def is_active(self, worker_id: int) -> bool:
        """Return whether that worker is active."""
        return any(m.worker_id == worker_id for m in self.active)


def join(pool: Pool, newcomer: Newcomer, *, now: float, step: int) -> Pool:
    """Accept a newcomer as a syncing member; `step` is the current step."""
    if pool.room < 1:
        raise PoolError(
            f"the pool already has its maximum of {pool.max_workers} workers: remove one, or raise "
            "max_workers"
        )
    for member in pool.members:
        if member.rank == newcomer.rank and member.state in LIVING:
            raise PoolError(
                f"rank {member.rank} is held by worker {member.worker_id}, which is "
                f"{member.state}: use a free rank, or wait until that process has ended"
            )
    accepted = Member(
        worker_id=WorkerId(len(pool.members)),
        state=WorkerState.SYNCING,
        newcomer=newcomer,
        joined_at=now,
        joined_step=step,
        last_heartbeat=now,
    )
    return replace(pool, members=(*pool.members, accepted), reconfigure=True)


def activate(pool: Pool, worker_id: int, *, now: float, step: int) -> Pool:
    """Activate a syncing worker that has received the weights of `step`."""
    member = _member(pool, worker_id)
    if member.state is not WorkerState.SYNCING:
        raise PoolError(
            f"worker {worker_id} is {member.state}, and only a syncing worker becomes active: to "
            "take part again, join as a new worker"
        )
    active = _moved(member, WorkerState.ACTIVE)
    return _with(pool, replace(active, joined_step=step, last_heartbeat=now))


def set_node(pool: Pool, worker_id: int, node: str) -> Pool:
    """Record the machine on which a worker runs."""
    member = _member(pool, worker_id)
    return _with(pool, replace(member, newcomer=replace(member.newcomer, node=node)))


def leave(pool: Pool, worker_id: int) -> Pool:
    """Ask an active worker to leave; it no longer counts."""
    member = _member(pool, worker_id)
    if member.state is not WorkerState.ACTIVE:
        raise PoolError(
            f"worker {worker_id} is {member.state}, and only an active worker can be asked to leave"
        )
    return replace(_with(pool, _moved(member, WorkerState.DRAINING)), reconfigure=True)


def process_ended(pool: Pool, worker_id: int) -> Pool:
    """Move a worker whose process has ended to LEFT if it was draining, otherwise to FAILED.

    A worker that has failed or left already stays as it is.
    """
    member = _member(pool, worker_id)
    if member.state is WorkerState.DRAINING:
        return _with(pool, _moved(member, WorkerState.LEFT))
    if member.state not in LIVING:
        return pool
    return replace(_with(pool, _moved(member, WorkerState.FAILED)), reconfigure=True)


def mark_published(pool: Pool) -> Pool:
    """Record that the group of the present members was published."""
    return replace(pool, reconfigure=False)


def _moved(member: Member, target: WorkerState) -> Member:
    return replace(member, state=move(TRANSITIONS, member.state, target))


def _member(pool: Pool, worker_id: int) -> Member:
    if not 0 <= worker_id < len(pool.members):
        ids = f"has workers 0 to {len(pool.members) - 1}" if pool.members else "is empty"
        raise PoolError(f"there is no worker {worker_id}: the pool {ids}")
    return pool.members[worker_id]


def _with(pool: Pool, member: Member) -> Pool:
    at = member.worker_id
    return replace(pool, members=(*pool.members[:at], member, *pool.members[at + 1 :]))
