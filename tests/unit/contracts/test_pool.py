"""Every sentence about the elastic pool, as a history of what happened and what holds then."""

from collections.abc import Callable
from functools import reduce
from itertools import chain, product

import pytest

from muster.contracts.errors import IllegalMove
from muster.contracts.pool import (
    LIVING,
    TRANSITIONS,
    CannotActivate,
    CannotLeave,
    Newcomer,
    Pool,
    PoolFull,
    RankTaken,
    UnknownWorker,
    WorkerState,
    activate,
    gone,
    heartbeat,
    join,
    leave,
    look,
    move,
    settled,
)

Event = Callable[[Pool], Pool]
SYNCING, ACTIVE, DRAINING, FAILED, LEFT = WorkerState

LATER = 1000.0


def pool(
    *events: Event, min_workers: int = 1, max_workers: int = 8, timeout_seconds: float = 10.0
) -> Pool:
    """Return a pool after a history."""
    empty = Pool(min_workers=min_workers, max_workers=max_workers, timeout_seconds=timeout_seconds)
    return reduce(lambda before, event: event(before), events, empty)


def newcomer(rank: int, epoch: int = 0) -> Newcomer:
    return Newcomer(rank=rank, incarnation=0, node="kiwi", gpus=2, backend="numpy", epoch=epoch)


def joins(rank: int | None = None, now: float = 0.0, step: int = 0) -> Event:
    return lambda before: join(
        before, newcomer(before.free_rank if rank is None else rank), now=now, step=step
    )


def activates(worker_id: int, now: float = 0.0, step: int = 0) -> Event:
    return lambda before: activate(before, worker_id, now=now, step=step)


def leaves(worker_id: int) -> Event:
    return lambda before: leave(before, worker_id)


def ends(worker_id: int) -> Event:
    return lambda before: gone(before, worker_id)


def beats(worker_id: int, now: float) -> Event:
    return lambda before: heartbeat(before, worker_id, now=now)


def is_looked_at(now: float) -> Event:
    return lambda before: look(before, now=now)


def works(worker_id: int) -> list[Event]:
    """A worker that joined and became active."""
    return [joins(), activates(worker_id)]


def team(size: int, **limits: float) -> Pool:
    """Return a settled pool of active workers."""
    return settled(pool(*chain.from_iterable(map(works, range(size))), **limits))


WAYS: dict[WorkerState, list[Event]] = {
    SYNCING: [joins()],
    ACTIVE: [*works(0)],
    DRAINING: [*works(0), leaves(0)],
    FAILED: [*works(0), ends(0)],
    LEFT: [*works(0), leaves(0), ends(0)],
}
"""How worker 0 comes into each state."""

STATES = list(WorkerState)


def states(after: Pool) -> list[WorkerState]:
    return [member.state for member in after.members]


@pytest.mark.parametrize("state", STATES)
def test_every_state_is_reached_by_its_history(state: WorkerState) -> None:
    assert states(pool(*WAYS[state])) == [state]


MOVES = {
    (SYNCING, ACTIVE),
    (ACTIVE, DRAINING),
    (DRAINING, LEFT),
    (ACTIVE, FAILED),
    (SYNCING, FAILED),
}


@pytest.mark.parametrize(("current", "target"), list(product(WorkerState, repeat=2)))
def test_a_worker_moves_by_its_table_alone(current: WorkerState, target: WorkerState) -> None:
    if (current, target) in MOVES:
        assert move(current, target) is target
        return
    with pytest.raises(IllegalMove, match=f"cannot move from {current} to {target}"):
        move(current, target)


def test_a_worker_lives_exactly_where_a_move_is_left() -> None:
    assert {state for state in WorkerState if TRANSITIONS[state]} == LIVING


# Joining


def test_a_newcomer_is_accepted_as_syncing_with_the_next_id() -> None:
    after = pool(*works(0), *works(1), joins())
    assert states(after) == [ACTIVE, ACTIVE, SYNCING]
    assert [member.worker_id for member in after.members] == [0, 1, 2]


