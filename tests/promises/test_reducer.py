"""The promises of `Reducer`, kept over messages and in arenas: the bits of the fixed tree."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from muster.collectives.reduction.message_reducer import MessageReducer
from muster.collectives.reduction.reducer import Reducer, Vector
from muster.collectives.reduction.summation import add_up, plan_of
from muster.collectives.reduction.tree import Block, assign_blocks, blocks_of_range
from muster.collectives.simulated import SimulatedBackend
from tests.support.arenas import Host

LEAVES = 16
LENGTHS = [1, 1000, 4096, 4097, 40_000]
"""Short and long vectors of both reducers, and the two at the border of arenas."""

Layout = list[tuple[Block, ...]]
Make = Callable[[int, int], list[Reducer]]


def over_messages(world_size: int, elements: int) -> list[Reducer]:
    return [
        MessageReducer(backend, np.zeros((LEAVES, elements), np.float32))
        for backend in SimulatedBackend.create_group(world_size)
    ]


def in_arenas(world_size: int, elements: int) -> list[Reducer]:
    host = Host(world_size, elements=elements, slot_count=LEAVES)
    return host.reducers([host.flags(rank) for rank in range(world_size)])


@pytest.fixture(params=[over_messages, in_arenas])
def make(request: pytest.FixtureRequest) -> Make:
    return request.param


def in_threads(reducers: list[Reducer], work: Callable[[int, Reducer], object]) -> list:
    with ThreadPoolExecutor(len(reducers)) as threads:
        return list(threads.map(work, range(len(reducers)), reducers))


def sum_of(leaves: list[Vector]) -> Vector:
    """Return the root's sum, or that of the one block whose leaves are given."""
    out = np.empty_like(leaves[0])
    add_up(plan_of([Block(0, number) for number in range(len(leaves))]), leaves, out)
    return out


def random_layout(world_size: int, draw: random.Random) -> Layout:
    """Any rank may hold any blocks, or none."""
    held: list[list[Block]] = [[] for _ in range(world_size)]
    at = 0
    while at < LEAVES:
        stop = draw.randint(at + 1, LEAVES)
        held[draw.randrange(world_size)] += blocks_of_range(at, stop)
        at = stop
    return [tuple(blocks) for blocks in held]


@pytest.mark.slow
@pytest.mark.parametrize("elements", LENGTHS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
def test_bits_do_not_depend_on_the_assignment(make: Make, world_size: int, elements: int) -> None:
    draw = random.Random(world_size * elements)  # noqa: S311  repeatable, not secret
    leaves = list(np.random.default_rng(elements).standard_normal((LEAVES, elements), np.float32))
    leaves[3][0] = np.nan
    layouts = [assign_blocks([()] * world_size, LEAVES), random_layout(world_size, draw)] * 2
    calls = [
        ([leaf * np.float32(number - 2.5) for leaf in leaves], layout)
        for number, layout in enumerate(layouts)
    ]

    def train(rank: int, reducer: Reducer) -> list[bytes]:
        results = []
        for values, layout in calls:
            for slot, block in zip(reducer.slots, layout[rank], strict=False):
                slot[:] = sum_of(values[block.start : block.stop])
            results.append(reducer.all_reduce(layout).tobytes())
        return results

    expected = [sum_of(values).tobytes() for values, _ in calls]
    assert in_threads(make(world_size, elements), train) == [expected] * world_size


def test_rounds_of_messages_do_not_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.collectives.reduction.message_reducer.ROUND_ELEMENTS", 4096)
    test_bits_do_not_depend_on_the_assignment(over_messages, 3, 40_000)


@pytest.mark.parametrize("elements", [10, 20_000])
def test_result_stays_until_the_next_call(make: Make, elements: int) -> None:
    layout = assign_blocks([()] * 4, 4)

    def train(rank: int, reducer: Reducer) -> None:
        for step in range(100):
            reducer.slots[0] = step + rank
            total = reducer.all_reduce(layout)
            reducer.slots[0] = -1e9  # the other ranks may be behind by now
            assert (total == 4 * step + 6).all()

    in_threads(make(4, elements), train)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([(Block(1, 0),)], "2"),
        ([tuple(Block(0, number) for number in range(32)), ()], "slots"),
        ([(Block(0, 0),), (Block(0, 2),)], "leaves"),
    ],
)
def test_invalid_assignment_is_refused(make: Make, layout: Layout, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make(2, 10)[0].all_reduce(layout)


def test_vector_without_elements_has_an_empty_sum() -> None:
    (reducer,) = over_messages(1, 0)
    assert reducer.all_reduce([(Block(0, 0),)]).size == 0
