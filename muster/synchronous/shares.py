"""What a rank adds to the sum of a step: the contributions of its blocks, leaf by leaf.

A leaf is one virtual shard. Its samples, its shape and its random numbers are functions of (seed,
epoch, step, shard) alone, so it comes to the same bits on whatever rank, however often.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import Vector
from muster.collectives.tree import Block
from muster.contracts.errors import MusterError
from muster.datasets.drawing import Drawer
from muster.loading import raised_in
from muster.program import Batch, Contribution, Program, State, decoder_of
from muster.shapes import GradientShape, Leaf, StateShape, read_only
from muster.synchronous.adding import Adder, quietly
from muster.synchronous.chance import Chance
from muster.synchronous.course import Course
from muster.synchronous.supply import Portion, Supply
from muster.synchronous.tally import TALLY_ELEMENTS
from muster.synchronous.work import Work

Rows = NDArray[np.float32]

_NOT_THEIRS: Final = (MusterError, MemoryError)
"""What passes through a program's functions and is not the program's alone."""


class Shares:
    """Computes any block of any step."""

    def __init__(
        self, program: Program, course: Course, drawer: Drawer, state: State, work: Work
    ) -> None:
        """`state` is any state; the first leaf of all shows what contributions look like.

        `work` is under way whenever a method computes.
        """
        self.course: Final = course
        self._program: Final = program
        self._work: Final = work
        self._supply: Final = Supply(course, drawer, decoder_of(program))
        self._chance: Final = Chance(course.seed)
        self._state_shape: Final = StateShape.of(state)
        first = Leaf(step=0, shard=0)
        (batch,) = self._supply.portion(0, Block(0, 0)).batches
        contribution = self._contribution(read_only(state), batch, first)
        self.shape: Final = GradientShape.of(state, contribution, first)
        self._adder: Final = Adder(self.shape, course.virtual_shards)

    @property
    def elements(self) -> int:
        """The length of what is summed: gradients, numbers and the tally."""
        return self.shape.elements + TALLY_ELEMENTS

    def write(self, block: Block, state: State, step: int, out: Vector) -> None:
        """Fill `out` with the sum of a block, added up as the tree wants it.

        Raises `ProgramRaised`, or `InvalidProgram`, also for a number that is not finite; what
        `out` holds then is of no use.
        """
        with self._work:
            self._write(block, state, step, out)

    def update(self, state: State, gradients: State, step: int, target: State) -> None:
        """Write the state after a step into `target`, or raise before that."""
        with self._work:
            try:
                returned = self._program.update(read_only(state), gradients, step)
            except _NOT_THEIRS:
                raise
            except Exception as error:
                raise raised_in("update", step, error) from error
            self._state_shape.write(returned, step, target)

    def _write(self, block: Block, state: State, step: int, out: Vector) -> None:
        state = read_only(state)
        portion = self._supply.portion(step, block)
        numbers: list[Sequence[float]] = [()] * block.size

        def compute(shard: int) -> list[Vector]:
            leaf, place = Leaf(step=step, shard=shard), shard - block.start
            contribution = self._contribution(state, portion.batches[place], leaf)
            arrays = self.shape.arrays(contribution, leaf)
            numbers[place] = self.shape.numbers(contribution, portion.weights[place])
            return arrays

        end = self.shape.gradient_elements
        self._adder.add_up(block, compute, out[:end])
        try:
            rows = _rows(numbers, portion)
        except (TypeError, ValueError):
            self._look_closely(block, state, step, portion)
            raise
        out[end:] = _sum_of_rows(rows)
        if not (_is_finite(out[:end]) and np.isfinite(rows).all()):
            self._look_closely(block, state, step, portion)

    def _contribution(self, state: State, batch: Batch, leaf: Leaf) -> Contribution:
        epoch, _ = self.course.place(leaf.step)
        random = self._chance.of(epoch, leaf)
        try:
            return self._program.gradient(state, batch, random)
        except _NOT_THEIRS:
            raise
        except Exception as error:
            raise raised_in("gradient", leaf.step, error) from error

    def _look_closely(self, block: Block, state: State, step: int, portion: Portion) -> None:
        """Compute a block again, one leaf at a time, and say which is wrong: none may be.

        The sum of numbers that are finite can be infinite.
        """
        target = np.empty(self.shape.elements, np.float32)
        for place, batch in enumerate(portion.batches):
            leaf = Leaf(step=step, shard=block.start + place)
            contribution = self._contribution(state, batch, leaf)
            self.shape.write(contribution, portion.weights[place], leaf, target)


def _is_finite(vector: Vector) -> bool:
    """No sum of squares hides what is not finite; that of large numbers is looked at again."""
    return math.isfinite(np.dot(vector, vector)) or bool(np.isfinite(vector).all())


def _rows(numbers: Sequence[Sequence[float]], portion: Portion) -> Rows:
    """Return a row per leaf: its loss, weight, metrics and tally."""
    with quietly():
        return np.hstack((np.array(numbers, np.float32), portion.tally))


def _sum_of_rows(rows: Rows) -> Vector:
    """Add rows up as the tree wants it, a whole level at once."""
    with quietly():
        while len(rows) > 1:
            rows = rows[0::2] + rows[1::2]
    total: Vector = rows[0]
    return total