def test_ids_count_up_from_0_and_are_never_reused() -> None:
    after = pool(*works(0), ends(0), *works(1), leaves(1), ends(1), *works(2), joins())
    assert [member.worker_id for member in after.members] == [0, 1, 2, 3]
    assert [member.rank for member in after.members] == [0, 0, 0, 1]


def test_a_newcomer_announces_the_epoch_it_has_reached() -> None:
    after = join(pool(), newcomer(0, epoch=7), now=0.0, step=0)
    assert after.members[0].newcomer.epoch == 7


def test_each_worker_records_where_and_when_it_joined_and_its_last_heartbeat() -> None:
    (member,) = pool(joins(now=5.0, step=11), activates(0, now=6.0, step=12), beats(0, 8.0)).members
    assert (member.newcomer.node, member.newcomer.gpus) == ("kiwi", 2)
    assert member.newcomer.backend == "numpy"
    assert (member.joined_at, member.joined_step, member.last_heartbeat) == (5.0, 12, 8.0)


@pytest.mark.parametrize("active", [0, 1, 2, 3])
def test_syncing_workers_count_towards_the_limit(active: int) -> None:
    full = pool(*[joins()] * 3, *map(activates, range(active)), max_workers=3)
    with pytest.raises(PoolFull, match="already has 3 workers") as caught:
        join(full, newcomer(3), now=0.0, step=0)
    assert caught.value.max_workers == 3


@pytest.mark.parametrize("state", [DRAINING, FAILED, LEFT])
def test_workers_that_drain_failed_or_left_make_room(state: WorkerState) -> None:
    after = pool(*WAYS[state], joins(), max_workers=1)
    assert states(after) == [state, SYNCING]


# Leaving


def test_an_active_worker_that_is_asked_to_leave_drains_at_once_and_counts_no_longer() -> None:
    after = leave(team(2), 0)
    assert states(after) == [DRAINING, ACTIVE]
    assert after.world_size == 1
    assert after.shares(10) == {1: (0, 10)}


def test_a_worker_has_left_once_it_has_gone() -> None:
    assert states(pool(*works(0), leaves(0), ends(0))) == [LEFT]


@pytest.mark.parametrize("state", [SYNCING, DRAINING, FAILED, LEFT])
def test_in_any_other_state_leaving_is_refused(state: WorkerState) -> None:
    with pytest.raises(CannotLeave, match=f"worker 0 is {state}, and only an active") as caught:
        leave(pool(*WAYS[state]), 0)
    assert (caught.value.worker_id, caught.value.state) == (0, state)


@pytest.mark.parametrize("state", [ACTIVE, DRAINING, FAILED, LEFT])
def test_only_a_syncing_worker_becomes_active(state: WorkerState) -> None:
    with pytest.raises(CannotActivate, match=f"worker 0 is {state}, and only a syncing") as caught:
        activate(pool(*WAYS[state]), 0, now=0.0, step=0)
    assert (caught.value.worker_id, caught.value.state) == (0, state)


# Failing


def test_an_active_worker_silent_for_longer_than_the_timeout_has_failed() -> None:
    before = team(1, timeout_seconds=10.0)
    assert states(look(before, now=10.0)) == [ACTIVE]
    assert states(look(before, now=10.1)) == [FAILED]


def test_a_heartbeat_keeps_a_worker_active() -> None:
    assert states(pool(*works(0), beats(0, 9.0), is_looked_at(19.0))) == [ACTIVE]


def test_several_can_fail_in_one_look() -> None:
    after = look(heartbeat(team(4), 2, now=50.0), now=55.0)
    assert states(after) == [FAILED, FAILED, ACTIVE, FAILED]
    assert after.world_size == 1


@pytest.mark.parametrize("state", [SYNCING, DRAINING, FAILED, LEFT])
def test_silence_fails_none_but_the_active(state: WorkerState) -> None:
    before = pool(*WAYS[state])
    assert look(before, now=LATER) == before


