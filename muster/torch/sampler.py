"""The order of `muster.torch.join` for scripts that keep a loop of their own, at any world size.

A step takes the next `batch_size` samples of the epoch's permutation, and each rank a contiguous
part of them. So the number of ranks does not change what a step reads, and a gang that starts again
with more or fewer ranks reads exactly the samples that are left.
"""

import os
from collections.abc import Iterator, Sized
from typing import Final

from muster.contracts.shards import ranges
from muster.datasets.order import positions, steps_per_epoch
from muster.program import InvalidProgram


class sampler:  # noqa: N801  called as `join` is
    """The batches of one rank, for ``DataLoader(dataset, batch_sampler=…)``.

        batches = muster.torch.sampler(dataset, batch_size=64)
        batches.start_at(steps_done)  # from the checkpoint
        loader = DataLoader(dataset, batch_sampler=batches)
        for epoch in range(epochs):
            batches.set_epoch(epoch)
            for batch in loader: ...

    `batch_size` is that of a step over all ranks. `rank` and `world_size` are by default those in
    the environment, as torchrun sets them. Raises `InvalidProgram`.

    Every sample is drawn once an epoch: none is repeated or left out. DDP gives each rank the same
    weight, so let `batch_size` be a multiple of `world_size` for an exact mean. If the last step of
    an epoch has fewer samples than there are ranks, the last ranks have no batch in it, and DDP
    would wait for them: put the loop over an epoch into ``with model.join():``.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        batch_size: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self._rank: Final = int(os.environ.get("RANK") or 0) if rank is None else rank
        if world_size is None:
            world_size = int(os.environ.get("WORLD_SIZE") or 1)
        self._world_size: Final = world_size
        if not 0 <= self._rank < world_size:
            raise InvalidProgram(f"there is no rank {self._rank} of {world_size}: count from 0")
        if batch_size < world_size:
            raise InvalidProgram(f"{world_size} ranks share a batch_size of {batch_size}: raise it")
        self._samples: Final = len(dataset)
        self._batch_size: Final = batch_size
        self._steps: Final = steps_per_epoch(self._samples, batch_size)
        self._seed: Final = seed
        self._epoch = self._start = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._epoch = epoch

    def start_at(self, step: int) -> None:
        """Leave out the first `step` steps of training, counted over all epochs.

        Count them in the loop of rank 0, which has a batch in each, and save the number.
        """
        self._start = step

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps_left():
            start, stop = self._part(step)
            place = {"epoch": self._epoch, "start": start, "stop": stop}
            if start < stop:
                yield positions(self._samples, seed=self._seed, **place).tolist()

    def __len__(self) -> int:
        start, stop = self._part(self._steps - 1)  # only the last one may be empty
        return max(0, len(self._steps_left()) - (start == stop))

    def _steps_left(self) -> range:
        return range(max(0, self._start - self._epoch * self._steps), self._steps)

    def _part(self, step: int) -> tuple[int, int]:
        """Return the positions of this rank's part of a step."""
        start = step * self._batch_size
        size = min(self._batch_size, self._samples - start)
        first, last = ranges(size, self._world_size)[self._rank]
        return start + first, start + last
