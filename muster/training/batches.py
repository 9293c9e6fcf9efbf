"""Reads the samples of a block: one look-up of the sample order and one read for all its leaves.

Which samples a virtual shard reads is a function of (seed, epoch, step, shard) alone. The order is
computed one window at a time, because most of that work costs the same for one place as for
thousands.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from muster.collectives.reduction.tree import Block
from muster.datasets.errors import InvalidSample
from muster.datasets.index import Line, line_hash
from muster.datasets.order import Numbers, positions
from muster.datasets.random_access import RandomAccess
from muster.program import Batch, Program
from muster.training.sample_count import encode_sample_count
from muster.training.schedule import Schedule

WINDOW: Final = 4096
"""Places of the order that are computed at once: 32 KB."""

_FIRST_LINE: Final = np.zeros(1, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBatches:
    """What the leaves of a block read, in leaf order."""

    batches: Sequence[Any]  # `Batch`, or what another loader gives
    weights: NDArray[np.float32]
    """(leaves,): the weight of each batch, which is the number of its samples that count."""
    sample_counts: NDArray[np.float32]
    """(leaves, `sample_count.COUNT_ELEMENTS`): what each leaf consumed."""


class BatchLoader:
    """Loads the batches of any block of any step."""

    def __init__(
        self, schedule: Schedule, drawer: RandomAccess, decode: Callable[[bytes], Any]
    ) -> None:
        self._schedule: Final = schedule
        self._drawer: Final = drawer
        self._decode: Final = decode
        self._order: Final = _SampleOrder(schedule)

    def load(self, step: int, block: Block) -> BlockBatches:
        """Return the batches of a block. Raises `DatasetError`."""
        schedule = self._schedule
        epoch, step_in_epoch = schedule.epoch_and_step(step)
        size = schedule.batch_size // schedule.virtual_shards
        first = step_in_epoch * schedule.batch_size + block.start * size
        wanted = block.size * size
        stop = min(first + wanted, schedule.totals.lines)
        lines = self._drawer.draw(self._order.places(epoch, first, stop)) if first < stop else []
        # The audit counts what was read, not what should have been.
        read = len(lines)
        samples = decode_lines(lines + self._padding(lines, size, wanted), self._decode)
        weights = np.zeros(wanted, np.float32)
        weights[:read] = 1
        # Batches hold views of it: a program that writes to them gets an error, not other bits.
        weights.flags.writeable = False
        # uint64 wraps, so the sum of a leaf is that of its hashes modulo 2^64 in any order.
        hashes = np.zeros(wanted, np.uint64)
        hashes[:read] = [line_hash(line.content) for line in lines]
        parts = [slice(start, start + size) for start in range(0, wanted, size)]
        counts = weights.reshape(-1, size).sum(axis=1)
        return BlockBatches(
            batches=[Batch(samples[part], weights[part]) for part in parts],
            weights=counts,
            sample_counts=encode_sample_count(counts, hashes.reshape(-1, size).sum(axis=1)),
        )

    def _padding(self, lines: list[Line], size: int, wanted: int) -> list[Line]:
        """Return copies for the places after the end of the data.

        A leaf is padded with its own first line, and a leaf that reads nothing with the first line
        of the data set.
        """
        begun = -len(lines) % size
        padding = lines[len(lines) - size + begun :][:1] * begun
        empty = wanted - len(lines) - begun
        return padding + (self._drawer.draw(_FIRST_LINE) * empty if empty else [])


class _SampleOrder:
    """The sample order of an epoch, of which one window is kept."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._epoch = -1
        self._start = 0
        self._window: Numbers = np.empty(0, np.int64)

    def places(self, epoch: int, start: int, stop: int) -> Numbers:
        """Return the samples at the places [start, stop)."""
        offset = start - self._start
        if epoch != self._epoch or offset < 0 or stop > self._start + len(self._window):
            self._move(epoch, start, stop)
            offset = 0
        return self._window[offset : offset + stop - start]

    def _move(self, epoch: int, start: int, stop: int) -> None:
        samples = self._schedule.totals.lines
        stop = min(max(stop, start + WINDOW), samples)
        self._window = positions(
            samples, seed=self._schedule.seed, epoch=epoch, start=start, stop=stop
        )
        self._epoch, self._start = epoch, start


def decoder_of(program: Program) -> Callable[[bytes], Any]:
    """Return the function that turns a line into a sample: the program's `decode`, or JSON."""
    decode: Callable[[bytes], Any] = getattr(program, "decode", msgspec.json.decode)
    return decode


def decode_lines(lines: Iterable[Line], decode: Callable[[bytes], Any]) -> list[Any]:
    """Return the samples in `lines`; raises `InvalidSample` for the first bad one."""
    samples = []
    for line in lines:
        try:
            samples.append(decode(line.content))
        except Exception as error:
            problem = f"no sample, {type(error).__name__}: {error}"
            raise InvalidSample(line.shard, line.number, problem, line.content) from error
    return samples