def test_the_silence_of_a_worker_that_became_active_begins_then() -> None:
    assert states(pool(joins(), activates(0, now=100.0), is_looked_at(109.0))) == [ACTIVE]


@pytest.mark.parametrize("worker_id", [-1, 1, 99])
def test_a_heartbeat_of_an_unknown_id_is_ignored(worker_id: int) -> None:
    before = team(1)
    assert heartbeat(before, worker_id, now=LATER) == before


@pytest.mark.parametrize("state", [FAILED, LEFT])
def test_a_heartbeat_brings_nobody_back(state: WorkerState) -> None:
    before = pool(*WAYS[state])
    assert heartbeat(before, 0, now=LATER) == before


@pytest.mark.parametrize(("state", "then"), [(SYNCING, FAILED), (ACTIVE, FAILED), (DRAINING, LEFT)])
def test_a_process_that_ends_takes_its_worker_along_from_any_living_state(
    state: WorkerState, then: WorkerState
) -> None:
    assert states(pool(*WAYS[state], ends(0))) == [then]


@pytest.mark.parametrize("state", [FAILED, LEFT])
def test_the_end_of_a_process_changes_nothing_for_a_worker_that_is_no_more(
    state: WorkerState,
) -> None:
    before = settled(pool(*WAYS[state]))
    assert gone(before, 0) == before


# Replacing


def test_a_replacement_is_a_new_worker_that_takes_the_failed_ones_rank() -> None:
    after = pool(*works(0), *works(1), *works(2), ends(1), joins())
    assert states(after) == [ACTIVE, FAILED, ACTIVE, SYNCING]
    assert [member.rank for member in after.members] == [0, 1, 2, 1]


def test_restarts_are_counted_per_rank() -> None:
    after = pool(*works(0), *works(1), ends(1), joins(1), ends(2), joins(1), ends(0), joins(0))
    assert [after.restarts(rank) for rank in range(3)] == [1, 2, 0]


def test_a_failure_that_nobody_replaced_is_no_restart() -> None:
    assert pool(*works(0), ends(0)).restarts(0) == 0


def test_taking_the_place_of_one_that_left_is_no_restart() -> None:
    after = pool(*works(0), leaves(0), ends(0), joins(0))
    assert after.restarts(0) == 0
    assert gone(after, 1).restarts(0) == 0
    assert pool(lambda _: gone(after, 1), joins(0)).restarts(0) == 1


def test_failed_and_left_workers_stay_in_the_list() -> None:
    after = pool(*works(0), ends(0), *works(1), leaves(1), ends(1), *works(2))
    assert states(after) == [FAILED, LEFT, ACTIVE]


@pytest.mark.parametrize("state", [SYNCING, ACTIVE, DRAINING])
def test_the_rank_of_a_living_worker_is_taken(state: WorkerState) -> None:
    with pytest.raises(RankTaken, match=f"rank 0 is held by worker 0, which is {state}") as caught:
        join(pool(*WAYS[state]), newcomer(0), now=0.0, step=0)
    assert (caught.value.rank, caught.value.worker_id) == (0, 0)


def test_the_free_rank_is_the_lowest_that_no_living_worker_holds() -> None:
    assert pool().free_rank == 0
    assert team(3).free_rank == 3
    assert gone(team(3), 1).free_rank == 1
    assert leave(team(3), 1).free_rank == 3, "one that drains is still there"


# What is refused


REQUESTS: dict[str, Callable[[int], Event]] = {
    "activate": activates,
    "leave": leaves,
    "gone": ends,
}


@pytest.mark.parametrize("request_name", list(REQUESTS))
@pytest.mark.parametrize("worker_id", [-1, 2, 99])
def test_other_requests_for_unknown_ids_are_refused(request_name: str, worker_id: int) -> None:
    with pytest.raises(UnknownWorker, match=f"no worker {worker_id}: the pool knows 0 to 1"):
        REQUESTS[request_name](worker_id)(team(2))
    with pytest.raises(UnknownWorker, match="the pool knows nobody at all"):
        REQUESTS[request_name](worker_id)(pool())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("request_name", list(REQUESTS))
