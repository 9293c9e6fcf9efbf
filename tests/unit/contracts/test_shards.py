from itertools import chain

import pytest

from muster.contracts.shards import ranges, shards_of_rank


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_shard_has_exactly_one_rank(count: int, world_size: int) -> None:
    shards = [f"shard_{number}" for number in range(count)]
    dealt = [shards_of_rank(shards, rank, world_size) for rank in range(world_size)]
    assert sorted(chain.from_iterable(dealt)) == sorted(shards)
    for rank, own in enumerate(dealt):
        assert all(shards.index(shard) % world_size == rank for shard in own)
        assert own == sorted(own, key=shards.index)


def test_rank_beyond_the_shards_has_none() -> None:
    assert shards_of_rank(["a", "b"], 3, 4) == []


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 4), (4, 4), (0, 0), (0, -1)])
def test_rank_out_of_range_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is not in \[0, {world_size}\)"):
        shards_of_rank(["a"], rank, world_size)


def test_ranges_are_contiguous() -> None:
    assert ranges(100, 3) == [(0, 34), (34, 67), (67, 100)]
    assert ranges(0, 3) == [(0, 0)] * 3
    assert ranges(5, 0) == []
    cut = ranges(10_007, 5)
    assert [number for start, stop in cut for number in range(start, stop)] == list(range(10_007))
