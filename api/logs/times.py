"""Look up when a byte of a log was written, in the time index beside the log."""

import os
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Final

from api.logs.files import open_log
from muster.contracts.paths import TIME_MARK

Micros = int
"""Microseconds since 1970 (UTC)."""

NEIGHBOURS: Final = 128
"""How many marks are read on either side of the one that is needed."""

_Mark = tuple[int, Micros]
"""A size of the log, and when it had been reached."""


class TimeIndex:
    """The marks of one log. Lookups in order of position rarely read the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: list[int] = []
        self._times: list[Micros] = []
        """Of some adjacent marks; `_sizes` has one more in front, the size before them."""
        self._low = 0
        self._micros: Micros | None = None
        self.covered = 0
        """Bytes from the previously looked up position to this one have the same time."""

    def at(self, end: int) -> Micros | None:
        """Return when the bytes below `end` had been written; None while no mark covers them."""
        if self._low < end <= self.covered:
            return self._micros
        place = bisect_left(self._sizes, end)
        if not 0 < place < len(self._sizes):
            self._load(end)
            place = bisect_left(self._sizes, end)
            if not 0 < place < len(self._sizes):
                return None
        self._low, self.covered = self._sizes[place - 1 : place + 1]
        self._micros = self._times[place - 1]
        return self._micros

    def size_at(self, micros: Micros) -> int:
        """Return how many bytes had been written by then, as far as the marks tell."""
        try:
            descriptor = open_log(self._path)
        except OSError:
            return 0
        try:
            later = _first_index(descriptor, lambda mark: mark[1] > micros)
            return _read_mark(descriptor, later - 1)[0] if later else 0
        finally:
            os.close(descriptor)

    def _load(self, end: int) -> None:
        try:
            descriptor = open_log(self._path)
        except OSError:
            return
        try:
            first = max(_first_index(descriptor, lambda mark: mark[0] >= end) - NEIGHBOURS, 0)
            length = 2 * NEIGHBOURS * TIME_MARK.size
            raw = os.pread(descriptor, length, first * TIME_MARK.size)
        finally:
            os.close(descriptor)
        marks = list(TIME_MARK.iter_unpack(raw[: len(raw) // TIME_MARK.size * TIME_MARK.size]))
        if first == 0:
            marks.insert(0, (0, 0))
        self._sizes = [size for size, _ in marks]
        self._times = [micros for _, micros in marks[1:]]


def _first_index(descriptor: int, condition: Callable[[_Mark], bool]) -> int:
    """Return the index of the first mark that meets a monotonic condition; else their number."""
    low, high = 0, os.fstat(descriptor).st_size // TIME_MARK.size
    while low < high:
        middle = (low + high) // 2
        if condition(_read_mark(descriptor, middle)):
            high = middle
        else:
            low = middle + 1
    return low


def _read_mark(descriptor: int, index: int) -> _Mark:
    size, micros = TIME_MARK.unpack(os.pread(descriptor, TIME_MARK.size, index * TIME_MARK.size))
    return size, micros
