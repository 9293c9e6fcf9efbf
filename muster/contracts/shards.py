"""Who gets which part: shards of an independent job, ranges of a synchronous one."""

from collections.abc import Sequence
from itertools import pairwise
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


def ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, total) into contiguous ranges ``[start, stop)``, the first ones longer by one.

    Each of the `parts` gets ``total // parts``, and the first ``total % parts`` one more. No part,
    no range; where `total` is 0 every range is empty.
    """
    bounds = [part * (total // parts) + min(part, total % parts) for part in range(parts)]
    return list(pairwise([*bounds, total])) if parts else []
