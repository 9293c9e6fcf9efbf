"""What a block reads: the samples of neighbouring virtual shards, with one look at order and disk.

Which samples those are is a function of (seed, epoch, step, shard) alone. The order is computed a
window at a time, because most of that costs the same for one place as for thousands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from muster.collectives.tree import Block
from muster.datasets.drawing import Drawer
from muster.datasets.lines import Line, line_hash
from muster.datasets.order import Numbers, positions
from muster.program import Batch, decoded
from muster.synchronous.course import Course
from muster.synchronous.tally import tally_of

WINDOW: Final = 4096
"""Places of the order that are computed at once: 32 KB."""

_FIRST_LINE: Final = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """What the leaves of a block read, each in its place."""

    batches: Sequence[Batch]
    weights: NDArray[np.float32]
    """(leaves,): the weight of each batch, which is how many of its samples count."""
    tally: NDArray[np.float32]
    """(leaves, `tally.TALLY_ELEMENTS`): what each of them has consumed."""


class Supply:
    """Reads for any block of any step."""

    def __init__(self, course: Course, drawer: Drawer, decode: Callable[[bytes], Any]) -> None:
        self._course: Final = course
        self._drawer: Final = drawer
        self._decode: Final = decode
        self._order: Final = _Order(course)

    def portion(self, step: int, block: Block) -> Portion:
        """Return what a block reads. Raises a `DatasetError`."""
        course = self._course
        epoch, step_in_epoch = course.place(step)
        size = course.batch_size // course.virtual_shards
        first = step_in_epoch * course.batch_size + block.start * size
        wanted = block.size * size
        stop = min(first + wanted, course.totals.lines)
        lines = self._drawer.draw(self._order.cut(epoch, first, stop)) if first < stop else []
        # What counts is what was read, not what should have been: the audit has to see it.
        read = len(lines)
        samples = decoded(lines + self._filling(lines, size, wanted), self._decode)
        weights = np.zeros(wanted, np.float32)
        weights[:read] = 1
        weights.flags.writeable = False
        hashes = np.zeros(wanted, np.uint64)
        hashes[:read] = [line_hash(line.content) for line in lines]
        parts = [slice(start, start + size) for start in range(0, wanted, size)]
        counts = weights.reshape(-1, size).sum(axis=1)
        return Portion(
            batches=[Batch(samples[part], weights[part]) for part in parts],
            weights=counts,
            tally=tally_of(counts, hashes.reshape(-1, size).sum(axis=1)),
        )

    def _filling(self, lines: list[Line], size: int, wanted: int) -> list[Line]:
        """Return copies for the places where the data ends before the block is full.

        A leaf is filled up with its own first line, one that reads nothing at all with that of the
        data set.
        """
        begun = -len(lines) % size
        filling = lines[len(lines) - size + begun :][:1] * begun
        empty = wanted - len(lines) - begun
        return filling + (self._drawer.draw(_FIRST_LINE) * empty if empty else [])


class _Order:
    """The order of an epoch, of which a window is kept."""

    def __init__(self, course: Course) -> None:
        self._course = course
        self._epoch = -1
        self._start = 0
        self._window: Numbers = np.empty(0, np.int64)

    def cut(self, epoch: int, start: int, stop: int) -> Numbers:
        """Return the samples at the places [start, stop)."""
        before = start - self._start
        if epoch != self._epoch or before < 0 or stop > self._start + len(self._window):
            self._move(epoch, start, stop)
            before = 0
        return self._window[before : before + stop - start]

    def _move(self, epoch: int, start: int, stop: int) -> None:
        samples = self._course.totals.lines
        stop = min(max(stop, start + WINDOW), samples)
        self._window = positions(
            samples, seed=self._course.seed, epoch=epoch, start=start, stop=stop
        )
        self._epoch, self._start = epoch, start
