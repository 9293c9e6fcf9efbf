"""Adds gradients up as the tree wants it, in place, in the memory that the program made for them.

The sum of a block grows in the arrays of its first leaf, if nobody but us can see them: a gradient
that a program has just made, returned and forgotten is ours to write to. So n leaves cost n - 1
additions in place, each of what has just been computed, as much as adding one to the next in
whatever order. Arrays that the program may still look at, or write to in its next call, are copied
before they are added to.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias
from weakref import getweakrefcount

import numpy as np

from muster.collectives.backend import Vector
from muster.collectives.tree import Block
from muster.shapes import GradientShape

Arrays: TypeAlias = Sequence[Vector]

Compute: TypeAlias = Callable[[int], list[Vector]]
"""Returns the arrays of a leaf in a list of their own; they are read, and may be written to."""


class Adder:
    """Sums blocks of at most `leaves` leaves; for one thread."""

    def __init__(self, shape: GradientShape, leaves: int) -> None:
        self._shape = shape
        # A row is touched, and so takes memory, only if a leaf has to be copied.
        self._copies = np.empty((leaves.bit_length() - 1, shape.gradient_elements), np.float32)

    def add_up(self, block: Block, compute: Compute, out: Vector) -> None:
        """Write the sum of a block into `out`, where all its gradients lie one after the other."""
        views = self._shape.views(out)
        if block.level == 0:
            _copy(compute(block.number), views)
            return
        left, right = block.halves
        with quietly():
            # Until the last addition `out` is free: a first leaf that is not ours goes there.
            self._add(self._sum(left, compute, views), right, compute, views)

    def _sum(self, block: Block, compute: Compute, home: Arrays) -> Arrays:
        """Return the sum of a block in arrays that are ours: the first leaf's, or else `home`."""
        if block.level == 0:
            arrays = compute(block.number)
            if are_ours(arrays):
                return arrays
            _copy(arrays, home)
            return home
        left, right = block.halves
        sums = self._sum(left, compute, home)
        self._add(sums, right, compute, sums)
        return sums

    def _add(self, sums: Arrays, right: Block, compute: Compute, target: Arrays) -> None:
        """Write `sums` plus the sum of the block to the right of theirs into `target`."""
        if right.level == 0:
            others: Arrays = compute(
                right.number
            )  # read once and let go: whose they are is no matter
        else:
            others = self._sum(right, compute, self._shape.views(self._copies[right.level]))
        for one, other, place in zip(sums, others, target, strict=True):
            np.add(one, other, out=place)


def are_ours(arrays: list[Vector]) -> bool:
    """Whether nobody but the holder of this list can see any of the arrays, nor its memory.

    A view, an export of the buffer and a name that a program keeps each hold a reference to the
    array that has the memory; one that owns none, or may not be written to, is somebody else's.
    """
    return all(
        type(array) is np.ndarray
        and sys.getrefcount(array) == _REFERENCES_OF_OURS
        and array.flags.owndata
        and array.flags.writeable
        and not getweakrefcount(array)
        for array in arrays
    )


def _references_of_ours() -> int:
    """How many references such an array has where `are_ours` looks, by this interpreter's count."""
    return max(sys.getrefcount(array) for array in [np.empty(1, np.float32)])


_REFERENCES_OF_OURS: Final = _references_of_ours()


def quietly() -> np.errstate:
    """What is not finite is told of in words, by whoever wants to know."""
    return np.errstate(all="ignore")


def _copy(arrays: Arrays, views: Arrays) -> None:
    for array, view in zip(arrays, views, strict=True):
        np.copyto(view, array)
