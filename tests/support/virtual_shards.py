"""What each virtual shard reads, one at a time: the reference for `muster.training.batches`."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from muster.contracts.shards import HASH_MODULUS
from muster.datasets.index import Line, Totals, line_hash
from muster.datasets.order import Numbers, positions


class ShardSamples(NamedTuple):
    """What one virtual shard reads: places [start, stop) in the order of the epoch.

    Its size is the same in every step. Where the data ends before the batch is full, it lacks
    `padded` samples, and copies with weight 0 fill their places.
    """

    start: int
    stop: int
    padded: int

    @property
    def real(self) -> int:
        """How many samples are read, and consumed."""
        return self.stop - self.start

    @property
    def weights(self) -> NDArray[np.float32]:
        """1 for every sample that is read, then 0 for every copy."""
        return np.repeat(np.array([1, 0], np.float32), [self.real, self.padded])


def shard_samples(
    step_in_epoch: int, shard: int, *, batch_size: int, virtual_shards: int, samples: int
) -> ShardSamples:
    """Return what virtual shard `shard` reads in that step.

    Shards take equal parts of the batch in their order.
    """
    size = batch_size // virtual_shards
    first = step_in_epoch * batch_size + shard * size
    start, stop = min(first, samples), min(first + size, samples)
    return ShardSamples(start, stop, size - (stop - start))


def positions_of_shard(shard: ShardSamples, samples: int, *, seed: int, epoch: int) -> Numbers:
    """Return the samples of a virtual shard in its fixed size, copies of the last one at its end.

    Where it reads none at all, all are copies of the last sample of the epoch.
    """
    start = min(shard.start, samples - 1)
    stop = max(shard.stop, start + 1)
    found = positions(samples, seed=seed, epoch=epoch, start=start, stop=stop)
    return np.pad(found, (0, shard.real + shard.padded - len(found)), mode="edge")


def consumed(lines: Iterable[Line]) -> Totals:
    """Return count and sum of hashes of `lines`, from the bytes that were read."""
    hashes = [line_hash(line.content) for line in lines]
    return Totals(lines=len(hashes), hash_sum=sum(hashes) % HASH_MODULUS)
