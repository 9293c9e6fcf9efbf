"""Which rank reads which shard in independent mode."""

from collections.abc import Sequence
from typing import TypeVar

Shard = TypeVar("Shard")


def shards_of_rank(shards: Sequence[Shard], rank: int, world_size: int) -> list[Shard]:
    """Return the shards of `rank`: every `world_size`-th one of the sorted listing.

    Shard i belongs to the rank with ``i % world_size == rank``, so every shard has exactly one
    owner and the answer depends on nothing but the listing.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} is not in [0, {world_size})")
    return list(shards[rank::world_size])
