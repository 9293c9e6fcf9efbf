"""The elastic pool: who takes part in a synchronous job, and how they come and go.

Frozen values and pure functions: each returns the pool as it is then, or raises and has changed
nothing. Time comes in as `now`, in seconds of any clock that does not go back.

PoolError
├── PoolFull             as many workers are in it as are allowed
├── RankTaken            a newcomer names a rank that a living worker holds
├── UnknownWorker        no worker has that id, or ever had it
├── CannotActivate       only a syncing worker becomes active
└── CannotLeave          only an active worker can be asked to leave
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, NewType

from muster.contracts.errors import IllegalMove, MusterError
from muster.contracts.shards import ranges

WorkerId = NewType("WorkerId", int)
"""Counts up from 0 over the life of a pool; stable, and never used again."""


class WorkerState(StrEnum):
    """What is true of a worker while it is in this state."""

    SYNCING = "syncing"
    """Accepted; it receives the weights, and contributes nothing yet."""
    ACTIVE = "active"
    """It has the weights of the others and computes its part of every step."""
    DRAINING = "draining"
    """It will leave at the next step boundary, and does not count any more."""
    FAILED = "failed"
    """A heartbeat was missed, or its process died."""
    LEFT = "left"
    """It has gone, as it was asked to."""


TRANSITIONS: Final[Mapping[WorkerState, frozenset[WorkerState]]] = {
    WorkerState.SYNCING: frozenset({WorkerState.ACTIVE, WorkerState.FAILED}),
    WorkerState.ACTIVE: frozenset({WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.DRAINING: frozenset({WorkerState.LEFT}),
    WorkerState.FAILED: frozenset(),
    WorkerState.LEFT: frozenset(),
}

LIVING: Final = frozenset({WorkerState.SYNCING, WorkerState.ACTIVE, WorkerState.DRAINING})
"""A process stands behind a worker in one of these, and takes it along when it ends."""

_COUNTED: Final = frozenset({WorkerState.SYNCING, WorkerState.ACTIVE})
"""Those that count towards the limit."""


class PoolError(MusterError):
    """The pool refuses, and is as it was."""


class PoolFull(PoolError):
    def __init__(self, max_workers: int) -> None:
        super().__init__(
            f"the pool already has {max_workers} workers, which is its limit: let one leave, or "
            "raise max_workers"
        )
        self.max_workers = max_workers


class RankTaken(PoolError):
    def __init__(self, rank: int, worker_id: WorkerId, state: WorkerState) -> None:
        super().__init__(
            f"rank {rank} is held by worker {worker_id}, which is {state}: take a free one, or "
            "wait until its process has ended"
        )
        self.rank = rank
        self.worker_id = worker_id


class UnknownWorker(PoolError):
    def __init__(self, worker_id: int, known: int) -> None:
        known_ids = f"0 to {known - 1}" if known else "nobody at all"
        super().__init__(f"there is no worker {worker_id}: the pool knows {known_ids}")
        self.worker_id = worker_id


class CannotActivate(PoolError):
    def __init__(self, worker_id: WorkerId, state: WorkerState) -> None:
        super().__init__(
            f"worker {worker_id} is {state}, and only a syncing worker becomes active: a worker "
            "that is to take part again joins as a new one"
        )
        self.worker_id = worker_id
        self.state = state


class CannotLeave(PoolError):
    def __init__(self, worker_id: WorkerId, state: WorkerState) -> None:
        super().__init__(
            f"worker {worker_id} is {state}, and only an active worker can be asked to leave"
        )
        self.worker_id = worker_id
        self.state = state


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """How a process announces itself."""

    rank: int
    """The place it fills: of its own, or of one that failed or left."""
    incarnation: int
    """Which process of that rank it is."""
    node: str
    gpus: int
    backend: str
    """What it computes with, such as ``numpy``."""
    epoch: int
    """The epoch it has reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One worker, from when it was accepted on and for ever."""

    worker_id: WorkerId
    state: WorkerState
    newcomer: Newcomer
    joined_at: float
    joined_step: int
    """The step that training had reached when it was accepted, then that of the weights it got."""
    last_heartbeat: float

    @property
    def rank(self) -> int:
        return self.newcomer.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Everybody who takes part, took part, or is about to."""

    min_workers: int
    """With fewer active ones training pauses."""
    max_workers: int
    timeout_seconds: float
    """An active worker that is silent for longer has failed."""
    members: tuple[Member, ...] = ()
    """In the order of their ids: member i has the id i. Nobody is ever taken off the list."""
    reconfigure: bool = False
    """The layout in force is not that of the members any more."""

    @property
    def active(self) -> tuple[Member, ...]:
        """Those who compute; a worker's index in a collective is its place here."""
        return tuple(m for m in self.members if m.state is WorkerState.ACTIVE)

    @property
    def world_size(self) -> int:
        """The world size in force."""
        return len(self.active)

    @property
    def is_paused(self) -> bool:
        """No step is taken, until there are enough active workers."""
        return self.world_size < self.min_workers

    @property
    def room(self) -> int:
        """How many newcomers would be accepted."""
        return self.max_workers - sum(m.state in _COUNTED for m in self.members)

    def is_active(self, worker_id: int) -> bool:
        """Whether that worker computes."""
        return any(m.worker_id == worker_id for m in self.active)

    @property
    def free_rank(self) -> int:
        """The lowest rank that no living worker holds."""
        held = {m.rank for m in self.members if m.state in LIVING}
        return next(rank for rank in range(len(held) + 1) if rank not in held)

    def restarts(self, rank: int) -> int:
        """Return how often a worker that failed on `rank` was replaced."""
        filled = [m.state for m in self.members if m.rank == rank]
        return filled[:-1].count(WorkerState.FAILED)

    def shares(self, total: int) -> dict[WorkerId, tuple[int, int]]:
        """Deal [0, total) out to the active workers, in contiguous ranges (`ranges`)."""
        active = self.active
        dealt = ranges(total, len(active))
        return {m.worker_id: share for m, share in zip(active, dealt, strict=True)}


