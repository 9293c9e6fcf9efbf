import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from muster.collectives import arena_reducer
from muster.collectives.arena import PUBLISHED, SUMMED
from muster.collectives.arena_reducer import ArenaReducer
from muster.collectives.errors import ChannelClosed, TimedOut
from muster.collectives.flags import Flags
from muster.collectives.tree import Block, assign_blocks
from tests.support.arenas import Host
from tests.unit.collectives.leaves import LEAVES, Layout, layout_by_chance, leaves_of, sum_of

LENGTHS = [1, 1000, 4096, 4097, 10_000]
"""Short and long ones, and the two at the border."""


def in_threads(reducers: list[ArenaReducer], work: Callable[[int, ArenaReducer], object]) -> list:
    with ThreadPoolExecutor(len(reducers)) as threads:
        return list(threads.map(work, range(len(reducers)), reducers))


def group(world_size: int, elements: int, **options: object) -> tuple[Host, list[Flags]]:
    host = Host(world_size, elements=elements, slot_count=LEAVES)
    return host, [host.flags(rank, **options) for rank in range(world_size)]


@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
def test_the_bits_do_not_depend_on_who_has_what(world_size: int, elements: int) -> None:
    chance = random.Random(world_size * elements)  # noqa: S311  repeatable, not secret
    leaves = leaves_of(elements)
    layouts = [assign_blocks([()] * world_size, LEAVES), layout_by_chance(world_size, chance)] * 2

    def train(rank: int, reducer: ArenaReducer) -> list[bytes]:
        results = []
        for number, layout in enumerate(layouts):
            factor = np.float32(number - 2.5)
            for slot, block in zip(reducer.slots, layout[rank], strict=False):
                slot[:] = sum_of([leaf * factor for leaf in leaves[block.start : block.stop]])
            results.append(reducer.all_reduce(layout).tobytes())
        return results

    host, flags = group(world_size, elements)
    expected = [
        sum_of([leaf * np.float32(number - 2.5) for leaf in leaves]).tobytes()
        for number in range(len(layouts))
    ]
    assert in_threads(host.reducers(flags), train) == [expected] * world_size


@pytest.mark.parametrize("elements", [10, 5000])
def test_a_result_may_be_read_until_the_next_call(elements: int) -> None:
    layout = assign_blocks([()] * 4, 4)

    def train(rank: int, reducer: ArenaReducer) -> None:
        for step in range(200):
            reducer.slots[0] = step + rank
            total = reducer.all_reduce(layout)
            # The others are free to go on meanwhile, as far as they can.
            reducer.slots[0] = -1e9
            assert (total == 4 * step + 6).all()

    host, flags = group(4, elements)
    in_threads(host.reducers(flags), train)


@pytest.mark.parametrize("elements", [10, 5000])
def test_a_call_that_timed_out_goes_on_when_it_is_repeated(elements: int) -> None:
    layout = assign_blocks([()] * 2, 2)
    host, flags = group(2, elements)
    first, second = host.reducers(flags)
    for step in range(3):
        first.slots[0], second.slots[0] = step, 10
        with pytest.raises(TimedOut):
            first.all_reduce(layout, timeout_seconds=0.0)
        totals = in_threads([first, second], lambda _, reducer: reducer.all_reduce(layout))
        assert all((total == step + 10).all() for total in totals)


@pytest.mark.parametrize("elements", [10, 5000])
def test_a_result_is_not_to_be_written_to(elements: int) -> None:
    host, flags = group(1, elements)
    (reducer,) = host.reducers(flags)
    total = reducer.all_reduce([[Block(0, 0)]])
    with pytest.raises(ValueError, match="read-only"):
        total[0] = 1


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([(Block(1, 0),)], "2 ranks"),
        ([tuple(Block(0, number) for number in range(32)), ()], "16 slots"),
        ([(Block(0, 0),), (Block(0, 2),)], "leaves"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_anything_is_said(
    layout: Layout, reason: str
) -> None:
    host, flags = group(2, 10)
    first, _ = host.reducers(flags)
    with pytest.raises(ValueError, match=reason):
        first.all_reduce(layout)
    assert flags[1].count(0, PUBLISHED) == 0


@pytest.mark.parametrize("elements", [10, 5000])
def test_the_reducer_of_an_old_generation_touches_nothing_any_more(elements: int) -> None:
    host, flags = group(1, elements)
    (old,) = host.reducers(flags)
    host.flags(0, generation=2)
    old.slots[:] = 666
    with pytest.raises(ChannelClosed):
        old.all_reduce([(Block(0, 0),)])
    assert not (host.own[0].halves == 666).any()


@pytest.mark.parametrize("elements", [10, 5000])
def test_a_peer_that_closed_is_not_waited_for(elements: int) -> None:
    host, flags = group(2, elements)
    first, _ = host.reducers(flags)
    flags[1].close()
    with pytest.raises(ChannelClosed) as raised:
        first.all_reduce(assign_blocks([()] * 2, 2))
    assert raised.value.rank == 1


def test_a_short_sum_of_slots_that_changed_under_it_is_not_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 1 is told of a new layout after it had said that its slots are ready."""
    host, flags = group(2, 10)
    first, _ = host.reducers(flags)
    flags[1].raise_to(PUBLISHED, 1)

    def add_late(*_: object) -> None:
        host.flags(1, generation=2)
        host.own[1].halves[:] = 666

    monkeypatch.setattr(arena_reducer, "add_piece", add_late)
    with pytest.raises(ChannelClosed):
        first.all_reduce(assign_blocks([()] * 2, 2))


def test_a_long_sum_of_slots_that_changed_under_it_is_not_returned(
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
def test_a_rank_of_an_old_generation_that_runs_on_changes_nothing_for_the_new(
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
        for place in range(4):
            host.own[1].ring(place)[:] = b"\xff" * len(host.own[1].ring(place))
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


@pytest.mark.parametrize("elements", [1, 1023, 1024, 3000, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_element_is_in_one_part(elements: int, world_size: int) -> None:
    count = np.zeros(elements, np.int64)
    for rank in range(world_size):
        count[arena_reducer.part_of(elements, rank, world_size)] += 1
    assert (count == 1).all()
