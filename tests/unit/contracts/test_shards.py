from itertools import chain

import pytest

from muster.contracts.shards import shards_of_rank


@pytest.mark.parametrize("count", [0, 1, 3, 4, 10])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_every_shard_has_exactly_one_owner_by_its_place(count: int, world_size: int) -> None:
    shards = [f"shard_{number}" for number in range(count)]
    dealt = [shards_of_rank(shards, rank, world_size) for rank in range(world_size)]
    assert sorted(chain.from_iterable(dealt)) == sorted(shards)
    for rank, own in enumerate(dealt):
        assert all(shards.index(shard) % world_size == rank for shard in own)
        assert own == sorted(own, key=shards.index)


def test_a_rank_beyond_the_shards_has_none() -> None:
    assert shards_of_rank(["a", "b"], 3, 4) == []


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 4), (4, 4), (0, 0), (0, -1)])
def test_a_rank_that_is_not_in_the_job_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is not in \[0, {world_size}\)"):
        shards_of_rank(["a"], rank, world_size)
