"""Adds gradients up as the tree wants it, straight from where the program left them.

A leaf's arrays are held, not copied, until those of its sibling are there; their sum is the first
thing that is written. So n leaves cost n - 1 additions and nothing else, as much as adding one to
the next in whatever order.
"""

from collections.abc import Callable, Sequence
from itertools import product, starmap
from typing import Final, TypeAlias

import numpy as np

from muster.collectives.backend import Vector
from muster.collectives.tree import Block
from muster.shapes import GradientShape

Arrays: TypeAlias = Sequence[Vector]

Compute: TypeAlias = Callable[[int], Arrays]
"""Returns the arrays of a leaf; called again, it comes to the same bits."""

CLOSE_LOOKS: Final = 16
"""So many pairs of leaves are searched for shared memory in full, every array with every other: a
program that takes turns with a few buffers shows it at once. Later only like with like."""


class Adder:
    """Sums blocks of at most `leaves` leaves; for one thread."""

    def __init__(self, shape: GradientShape, leaves: int) -> None:
        self._shape = shape
        levels = leaves.bit_length()
        self._scratch = np.empty((levels, shape.gradient_elements), np.float32)
        self._scratch_views = [shape.views(row) for row in self._scratch]
        self._reuses_memory = False
        """The program returns the same memory every time: what is to outlive a call is copied."""
        self._close_looks = CLOSE_LOOKS

    def add_up(self, block: Block, compute: Compute, out: Vector) -> None:
        """Write the sum of a block into `out`, where all its gradients lie one after the other."""
        views = self._shape.views(out)
        if block.level == 0:
            _copy(compute(block.number), views)
        else:
            self._add_up(block, compute, out, views)

    def _add_up(self, block: Block, compute: Compute, out: Vector, views: Arrays) -> None:
        left, right = block.halves
        if block.level == 1:
            self._add_leaves(left.number, right.number, compute, views)
            return
        other = self._scratch[right.level]
        self._add_up(left, compute, out, views)
        self._add_up(right, compute, other, self._scratch_views[right.level])
        with quietly():
            np.add(out, other, out=out)

    def _add_leaves(self, left: int, right: int, compute: Compute, views: Arrays) -> None:
        first = compute(left)
        if self._reuses_memory:
            _copy(first, views)
            first = views
        second = compute(right)
        if not self._reuses_memory and self._overlap(first, second):
            # Then nothing is left of the first one, and both are computed again.
            self._reuses_memory = True
            self._add_leaves(left, right, compute, views)
            return
        with quietly():
            for one, other, target in zip(first, second, views, strict=True):
                np.add(one, other, out=target)

    def _overlap(self, first: Arrays, second: Arrays) -> bool:
        if not self._close_looks:
            return any(map(np.may_share_memory, first, second))
        self._close_looks -= 1
        return any(starmap(np.may_share_memory, product(first, second)))


def quietly() -> np.errstate:
    """What is not finite is told of in words, by whoever wants to know."""
    return np.errstate(all="ignore")


def _copy(arrays: Arrays, views: Arrays) -> None:
    for array, view in zip(arrays, views, strict=True):
        np.copyto(view, array)
