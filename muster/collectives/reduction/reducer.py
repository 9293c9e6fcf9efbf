"""The interface of a sum in the order of the fixed tree."""

from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.collectives.backend import TIMEOUT_SECONDS
from muster.collectives.reduction.tree import BlockAssignment

Vector: TypeAlias = NDArray[np.float32]


class Reducer(Protocol):
    """Sums vectors in the order of the fixed tree, in memory that the transport owns.

    A rank writes the sum of each of its blocks into a slot and calls `all_reduce`. The bits of the
    result depend on the leaves alone, not on which rank had which block.
    """

    slots: NDArray[np.float32]
    """(slot count, elements); writable outside of `all_reduce`."""

    def all_reduce(
        self, assignment: BlockAssignment, *, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> Vector:
        """Return the root's sum, (elements,), valid until the next call.

        `assignment` gives the blocks that each rank holds, the same on every rank; together they
        are all leaves, once. Slot i of this rank holds its block i. A NaN comes out as 0x7fc00000.
        After any error leave the group: it is unknown which rank has which part of the sum.
        """
