"""A random part of the elements, whose places are known to all: only values are sent."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from muster.collectives.compression.kind import Message, Sparse, Vector, joined, split


@dataclass
class RandomMask(Sparse):
    """One element of each of max(1, ⌊n · ratio⌋) equal ranges, divided by its probability.

    So the expected value is the array. With `is_scaled` False, for error feedback, it is not
    divided: what is left out comes later, and a larger step would not converge.
    """

    seed: int = 0
    is_scaled: bool = True
    _step: int = field(default=0, init=False, repr=False)

    def encode_body(self, array: Vector, room: int = 0) -> Message:
        places, widths = self._places(array.size, self._step)
        values = array.reshape(-1)[places]
        if self.is_scaled:
            values *= widths
        self._step += 1
        return joined(room, np.array([self._step - 1], np.uint64), values)

    def add_body(self, body: Message, out: Vector, factor: float) -> None:
        kept = self.kept_of(out.size)
        (step,), values = split(body, (np.uint64, 1), (np.float32, kept))
        out.reshape(-1)[self._places(out.size, int(step))[0]] += values * np.float32(factor)

    def _places(self, elements: int, step: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return a place in each range, and how long that is."""
        kept = self.kept_of(elements)
        bounds = np.arange(kept + 1) * elements // kept
        widths = np.diff(bounds)
        # Raw words: numpy promises that they stay the same in later releases.
        words = np.random.PCG64((self.seed, step)).random_raw(kept)
        return bounds[:-1] + (words % widths.astype(np.uint64)).astype(np.intp), widths
