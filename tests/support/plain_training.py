"""Synchronous training in a few plain loops: no rank, no failure, no speed.

Every job must end with the same bits, whichever rank computed what.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from muster.datasets.index import Line, Totals
from muster.datasets.order import steps_per_epoch
from muster.datasets.random_access import RandomAccess
from muster.datasets.sources import open_source
from muster.program import Batch, Program, State
from muster.training.batches import decode_lines, decoder_of
from muster.training.schema import GradientSchema, Leaf, Means, StateSchema, read_only
from tests.support.virtual_shards import consumed, positions_of_shard, shard_samples


class Outcome(NamedTuple):
    state: State
    means: list[Means]
    """One a step."""
    read: list[Totals]
    """One an epoch: what was consumed in it."""


class PlainTraining:
    """One program on one data set, with V virtual shards."""

    def __init__(
        self, program: Program, dataset: Path, *, seed: int, batch_size: int, virtual_shards: int
    ) -> None:
        self._program = program
        self._source = open_source(dataset)
        self._seed = seed
        self._batch_size = batch_size
        self._virtual_shards = virtual_shards
        self._shape: GradientSchema | None = None

    def run(self, epochs: int) -> Outcome:
        with RandomAccess(self._source) as self._drawer:
            self._steps = steps_per_epoch(self._drawer.totals.lines, self._batch_size)
            return self._run(epochs)

    def _run(self, epochs: int) -> Outcome:
        state = dict(self._program.initial(self._seed))
        state_shape = StateSchema.of(state)
        means, read = [], []
        for epoch in range(epochs):
            lines: list[Line] = []
            for step in range(epoch * self._steps, (epoch + 1) * self._steps):
                shards = range(self._virtual_shards)
                total = summed_by_halves([self._leaf(state, Leaf(step, v), lines) for v in shards])
                means.append(self._shape.means(total, np.empty_like(total)))
                new = self._program.update(read_only(state), means[-1].gradients, step)
                target = {name: np.empty_like(array) for name, array in state.items()}
                state_shape.write(new, step, target)
                state = target
            read.append(consumed(lines))
        return Outcome(state, means, read)

    def _leaf(self, state: State, leaf: Leaf, lines: list[Line]) -> np.ndarray:
        """Return the vector of one virtual shard, and add what it consumed to `lines`."""
        samples = self._drawer.totals.lines
        epoch, step_in_epoch = divmod(leaf.step, self._steps)
        place = shard_samples(
            step_in_epoch,
            leaf.shard,
            batch_size=self._batch_size,
            virtual_shards=self._virtual_shards,
            samples=samples,
        )
        numbers = positions_of_shard(place, samples, seed=self._seed, epoch=epoch)
        drawn = self._drawer.draw(numbers)
        lines += drawn[: place.real]
        batch = Batch(decode_lines(drawn, decoder_of(self._program)), place.weights)
        random = random_of(self._seed, epoch, leaf)
        contribution = self._program.gradient(read_only(state), batch, random)
        self._shape = self._shape or GradientSchema.of(state, contribution, leaf)
        vector = np.empty(self._shape.elements, np.float32)
        self._shape.write(contribution, float(place.real), leaf, vector, state)
        return vector


def random_of(seed: int, epoch: int, leaf: Leaf) -> np.random.Generator:
    """Return the numbers of a virtual shard from a generator made for it alone."""
    key = np.array([seed, 0], np.uint64)
    counter = np.array([0, epoch, leaf.step, leaf.shard], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))


def summed_by_halves(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Return the sum of all, left half plus right half, all the way down."""
    if len(vectors) == 1:
        return vectors[0]
    middle = len(vectors) // 2
    return summed_by_halves(vectors[:middle]) + summed_by_halves(vectors[middle:])
