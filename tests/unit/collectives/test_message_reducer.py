import random

import numpy as np
import pytest
from numpy.typing import NDArray

from muster.collectives.backend import Backend, Vector
from muster.collectives.message_reducer import MessageReducer, rounds_of
from muster.collectives.simulated import SimulatedGroup, run_ranks
from muster.collectives.tree import Block, assign_blocks
from tests.unit.collectives.leaves import LEAVES, Layout, layout_by_chance, leaves_of, sum_of


def slots_of(count: int, elements: int) -> NDArray[np.float32]:
    return np.zeros((count, elements), np.float32)


def reduce(backend: Backend, layout: Layout, leaves: list[Vector]) -> list[bytes]:
    """All-reduce the same layout twice, the second time with other values."""
    reducer = MessageReducer(backend, slots_of(LEAVES, leaves[0].size))
    results = []
    for factor in (np.float32(1), np.float32(-3)):
        for slot, block in zip(reducer.slots, layout[backend.rank], strict=False):
            slot[:] = sum_of([leaf * factor for leaf in leaves[block.start : block.stop]])
        results.append(reducer.all_reduce(layout).tobytes())
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("elements", [1, 1000, 40_000])
def test_the_bits_do_not_depend_on_who_has_what(world_size: int, elements: int) -> None:
    chance = random.Random(world_size)  # noqa: S311  repeatable, not secret
    leaves = leaves_of(elements)
    expected = [
        sum_of(leaves).tobytes(),
        sum_of([leaf * np.float32(-3) for leaf in leaves]).tobytes(),
    ]
    for layout in (assign_blocks([()] * world_size, LEAVES), layout_by_chance(world_size, chance)):
        group = SimulatedGroup(world_size)
        results = run_ranks(group.backends(), lambda backend: reduce(backend, layout, leaves))  # noqa: B023  run before the next turn
        assert results == [expected] * world_size


def test_a_vector_of_many_rounds_has_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.collectives.message_reducer.ROUND_ELEMENTS", 4096)
    test_the_bits_do_not_depend_on_who_has_what(3, 40_000)


@pytest.mark.parametrize("elements", [0, 1, 1023, 1024, 3000, 1 << 20])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_element_is_added_up_once(elements: int, world_size: int) -> None:
    pieces = [piece for pieces in rounds_of(elements, world_size) for piece in pieces]
    count = np.zeros(elements, np.int64)
    for piece in pieces:
        count[piece] += 1
    assert (count == 1).all()


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ([(Block(1, 0),)], "1 ranks"),
        ([(Block(0, 0), Block(0, 1)), ()], "slots"),
        ([(Block(0, 0),), (Block(0, 2),)], "leaves"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(layout: Layout, reason: str) -> None:
    reducer = MessageReducer(SimulatedGroup(2).backends()[0], slots_of(1, 4))
    with pytest.raises(ValueError, match=reason):
        reducer.all_reduce(layout)


def test_without_elements_there_is_nothing_to_do() -> None:
    reducer = MessageReducer(SimulatedGroup(1).backends()[0], slots_of(1, 0))
    assert reducer.all_reduce([(Block(0, 0),)]).size == 0
