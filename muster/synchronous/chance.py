"""Random numbers for a leaf: a function of (seed, epoch, step, shard), wherever it is computed.

A counter-based generator has a place for each leaf. Going there costs a microsecond; making a new
generator costs ten, and asks the system for entropy that nobody uses.
"""

from typing import Final

import numpy as np

from muster.shapes import Leaf

_NOTHING_DRAWN: Final = 4
"""Of the four numbers that the generator makes at a time, so many are used up."""


class Chance:
    """One generator, for one thread, that is where the leaf of the last call wants it."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=np.array([seed, 0], np.uint64))
        self._generator = np.random.Generator(self._bits)
        self._start = self._bits.state
        self._start["buffer_pos"] = _NOTHING_DRAWN
        self._counter = self._start["state"]["counter"]

    def of(self, epoch: int, leaf: Leaf) -> np.random.Generator:
        """Return the leaf's numbers from their beginning, good until the next call."""
        self._counter[:] = (0, epoch, leaf.step, leaf.shard)
        self._bits.state = self._start
        return self._generator
