"""Which samples of a data set a virtual shard holds: a function of (seed, epoch, step, shard).

The order of an epoch is the permutation that all managed training uses. A step takes the next
samples of it and deals them to its shards as evenly as possible, at least two to each while there
are two: a full batch and the last one of an epoch alike. A shard may be empty; nothing is padded.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.tree import Block
from muster.contracts.shards import HASH_MODULUS, ranges
from muster.datasets.index import Totals
from muster.datasets.order import positions
from muster.training.batches import BlockBatches
from muster.training.sample_count import encode_sample_count
from muster.training.schedule import Schedule

SAMPLES_MIN: Final = 2
"""Of a shard, while a step has so many: some layers need two samples for a variance."""

CHUNK: Final = 1 << 20

Numbers = NDArray[np.int64]


def totals_of(samples: int) -> Totals:
    """Return the totals of a data set of so many samples, each known by its index."""
    total = 0
    for start in range(0, samples, CHUNK):
        numbers = np.arange(start, min(start + CHUNK, samples))
        total += int(_hashes(numbers).sum(dtype=np.uint64))
    return Totals(lines=samples, hash_sum=total % HASH_MODULUS)


def deal(samples: int, shards: int) -> list[tuple[int, int]]:
    """Return which of a step's samples each shard gets, as ranges ``[start, stop)``."""
    filled = min(shards, max(1, samples // SAMPLES_MIN))
    return ranges(samples, filled) + [(samples, samples)] * (shards - filled)


class ShardLoader:
    """Looks up the samples of shards; a batch is an array of their numbers."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule: Final = schedule

    def load(self, step: int, block: Block) -> BlockBatches:
        """Return the numbers of the samples of each shard in a block."""
        batches = self._numbers(step)[block.start : block.stop]
        counts = np.array([len(batch) for batch in batches], np.float32)
        hashes = np.array([_hashes(batch).sum(dtype=np.uint64) for batch in batches], np.uint64)
        return BlockBatches(
            batches=batches, weights=counts, sample_counts=encode_sample_count(counts, hashes)
        )

    def _numbers(self, step: int) -> Sequence[Numbers]:
        schedule = self._schedule
        epoch, step_in_epoch = schedule.epoch_and_step(step)
        start = step_in_epoch * schedule.batch_size
        stop = min(start + schedule.batch_size, schedule.totals.lines)
        numbers = positions(
            schedule.totals.lines, seed=schedule.seed, epoch=epoch, start=start, stop=stop
        )
        return [numbers[one:other] for one, other in deal(stop - start, schedule.virtual_shards)]


def _hashes(numbers: Numbers) -> NDArray[np.uint64]:
    """Return a hash of each number: SplitMix64 (Steele, Lea and Flood, 2014)."""
    mixed = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: NDArray[np.uint64] = mixed ^ (mixed >> np.uint64(31))
    return result
