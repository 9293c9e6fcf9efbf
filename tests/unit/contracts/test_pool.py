"""The elastic pool: a history of events, and the state after it."""

from collections.abc import Callable
from functools import reduce
from itertools import chain

import pytest

from muster.contracts.pool import (
    LIVING,
    Newcomer,
    Pool,
    PoolError,
    WorkerState,
    activate,
    join,
    leave,
    mark_published,
    process_ended,
)

Event = Callable[[Pool], Pool]
SYNCING, ACTIVE, DRAINING, FAILED, LEFT = WorkerState


def pool(*events: Event, min_workers: int = 1, max_workers: int = 8) -> Pool:
    """Return a pool after a history."""
    empty = Pool(min_workers=min_workers, max_workers=max_workers)
    return reduce(lambda before, event: event(before), events, empty)


def newcomer(rank: int, epoch: int = 0) -> Newcomer:
    return Newcomer(
        rank=rank, attempt=0, node="kiwi", gpus=2, backend="cuda", transport="tcp", epoch=epoch
    )


def free_rank(after: Pool) -> int:
    """Return the lowest rank that no living worker holds."""
    held = {member.rank for member in after.members if member.state in LIVING}
    return min(set(range(len(held) + 1)) - held)


def joins(rank: int | None = None, now: float = 0.0, step: int = 0) -> Event:
    return lambda before: join(
        before, newcomer(free_rank(before) if rank is None else rank), now=now, step=step
    )


def activates(worker_id: int, now: float = 0.0, step: int = 0) -> Event:
    return lambda before: activate(before, worker_id, now=now, step=step)


def leaves(worker_id: int) -> Event:
    return lambda before: leave(before, worker_id)


def ends(worker_id: int) -> Event:
    return lambda before: process_ended(before, worker_id)


def works(worker_id: int) -> list[Event]:
    """A worker that joined and became active."""
    return [joins(), activates(worker_id)]


def team(size: int, **limits: int) -> Pool:
    """Return a published pool of active workers."""
    return mark_published(pool(*chain.from_iterable(map(works, range(size))), **limits))


WAYS: dict[WorkerState, list[Event]] = {
    SYNCING: [joins()],
    ACTIVE: [*works(0)],
    DRAINING: [*works(0), leaves(0)],
    FAILED: [*works(0), ends(0)],
    LEFT: [*works(0), leaves(0), ends(0)],
}
"""The events that bring worker 0 into each state."""


def states(after: Pool) -> list[WorkerState]:
    return [member.state for member in after.members]


def test_worker_ids_are_never_reused() -> None:
    after = pool(*works(0), ends(0), *works(1), leaves(1), ends(1), *works(2), joins())
    assert [member.worker_id for member in after.members] == [0, 1, 2, 3]
    assert [member.rank for member in after.members] == [0, 0, 0, 1]


def test_member_records_join_and_heartbeat() -> None:
    (member,) = pool(joins(now=5.0, step=11), activates(0, now=6.0, step=12)).members
    assert (member.newcomer.node, member.newcomer.gpus) == ("kiwi", 2)
    assert member.newcomer.backend == "cuda"
    assert (member.joined_at, member.joined_step, member.last_heartbeat) == (5.0, 12, 6.0)


@pytest.mark.parametrize("active", [0, 1, 2, 3])
def test_syncing_workers_count_towards_the_limit(active: int) -> None:
    full = pool(*[joins()] * 3, *map(activates, range(active)), max_workers=3)
    with pytest.raises(PoolError, match="maximum of 3 workers"):
        join(full, newcomer(3), now=0.0, step=0)


@pytest.mark.parametrize("state", [DRAINING, FAILED, LEFT])
def test_draining_failed_and_left_workers_make_room(state: WorkerState) -> None:
    after = pool(*WAYS[state], joins(), max_workers=1)
    assert states(after) == [state, SYNCING]


def test_leaving_worker_drains_and_no_longer_counts() -> None:
    after = leave(team(2), 0)
    assert states(after) == [DRAINING, ACTIVE]
    assert [member.worker_id for member in after.active] == [1]


@pytest.mark.parametrize("state", [SYNCING, ACTIVE, DRAINING])
def test_rank_of_a_living_worker_is_refused(state: WorkerState) -> None:
    with pytest.raises(PoolError, match=f"rank 0 is held by worker 0, which is {state}"):
        join(pool(*WAYS[state]), newcomer(0), now=0.0, step=0)


REQUESTS: dict[str, Callable[[int], Event]] = {
    "activate": activates,
    "leave": leaves,
    "process_ended": ends,
}


OUTCOMES = {
    ("activate", SYNCING): ACTIVE,
    ("leave", ACTIVE): DRAINING,
    ("process_ended", SYNCING): FAILED,
    ("process_ended", ACTIVE): FAILED,
    ("process_ended", DRAINING): LEFT,
    ("process_ended", FAILED): FAILED,
    ("process_ended", LEFT): LEFT,
}


@pytest.mark.parametrize("state", list(WorkerState))
@pytest.mark.parametrize("request_name", list(REQUESTS))
def test_each_request_suits_some_states_only(request_name: str, state: WorkerState) -> None:
    before = mark_published(pool(*WAYS[state]))
    expected = OUTCOMES.get((request_name, state))
    if expected is None:
        with pytest.raises(PoolError, match=f"worker 0 is {state}, and only"):
            REQUESTS[request_name](0)(before)
        return
    after = REQUESTS[request_name](0)(before)
    assert states(after) == [expected]
    assert after.reconfigure == (expected in {DRAINING, FAILED} and expected is not state)
    assert (after == before) == (expected is state)


@pytest.mark.parametrize("request_name", list(REQUESTS))
@pytest.mark.parametrize("worker_id", [-1, 2, 99])
def test_unknown_worker_ids_are_refused(request_name: str, worker_id: int) -> None:
    with pytest.raises(PoolError, match=f"no worker {worker_id}: the pool has workers 0 to 1"):
        REQUESTS[request_name](worker_id)(team(2))
    with pytest.raises(PoolError, match="the pool is empty"):
        REQUESTS[request_name](worker_id)(pool())


def test_joining_asks_for_a_new_group_until_it_is_published() -> None:
    joined = pool(joins())
    assert joined.reconfigure
    assert not mark_published(joined).reconfigure
    assert activate(joined, 0, now=0.0, step=0).reconfigure, "the flag stays set"


def test_world_size_counts_active_workers() -> None:
    after = pool(*works(0), *works(1), *works(2), *works(3), leaves(0), ends(2), joins(2))
    assert states(after) == [DRAINING, ACTIVE, FAILED, ACTIVE, SYNCING]
    assert after.world_size == 2
    assert [member.worker_id for member in after.active] == [1, 3]


def test_pool_pauses_below_min_workers() -> None:
    before = team(2, min_workers=2)
    assert not before.is_paused
    after = process_ended(before, 0)
    assert after.is_paused
    replaced = joins()(after)
    assert replaced.is_paused, "a syncing worker does not compute"
    assert not activate(replaced, 2, now=0.0, step=0).is_paused
