import random
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from muster.collectives.reduction.reducer import Vector
from muster.collectives.reduction.summation import PIECE_ELEMENTS, Addition, add_up, plan_of
from muster.collectives.reduction.tree import Block, blocks_of_range, root_of

Bits = NDArray[np.uint32]

SPECIAL = np.array(
    [
        0x7F800000,  # infinity
        0xFF800000,
        0x7FC00001,  # NaN with a payload, and with a sign
        0xFFC12345,
        0x7F800001,  # a signalling one
        0x00000001,  # denormal
        0x807FFFFF,
        0x80000000,  # -0.0
        0x00000000,
        0x7F7FFFFF,  # the largest
        0xFF7FFFFF,
    ],
    np.uint32,
)


def vectors_of(leaves: int, elements: int, seed: int) -> list[Vector]:
    """Leaves of very different magnitudes, a tenth of their values special ones."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((leaves, elements)) * 2.0 ** rng.integers(-30, 30, (leaves, 1))
    made = values.astype(np.float32)
    special = rng.random((leaves, elements)) < 0.1
    made.view(np.uint32)[special] = rng.choice(SPECIAL, int(special.sum()))
    return list(made)


def naive(node: Block, leaves: list[Vector]) -> Vector:
    """The definition."""
    if node.level == 0:
        return leaves[node.number]
    left, right = node.halves
    return naive(left, leaves) + naive(right, leaves)


def bits(vector: Vector) -> Bits:
    """The bits, every NaN the same."""
    made = vector.copy().view(np.uint32)
    made[np.isnan(vector)] = 0x7FC00000
    return made


def blocks_by_chance(leaves: int, chance: random.Random) -> list[Block]:
    """Any partition into blocks, in any order."""
    cuts = sorted(chance.sample(range(leaves + 1), chance.randint(0, leaves)))
    blocks = [
        block
        for start, stop in pairwise([0, *cuts, leaves])
        for block in blocks_of_range(start, stop)
    ]
    chance.shuffle(blocks)
    return blocks


@pytest.mark.filterwarnings("ignore:.*encountered in add:RuntimeWarning")
@pytest.mark.parametrize("seed", range(60))
def test_any_blocks_give_the_bits_of_the_definition(seed: int) -> None:
    chance = random.Random(seed)  # noqa: S311  repeatable, not secret
    count = 2 ** chance.randint(0, 6)
    leaves = vectors_of(count, chance.randint(1, 300), seed)
    blocks = blocks_by_chance(count, chance)
    held = [naive(block, leaves) for block in blocks]
    out = np.empty_like(leaves[0])
    add_up(plan_of(blocks), held, out)
    assert np.array_equal(out.view(np.uint32), bits(naive(root_of(count), leaves)))


@pytest.mark.filterwarnings("ignore:.*encountered in add:RuntimeWarning")
@pytest.mark.parametrize("elements", [PIECE_ELEMENTS - 1, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS + 7])
def test_pieces_do_not_change_bits(elements: int) -> None:
    leaves = vectors_of(8, elements, elements)
    whole, sliced = np.empty_like(leaves[0]), np.empty_like(leaves[0])
    plan = plan_of([Block(0, number) for number in range(8)])
    add_up(plan, leaves, whole)
    for part in (slice(0, 1000), slice(1000, elements)):
        add_up(plan, [leaf[part] for leaf in leaves], sliced[part])
    assert np.array_equal(whole.view(np.uint32), bits(naive(root_of(8), leaves)))
    assert np.array_equal(whole.view(np.uint32), sliced.view(np.uint32))


def test_nan_is_canonical() -> None:
    out = np.empty(4, np.float32)
    held = np.array([0x7F800001, 0xFFC12345, 0x3F800000, 0xFFFFFFFF], np.uint32).view(np.float32)
    add_up(plan_of([Block(3, 0)]), [held], out)
    assert out.view(np.uint32).tolist() == [0x7FC00000, 0x7FC00000, 0x3F800000, 0x7FC00000]


def test_sum_of_negative_zeros_is_negative() -> None:
    zeros = [np.full(3, -0.0, np.float32) for _ in range(4)]
    out = np.empty(3, np.float32)
    add_up(plan_of([Block(0, number) for number in range(4)]), zeros, out)
    assert np.signbit(out).all()


def test_left_operand_comes_first() -> None:
    plan = plan_of([Block(0, 3), Block(0, 1), Block(0, 0), Block(0, 2)])
    assert plan.additions == (Addition(4, 2, 1), Addition(5, 3, 0), Addition(4, 4, 5))
    assert plan.temporaries == 1


@pytest.mark.parametrize("leaves", [2, 8, 64])
def test_temporaries_are_bounded_by_the_depth(leaves: int) -> None:
    plan = plan_of([Block(0, number) for number in range(leaves)])
    assert plan.temporaries < leaves.bit_length()
    assert len(plan.additions) == leaves - 1


@pytest.mark.parametrize(
    "blocks",
    [
        [],
        [Block(0, 0), Block(0, 1), Block(0, 2)],
        [Block(1, 0), Block(0, 1), Block(0, 3)],
        [Block(1, 0), Block(1, 1), Block(1, 1)],
        [Block(0, 1)],
        [Block(1, 0), Block(0, 0), Block(0, 1)],
    ],
)
def test_blocks_must_cover_all_leaves_once(blocks: list[Block]) -> None:
    with pytest.raises(ValueError, match=r"leaves|leaf"):
        plan_of(blocks)