def move(current: WorkerState, target: WorkerState) -> WorkerState:
    """Return `target`, or raise `IllegalMove` if the table does not allow it."""
    if target not in TRANSITIONS[current]:
        raise IllegalMove(current, target)
    return target


def join(pool: Pool, newcomer: Newcomer, *, now: float, step: int) -> Pool:
    """Accept a newcomer as the last member, syncing; `step` is the one training has reached.

    Raises `PoolFull` or `RankTaken`.
    """
    if pool.room < 1:
        raise PoolFull(pool.max_workers)
    for member in pool.members:
        if member.rank == newcomer.rank and member.state in LIVING:
            raise RankTaken(newcomer.rank, member.worker_id, member.state)
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
    """Count a worker in that has received the weights, those of `step`; raises `CannotActivate`.

    That it has them is a sign of life: its silence is measured from `now` on.
    """
    member = _member(pool, worker_id)
    if member.state is not WorkerState.SYNCING:
        raise CannotActivate(member.worker_id, member.state)
    active = _moved(member, WorkerState.ACTIVE)
    return _with(pool, replace(active, joined_step=step, last_heartbeat=now))


def located(pool: Pool, worker_id: int, node: str) -> Pool:
    """Note on which machine a worker runs."""
    member = _member(pool, worker_id)
    return _with(pool, replace(member, newcomer=replace(member.newcomer, node=node)))


def leave(pool: Pool, worker_id: int) -> Pool:
    """Ask a worker to leave: it does not count from now on. Raises `CannotLeave`."""
    member = _member(pool, worker_id)
    if member.state is not WorkerState.ACTIVE:
        raise CannotLeave(member.worker_id, member.state)
    return replace(_with(pool, _moved(member, WorkerState.DRAINING)), reconfigure=True)


def gone(pool: Pool, worker_id: int) -> Pool:
    """Take along the worker whose process has ended, from whatever living state it was in.

    One that has failed or left before stays what it is: its process was ended because of that.
    """
    member = _member(pool, worker_id)
    if member.state is WorkerState.DRAINING:
        return _with(pool, _moved(member, WorkerState.LEFT))
    return _failed(pool, member) if member.state in LIVING else pool


def heartbeat(pool: Pool, worker_id: int, *, now: float) -> Pool:
    """Note that a living worker was heard; a beat of any other is ignored, an unknown one's too."""
    if not 0 <= worker_id < len(pool.members):
        return pool
    member = pool.members[worker_id]
    return _with(pool, replace(member, last_heartbeat=now)) if member.state in LIVING else pool


def look(pool: Pool, *, now: float) -> Pool:
    """Fail every active worker that has been silent for too long."""
    for member in pool.active:
        if now - member.last_heartbeat > pool.timeout_seconds:
            pool = _failed(pool, member)
    return pool


def settled(pool: Pool) -> Pool:
    """Say that the layout of the present members is in force."""
    return replace(pool, reconfigure=False)


def _failed(pool: Pool, member: Member) -> Pool:
    return replace(_with(pool, _moved(member, WorkerState.FAILED)), reconfigure=True)


def _moved(member: Member, target: WorkerState) -> Member:
    return replace(member, state=move(member.state, target))


def _member(pool: Pool, worker_id: int) -> Member:
    if not 0 <= worker_id < len(pool.members):
        raise UnknownWorker(worker_id, len(pool.members))
    return pool.members[worker_id]


def _with(pool: Pool, member: Member) -> Pool:
    at = member.worker_id
    return replace(pool, members=(*pool.members[:at], member, *pool.members[at + 1 :]))
