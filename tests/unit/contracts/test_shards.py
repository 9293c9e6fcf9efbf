from itertools import chain

import pytest

from muster.contracts.shards import Reading, ranges


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_shard_has_exactly_one_rank(count: int, world_size: int) -> None:
    readings = [Reading(rank=rank, world_size=world_size) for rank in range(world_size)]
    dealt = [reading.shard_idxs(count) for reading in readings]
    assert sorted(chain.from_iterable(dealt)) == list(range(count))
    for rank, own in enumerate(dealt):
        assert all(idx % world_size == rank for idx in own)
        assert list(own) == sorted(own)


def test_ranges_are_contiguous() -> None:
    assert ranges(100, 3) == [(0, 34), (34, 67), (67, 100)]
    assert ranges(0, 3) == [(0, 0)] * 3
    assert ranges(5, 0) == []
    cut = ranges(10_007, 5)
    assert [number for start, stop in cut for number in range(start, stop)] == list(range(10_007))
