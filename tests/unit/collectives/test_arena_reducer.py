from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from muster.collectives.errors import ChannelClosed, Timeout
from muster.collectives.reduction import arena_reducer
from muster.collectives.reduction.arena_reducer import ArenaReducer
from muster.collectives.reduction.tree import Block, assign_blocks
from muster.collectives.transports.arena import PUBLISHED, SUMMED
from muster.collectives.transports.flags import Flags
from tests.support.arenas import Host

LEAVES = 16


def in_threads(reducers: list[ArenaReducer], work: Callable[[int, ArenaReducer], object]) -> list:
    with ThreadPoolExecutor(len(reducers)) as threads:
        return list(threads.map(work, range(len(reducers)), reducers))


def group(world_size: int, elements: int, **options: object) -> tuple[Host, list[Flags]]:
    host = Host(world_size, elements=elements, slot_count=LEAVES)
    return host, [host.flags(rank, **options) for rank in range(world_size)]


@pytest.mark.parametrize("elements", [10, 5000])
def test_timed_out_call_continues_when_repeated(elements: int) -> None:
    layout = assign_blocks([()] * 2, 2)
    host, flags = group(2, elements)
    first, second = host.reducers(flags)
    for step in range(3):
        first.slots[0], second.slots[0] = step, 10
        with pytest.raises(Timeout):
            first.all_reduce(layout, timeout_seconds=0.0)
        totals = in_threads([first, second], lambda _, reducer: reducer.all_reduce(layout))
        assert all((total == step + 10).all() for total in totals)


def test_repeated_call_keeps_its_part_of_the_sum() -> None:
    """The peer may finish the call and fill its slots for the next one meanwhile."""
    host, flags = group(2, 5000)
    first, _ = host.reducers(flags)
    first.slots[0], host.own[1].slots[0] = 1, 2
    flags[1].raise_to(PUBLISHED, 1)
    layout = assign_blocks([()] * 2, 2)
    with pytest.raises(Timeout):
        first.all_reduce(layout, timeout_seconds=0.0)
    host.own[1].slots[0] = 666
    flags[1].raise_to(SUMMED, 1)
    own = arena_reducer.part_of(5000, 0, 2)
    assert (first.all_reduce(layout)[own] == 3).all()


@pytest.mark.parametrize("elements", [10, 5000])
def test_result_is_read_only(elements: int) -> None:
    host, flags = group(1, elements)
    (reducer,) = host.reducers(flags)
    total = reducer.all_reduce([[Block(0, 0)]])
    with pytest.raises(ValueError, match="read-only"):
        total[0] = 1


@pytest.mark.parametrize("elements", [10, 5000])
def test_reducer_of_an_old_generation_writes_nothing(elements: int) -> None:
    host, flags = group(1, elements)
    (old,) = host.reducers(flags)
    host.flags(0, generation=2)
    old.slots[:] = 666
    with pytest.raises(ChannelClosed):
        old.all_reduce([(Block(0, 0),)])
    assert not (host.own[0].halves == 666).any()


@pytest.mark.parametrize("elements", [10, 5000])
def test_closed_peer_is_not_waited_for(elements: int) -> None:
    host, flags = group(2, elements)
    first, _ = host.reducers(flags)
    flags[1].close()
    with pytest.raises(ChannelClosed) as raised:
        first.all_reduce(assign_blocks([()] * 2, 2))
    assert raised.value.rank == 1


def test_short_sum_of_changed_slots_is_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 joins a new group after it has published its slots."""
    host, flags = group(2, 10)
    first, _ = host.reducers(flags)
    flags[1].raise_to(PUBLISHED, 1)

    def add_late(*_: object) -> None:
        host.flags(1, generation=2)
        host.own[1].halves[:] = 666

    monkeypatch.setattr(arena_reducer, "add_piece", add_late)
    with pytest.raises(ChannelClosed):
        first.all_reduce(assign_blocks([()] * 2, 2))


def test_long_sum_of_changed_slots_is_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 leaves when it has summed its part, while rank 2 still sums from its slots."""
    host, flags = group(3, 5000)
    first, *_ = host.reducers(flags)
    for peer in (1, 2):
        flags[peer].raise_to(PUBLISHED, 1)
    flags[1].raise_to(SUMMED, 1)
    flags[2].raise_to(SUMMED, 1)
    wait_for_all = flags[0].wait_for_all

    def wait_and_be_late(word: int, *rest: object) -> None:
        wait_for_all(word, *rest)
        if word == SUMMED:
            host.flags(1, generation=2)

    monkeypatch.setattr(flags[0], "wait_for_all", wait_and_be_late)
    with pytest.raises(ChannelClosed):
        first.all_reduce([(Block(0, 0),), (Block(0, 1),), (Block(1, 1),)])


@pytest.mark.parametrize("elements", [10, 5000])
def test_rank_of_an_old_generation_changes_no_new_sum(
    elements: int,
) -> None:
    """Rank 1 was stopped and replaced by rank 3, and then goes on with all that it may write to."""
    host = Host(4, elements=elements, slot_count=LEAVES)
    old = [host.flags(rank, members=[0, 1, 2]) for rank in (0, 1, 2)]
    stale = host.reducers(old)[1]
    members = [0, 2, 3]
    new = host.reducers([host.flags(rank, generation=2, members=members) for rank in members])
    layout = assign_blocks([()] * 3, 4)

    def write_everything() -> None:
        host.own[1].slots[:] = 666
        host.own[1].halves[:] = 666
        np.frombuffer(host.own[1].words, np.int64)[:] = -1 + (1 << 62)
        for peer in range(4):
            host.own[1].ring(peer)[:] = b"\xff" * len(host.own[1].ring(peer))
        stale._result[:] = 666  # noqa: SLF001  what a rank of the old group has at hand

    def train(rank: int, reducer: ArenaReducer) -> list[float]:
        totals = []
        for step in range(50):
            reducer.slots[:2] = step
            totals.append(float(reducer.all_reduce(layout).max()))
            if rank == 0:
                write_everything()
        return totals

    expected = [sum(step for blocks in layout for _ in blocks) for step in range(50)]
    assert in_threads(new, train) == [expected] * 3
    with pytest.raises(ChannelClosed):
        stale.all_reduce(layout)
