"""Random access to the lines of a data set, for training in a shuffled order.

Lines are numbered over all shards, in the order of the shards. Offsets are looked up in the indexes
on disk, so memory does not grow with the data.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from io import FileIO
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.contracts.location import Location
from muster.contracts.shards import HASH_MODULUS
from muster.datasets.errors import InvalidSample, ShardChanged, ShardUnreadable
from muster.datasets.index import Fingerprint, Line, Offsets, ShardIndex, Totals, shard_errors
from muster.datasets.source import DataSource

Numbers: TypeAlias = NDArray[np.int64]

OPEN_SHARDS: Final = 128
"""Shards kept open, two files each: within the usual limit of 1024 descriptors."""


class RandomAccess:
    """Reads lines of `source` by number. For one thread; a context manager.

    Raises `ShardUnreadable`, and `ShardChanged` for a shard that has changed since this was made.
    """

    def __init__(self, source: DataSource) -> None:
        """A shard is fetched and its index opened when one of its lines is first drawn."""
        self._source = source
        self._totals = source.totals(range(len(source.shards)))
        self._indexes: dict[int, ShardIndex] = {}
        # Shard i holds the numbers [ends[i - 1], ends[i]).
        self._ends = np.cumsum([totals.lines for totals in self._totals], dtype=np.int64)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    @property
    def totals(self) -> Totals:
        """The totals of all shards."""
        return Totals(
            lines=sum(totals.lines for totals in self._totals),
            hash_sum=sum(totals.hash_sum for totals in self._totals) % HASH_MODULUS,
        )

    def draw(self, numbers: Numbers) -> list[Line]:
        """Return the lines with these numbers, in this order; numbers may repeat.

        Raises `InvalidSample` for a blank line, and IndexError for a number out of range.
        """
        if len(numbers) == 0:
            return []
        # Read in the order of the disk, shard by shard.
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        if ascending[0] < 0 or ascending[-1] >= self._ends[-1]:
            raise IndexError(f"line numbers must be in [0, {self._ends[-1]})")
        lines: list[Line] = []
        for shard_idx, first, line_idxs in self._by_shard(ascending):
            lines += self._shard(shard_idx).read((line_idxs - first).tolist())
        drawn = dict(zip(order.tolist(), lines, strict=True))
        return [drawn[place] for place in range(len(drawn))]

    def close(self) -> None:
        """Close all files. May be called twice; the next `draw` opens files again."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _by_shard(self, ascending: Numbers) -> Iterator[tuple[int, int, Numbers]]:
        """Yield each shard to read, the number of its first line, and the wanted numbers."""
        shards = np.searchsorted(self._ends, ascending, side="right")
        touched, starts = np.unique(shards, return_index=True)
        for shard_idx, wanted in zip(
            touched.tolist(), np.split(ascending, starts[1:]), strict=True
        ):
            yield shard_idx, int(self._ends[shard_idx]) - self._totals[shard_idx].lines, wanted

    def _shard(self, shard_idx: int) -> "_OpenShard":
        """Return a shard's open files; closes those that were used least recently."""
        shard = self._open.get(shard_idx)
        if shard is None:
            try:
                shard = self._opened(shard_idx)
            except (ShardUnreadable, ShardChanged):
                # While the storage process was dead another job may have removed it from the cache.
                self._indexes.pop(shard_idx, None)
                shard = self._opened(shard_idx)
            self._open[shard_idx] = shard
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(shard_idx)
        return shard

    def _opened(self, shard_idx: int) -> "_OpenShard":
        location = self._source.location / self._source.shards[shard_idx].name
        return _OpenShard(self._index(shard_idx, location), location)

    def _index(self, shard_idx: int, location: Location) -> ShardIndex:
        index = self._indexes.get(shard_idx)
        if index is None:
            index = ShardIndex.open(self._source.path(shard_idx), shown=location)
            self._indexes[shard_idx] = index
            if index.totals != self._totals[shard_idx]:
                del self._indexes[shard_idx]
                raise ShardChanged(index.shard, "has other lines than when the job started")
        return index


class _OpenShard:
    """A shard and its index, open."""

    def __init__(self, index: ShardIndex, location: Location) -> None:
        self._index = index
        self._location = location
        self._path = index.shard
        with ExitStack() as files, shard_errors(self._path):
            self._offsets = files.enter_context(closing(Offsets(index)))
            self._file = files.enter_context(FileIO(self._path))
            self._files = files.pop_all()

    def read(self, line_idxs: Sequence[int]) -> list[Line]:
        with shard_errors(self._path):
            pieces = [self._with_newline_before(line_idx) for line_idx in line_idxs]
            facts = os.fstat(self._file.fileno())
        # Checked after the reads: whatever was read before a change is the indexed content.
        if Fingerprint.of(facts) != self._index.fingerprint:
            raise ShardChanged(self._path, "changed while it was being read")
        return [self._line(piece, idx + 1) for piece, idx in zip(pieces, line_idxs, strict=True)]

    def _with_newline_before(self, line_idx: int) -> bytes:
        """Return a line together with the newline before it."""
        start, stop = self._offsets.span(line_idx)
        if start == 0:
            return b"\n" + os.pread(self._file.fileno(), stop, 0)
        return os.pread(self._file.fileno(), stop - start + 1, start - 1)

    def _line(self, piece: bytes, number: int) -> Line:
        content = piece[1:].removesuffix(b"\n")
        ends = piece.endswith(b"\n") or number == self._index.totals.lines
        if not piece.startswith(b"\n") or not ends or b"\n" in content:
            raise ShardChanged(self._path, f"has no line {number} at the offset in its index")
        if content in (b"", b"\r"):
            raise InvalidSample(self._location, number, "the line is blank")
        return Line(content, self._location, number)

    def close(self) -> None:
        self._files.close()