def test_whatever_is_asked_only_moves_of_the_table_happen(
    request_name: str, state: WorkerState
) -> None:
    before = pool(*WAYS[state])
    copy = pool(*WAYS[state])
    try:
        after = REQUESTS[request_name](0)(before)
    except (CannotActivate, CannotLeave):
        after = before
    moved = (state, after.members[0].state)
    assert moved in MOVES or after == before
    assert before == copy, "a pool never changes"


# The flag


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (team(2), joins()),
        (team(2), leaves(0)),
        (team(2), ends(0)),
        (settled(pool(joins())), ends(0)),
        (team(2), is_looked_at(LATER)),
    ],
)
def test_acceptance_a_request_to_leave_and_a_failure_each_ask_for_a_new_layout(
    before: Pool, event: Event
) -> None:
    assert not before.reconfigure
    assert event(before).reconfigure


@pytest.mark.parametrize(
    ("before", "event"),
    [
        (settled(pool(joins())), activates(0)),
        (settled(leave(team(2), 0)), ends(0)),
        (team(2), beats(0, 1.0)),
        (team(2), is_looked_at(1.0)),
    ],
)
def test_becoming_active_and_having_left_do_not(before: Pool, event: Event) -> None:
    assert not event(before).reconfigure
    flagged = join(before, newcomer(9), now=0.0, step=0)
    assert event(flagged).reconfigure, "nor do they take the flag back"


def test_the_flag_is_cleared_when_the_new_layout_is_in_force() -> None:
    before = pool(*works(0))
    assert before.reconfigure
    assert not settled(before).reconfigure
    assert states(settled(before)) == states(before)


def test_an_empty_pool_asks_for_nothing() -> None:
    assert not pool().reconfigure


# World size, pause, shares


def test_the_world_size_in_force_is_the_number_of_active_workers() -> None:
    after = pool(*works(0), *works(1), *works(2), *works(3), leaves(0), ends(2), joins(2))
    assert states(after) == [DRAINING, ACTIVE, FAILED, ACTIVE, SYNCING]
    assert after.world_size == 2
    assert [member.worker_id for member in after.active] == [1, 3]


def test_with_fewer_active_workers_than_the_minimum_training_pauses_and_resumes_by_itself() -> None:
    before = team(2, min_workers=2)
    assert not before.is_paused
    after = gone(before, 0)
    assert after.is_paused
    replaced = joins()(after)
    assert replaced.is_paused, "one that is syncing does not compute"
    assert not activate(replaced, 2, now=0.0, step=0).is_paused


def test_100_samples_over_3_workers() -> None:
    assert team(3).shares(100) == {0: (0, 34), 1: (34, 67), 2: (67, 100)}


def test_10_007_samples_over_5_workers_are_disjoint_and_covered() -> None:
    shares = team(5).shares(10_007)
    assert [stop - start for start, stop in shares.values()] == [2002, 2002, 2001, 2001, 2001]
    covered = [number for start, stop in shares.values() for number in range(start, stop)]
    assert covered == list(range(10_007))


def test_no_worker_has_no_shards_and_no_samples_are_empty_ranges() -> None:
    assert pool().shares(100) == {}
    assert pool(joins()).shares(100) == {}
    assert team(2).shares(0) == {0: (0, 0), 1: (0, 0)}


def test_after_a_failure_the_rest_have_all_samples_in_the_order_of_their_ids() -> None:
    after = pool(lambda _: gone(team(3), 0), joins(), activates(3))
    assert [member.rank for member in after.active] == [1, 2, 0]
    assert after.shares(100) == {1: (0, 34), 2: (34, 67), 3: (67, 100)}


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("total", [0, 1, 7, 32, 1000])
def test_shares_are_disjoint_complete_and_equal_to_within_one(workers: int, total: int) -> None:
    shares = list(team(workers).shares(total).values())
    sizes = [stop - start for start, stop in shares]
    assert list(chain.from_iterable(range(*share) for share in shares)) == list(range(total))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
