"""How the batch of a synchronous step is cut: into virtual shards, a power of two of equal parts.

Batch size and number of virtual shards decide the bits of a result; the number of ranks does not.
"""

from typing import Final

SAMPLES_PER_SHARD_MIN: Final = 2
"""A product with a single row goes through other instructions, which gives other bits."""


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def fits_shards(batch_size: int, virtual_shards: int) -> bool:
    """Return whether every virtual shard gets the same number of samples, and enough of them."""
    return batch_size % virtual_shards == 0 and batch_size >= SAMPLES_PER_SHARD_MIN * virtual_shards


def nearest_batch_size(batch_size: int, virtual_shards: int, most: int) -> int:
    """Return what comes nearest to `batch_size`, fits, and is not more than `most`."""
    per_shard = (batch_size + virtual_shards // 2) // virtual_shards
    return virtual_shards * min(max(per_shard, SAMPLES_PER_SHARD_MIN), most // virtual_shards)
