"""Any line of a data set by its number: what training in a shuffled order reads.

Lines are numbered over all shards, in the order of the listing. Where a line begins is looked up
in the shard's index on disk, so memory does not grow with the data.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from muster.contracts.position import HASH_MODULUS
from muster.datasets.errors import InvalidSample, ShardChanged
from muster.datasets.index import ShardIndex, Totals
from muster.datasets.lines import Fingerprint, Line, reading

Numbers: TypeAlias = NDArray[np.int64]

OPEN_SHARDS: Final = 128
"""Shards kept open, two files each: within the 1024 descriptors that a process may usually have."""


class Drawer:
    """Random access to the lines of `shards`. For one thread; to be closed, or used as a context.

    Raises `ShardUnreadable`, and `ShardChanged` for a shard that is not, or no longer, the one that
    was there when the drawer was made.
    """

    def __init__(self, shards: Sequence[Path]) -> None:
        """Look at every index, building those that are missing."""
        self._indexes = [ShardIndex.open(shard) for shard in shards]
        # Shard i holds the numbers [ends[i - 1], ends[i]).
        self._ends = np.cumsum([index.lines for index in self._indexes], dtype=np.int64)
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()

    @property
    def totals(self) -> Totals:
        """What one pass over everything adds up to."""
        return Totals(
            lines=sum(index.lines for index in self._indexes),
            hash_sum=sum(index.hash_sum for index in self._indexes) % HASH_MODULUS,
        )

    def draw(self, numbers: Numbers) -> list[Line]:
        """Return the lines with these numbers, in this order; any number may come repeatedly.

        Raises `InvalidSample` for a blank line, and IndexError for a number there is no line for.
        """
        if len(numbers) == 0:
            return []
        # Read in the order they lie on the disk, shard by shard.
        order = np.argsort(numbers, kind="stable")
        ascending = numbers[order]
        if ascending[0] < 0 or ascending[-1] >= self._ends[-1]:
            raise IndexError(f"there are lines 0 to {self._ends[-1] - 1}, and no others")
        lines: list[Line] = []
        for shard_idx, first, line_idxs in self._by_shard(ascending):
            lines += self._shard(shard_idx).read((line_idxs - first).tolist())
        drawn = dict(zip(order.tolist(), lines, strict=True))
        return [drawn[place] for place in range(len(drawn))]

    def close(self) -> None:
        """Close every file. May be called twice; the next `draw` opens what it needs."""
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _by_shard(self, ascending: Numbers) -> Iterator[tuple[int, int, Numbers]]:
        """Yield each shard that is read from, the number of its first line, and what is wanted."""
        shards = np.searchsorted(self._ends, ascending, side="right")
        touched, starts = np.unique(shards, return_index=True)
        for shard_idx, wanted in zip(
            touched.tolist(), np.split(ascending, starts[1:]), strict=True
        ):
            yield shard_idx, int(self._ends[shard_idx]) - self._indexes[shard_idx].lines, wanted

    def _shard(self, shard_idx: int) -> "_OpenShard":
        """Return a shard's open files; those used least recently make room."""
        shard = self._open.get(shard_idx)
        if shard is None:
            shard = self._open[shard_idx] = _OpenShard(self._indexes[shard_idx])
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(shard_idx)
        return shard


class _OpenShard:
    """A shard and its index, open."""

    def __init__(self, index: ShardIndex) -> None:
        self._index = index
        self._path = index.shard
        with ExitStack() as files, reading(self._path):
            self._offsets = files.enter_context(index.offsets())
            self._file = files.enter_context(FileIO(self._path))
            self._files = files.pop_all()

    def read(self, line_idxs: Sequence[int]) -> list[Line]:
        with reading(self._path):
            pieces = [self._with_newline_before(line_idx) for line_idx in line_idxs]
            facts = os.fstat(self._file.fileno())
        # Looked at when all is read: what came before a change is what was indexed.
        if Fingerprint.of(facts) != self._index.fingerprint:
            raise ShardChanged(self._path, "changed while it was being read")
        return [self._line(piece, idx + 1) for piece, idx in zip(pieces, line_idxs, strict=True)]

    def _with_newline_before(self, line_idx: int) -> bytes:
        """Return a line together with the newline that ends the one before it."""
        start, stop = self._offsets.span(line_idx)
        if start == 0:
            return b"\n" + os.pread(self._file.fileno(), stop, 0)
        return os.pread(self._file.fileno(), stop - start + 1, start - 1)

    def _line(self, piece: bytes, number: int) -> Line:
        content = piece[1:].removesuffix(b"\n")
        ends = piece.endswith(b"\n") or number == self._index.lines
        if not piece.startswith(b"\n") or not ends or b"\n" in content:
            raise ShardChanged(self._path, f"has no line {number} where its index says")
        if content in (b"", b"\r"):
            raise InvalidSample(self._path, number, "the line is blank")
        return Line(content, self._path, number)

    def close(self) -> None:
        self._files.close()
