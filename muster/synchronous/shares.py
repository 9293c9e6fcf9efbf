"""What a rank adds to the sum of a step: the contributions of its blocks, leaf by leaf.

A leaf is one virtual shard. Its samples, its shape and its random numbers are functions of (seed,
epoch, step, shard) alone, so it comes to the same bits on whatever rank, however often.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Vector
from muster.collectives.tree import Block
from muster.datasets.drawing import Drawer, consumed
from muster.datasets.index import Totals
from muster.datasets.order import positions, shard_samples
from muster.program import Batch, Contribution, Program, State, decoded, decoder_of
from muster.shapes import GradientShape, Leaf, StateShape, read_only
from muster.synchronous.course import Course
from muster.synchronous.tally import TALLY_ELEMENTS, write_tally

_FIRST_LINE: Final = np.zeros(1, np.int64)


class Shares:
    """Computes any block of any step."""

    def __init__(self, program: Program, course: Course, drawer: Drawer, state: State) -> None:
        """`state` is any state; the first leaf of all shows what contributions look like."""
        self.course: Final = course
        self._program: Final = program
        self._drawer: Final = drawer
        self._decode: Final[Callable[[bytes], Any]] = decoder_of(program)
        self._state_shape: Final = StateShape.of(state)
        first = Leaf(step=0, shard=0)
        contribution, _, _ = self._contribution(state, first)
        self.shape: Final = GradientShape.of(state, contribution, first)
        self._scratch: Final = np.empty(
            (course.virtual_shards.bit_length(), self.elements), np.float32
        )

    @property
    def elements(self) -> int:
        """The length of what is summed: gradients, numbers and the tally."""
        return self.shape.elements + TALLY_ELEMENTS

    def write(self, block: Block, state: State, step: int, out: Vector) -> None:
        """Fill `out` with the sum of a block, added up as the tree wants it."""
        if block.level == 0:
            self._write_leaf(state, Leaf(step=step, shard=block.number), out)
            return
        left, right = block.halves
        other = self._scratch[right.level]
        self.write(left, state, step, out)
        self.write(right, state, step, other)
        np.add(out, other, out=out)

    def updated(self, state: State, gradients: State, step: int) -> dict[str, NDArray[Any]]:
        """Return the state after a step, in arrays of its own; raises `InvalidProgram`."""
        returned = self._program.update(read_only(state), gradients, step)
        fresh = {name: np.empty_like(array) for name, array in state.items()}
        self._state_shape.write(returned, step, fresh)
        return fresh

    def _write_leaf(self, state: State, leaf: Leaf, out: Vector) -> None:
        contribution, weight, read = self._contribution(state, leaf)
        self.shape.write(contribution, weight, leaf, out[: self.shape.elements])
        write_tally(read, out[self.shape.elements :])

    def _contribution(self, state: State, leaf: Leaf) -> tuple[Contribution, float, Totals]:
        epoch, step_in_epoch = self.course.place(leaf.step)
        batch, read = self._batch(epoch, step_in_epoch, leaf.shard)
        random = _random(self.course.seed, epoch, leaf)
        contribution = self._program.gradient(read_only(state), batch, random)
        return contribution, float(batch.weights.sum()), read

    def _batch(self, epoch: int, step_in_epoch: int, shard: int) -> tuple[Batch, Totals]:
        """Return what a virtual shard reads, filled up to its size, and what of it counts."""
        course = self.course
        part = shard_samples(
            step_in_epoch,
            shard,
            batch_size=course.batch_size,
            virtual_shards=course.virtual_shards,
            samples=course.totals.lines,
        )
        numbers = positions(
            course.totals.lines, seed=course.seed, epoch=epoch, start=part.start, stop=part.stop
        )
        lines = self._drawer.draw(numbers)
        filling = lines[:1] or self._drawer.draw(_FIRST_LINE)
        samples = decoded(lines + filling * part.padded, self._decode)
        weights = np.ones(len(samples), np.float32)
        weights[len(lines) :] = 0
        return Batch(samples, weights), consumed(lines)


def _random(seed: int, epoch: int, leaf: Leaf) -> np.random.Generator:
    """Return numbers that are the leaf's own: a counter-based generator has a place for each."""
    counter = np.array([0, epoch, leaf.step, leaf.shard], np.uint64)
    key = np.array([seed, 0], np.uint64)
    return np.random.Generator(np.random.Philox(counter=counter, key=key))
