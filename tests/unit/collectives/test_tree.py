"""The fixed tree: blocks, ranges and assignments."""

import random

import pytest

from muster.collectives.reduction.tree import (
    Block,
    assign_blocks,
    blocks_of_range,
    gaps,
    isolate,
    root_of,
)
from muster.contracts.shards import ranges


def leaves_of(blocks: list[Block]) -> list[int]:
    return [leaf for block in blocks for leaf in range(block.start, block.stop)]


def test_halves_come_left_first() -> None:
    left, right = Block(3, 1).halves
    assert (left, right) == (Block(2, 2), Block(2, 3))
    assert (left.start, left.stop, right.start, right.stop) == (8, 12, 12, 16)


@pytest.mark.parametrize("leaves", [0, 3, 12, -4])
def test_leaves_must_be_a_power_of_two(leaves: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        root_of(leaves)


@pytest.mark.parametrize(
    ("start", "stop", "blocks"),
    [
        (0, 11, [Block(3, 0), Block(1, 4), Block(0, 10)]),
        (11, 16, [Block(0, 11), Block(2, 3)]),
        (5, 5, []),
        (0, 16, [Block(4, 0)]),
    ],
)
def test_range_is_covered_by_the_fewest_blocks(start: int, stop: int, blocks: list[Block]) -> None:
    assert list(blocks_of_range(start, stop)) == blocks


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("leaves", [1, 2, 8, 32, 64])
def test_each_rank_gets_a_contiguous_range(leaves: int, ranks: int) -> None:
    dealt = assign_blocks([()] * ranks, leaves)
    expected = [list(range(start, stop)) for start, stop in ranges(leaves, ranks)]
    assert [leaves_of(list(blocks)) for blocks in dealt] == expected


@pytest.mark.parametrize("seed", range(60))
def test_groups_lie_on_one_host_whatever_is_held(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311  repeatable, not secret
    leaves, groups = 32, 2 ** draw.randint(0, 5)
    size = leaves // groups
    hosts = sorted(draw.choices(range(4), k=draw.randint(1, 8)))
    held: list[list[Block]] = [[] for _ in hosts]
    for _ in range(4):  # each time all but one rank go on with some of what they have
        dealt = assign_blocks(held, leaves, groups, hosts)
        of_groups: dict[int, set[int]] = {}
        for host, blocks, before in zip(hosts, dealt, held, strict=True):
            assert list(blocks[: len(before)]) == list(before)
            assert all(block.size <= size for block in blocks)
            for block in blocks:
                of_groups.setdefault(block.start // size, set()).add(host)
        assert sorted(leaves_of([block for blocks in dealt for block in blocks])) == [
            *range(leaves)
        ]
        assert all(len(places) == 1 for places in of_groups.values())
        if len(hosts) > 1:
            gone = draw.randrange(len(hosts))
            dealt = [blocks for rank, blocks in enumerate(dealt) if rank != gone]
            hosts.pop(gone)
        held = [[block for block in blocks if draw.random() < 0.5] for blocks in dealt]


@pytest.mark.parametrize(
    ("hosts", "counts"),
    [
        ([0, 1], [4, 4]),
        ([0, 1, 2], [3, 3, 2]),
        ([0, 0, 0, 1], [6, 2]),
        ([*range(9)], [1] * 8 + [0]),
    ],
)
def test_groups_are_dealt_by_the_ranks_of_hosts(hosts: list[int], counts: list[int]) -> None:
    dealt = assign_blocks([()] * len(hosts), 8, 8, hosts)
    found = dict.fromkeys(hosts, 0)
    for host, blocks in zip(hosts, dealt, strict=True):
        found[host] += len(blocks)
    assert list(found.values()) == counts


@pytest.mark.parametrize("seed", range(20))
def test_held_blocks_stay_first_and_the_rest_is_even(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311  repeatable, not secret
    before = assign_blocks([()] * (draw.randint(1, 6) + 1), 32)
    survivors = before[1:]
    held = [tuple(block for block in blocks if draw.random() < 0.6) for blocks in survivors]
    dealt = assign_blocks(held, 32)
    assert sorted(leaves_of([block for blocks in dealt for block in blocks])) == list(range(32))
    for kept, blocks in zip(held, dealt, strict=True):
        assert blocks[: len(kept)] == kept
    new = [
        sum(b.size for b in blocks) - sum(b.size for b in kept)
        for kept, blocks in zip(held, dealt, strict=True)
    ]
    assert max(new) - min(new) <= 1


def test_gaps_are_the_leaves_that_are_not_held() -> None:
    assert gaps([Block(1, 1), Block(2, 2)], 16) == [Block(1, 0), Block(2, 1), Block(2, 3)]
    assert gaps([Block(4, 0)], 16) == []


def test_isolated_leaf_keeps_its_neighbours_together() -> None:
    assert list(isolate(Block(3, 0), [5])) == [
        Block(2, 0),
        Block(0, 4),
        Block(0, 5),
        Block(1, 3),
    ]
    assert list(isolate(Block(3, 0), [8])) == [Block(3, 0)]
    assert leaves_of(list(isolate(Block(3, 0), range(8)))) == list(range(8))
