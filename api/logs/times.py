"""When was this byte written? A binary search in the time index that lies beside a log."""

import os
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Final

from api.logs.opening import open_log
from muster.contracts.layout import TIME_MARK

Micros = int
"""Microseconds since 1970 (UTC)."""


NEIGHBOURS: Final = 128
"""Marks that are read along on either side of the one that is looked for."""


class TimeIndex:
    """The marks of one log file. Whoever goes through it in order seldom costs a search."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._sizes: list[int] = []
        self._times: list[Micros] = []
        """Some marks next to each other; the size before them first, which has no time."""
        self._low = 0
        self.covered = 0
        """What ends behind the mark before the last that was looked for, and here or below, was
        written at the same time."""
        self._micros: Micros | None = None

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
        """Return how many bytes are known to have been written by then."""
        try:
            descriptor = open_log(self._path)
        except OSError:
            return 0
        try:
            later = _first(descriptor, lambda mark: mark[1] > micros)
            return _mark(descriptor, later - 1)[0] if later else 0
        finally:
            os.close(descriptor)

    def _load(self, end: int) -> None:
        try:
            descriptor = open_log(self._path)
        except OSError:
            return
        try:
            first = _first(descriptor, lambda mark: mark[0] >= end) - NEIGHBOURS
            begin = max(first, 0) * TIME_MARK.size
            raw = os.pread(descriptor, 2 * NEIGHBOURS * TIME_MARK.size, begin)
        finally:
            os.close(descriptor)
        marks = list(TIME_MARK.iter_unpack(raw[: len(raw) // TIME_MARK.size * TIME_MARK.size]))
        self._times = [micros for _, micros in marks[first > 0 :]]
        self._sizes = [size for size, _ in marks] if first > 0 else [0, *(s for s, _ in marks)]


def _first(descriptor: int, is_behind: Callable[[tuple[int, Micros]], bool]) -> int:
    """Return the place of the first mark that is behind something; their number if none is."""
    first, beyond = 0, _count(descriptor)
    while first < beyond:
        middle = (first + beyond) // 2
        if is_behind(_mark(descriptor, middle)):
            beyond = middle
        else:
            first = middle + 1
    return first


def _count(descriptor: int) -> int:
    return os.fstat(descriptor).st_size // TIME_MARK.size


def _mark(descriptor: int, place: int) -> tuple[int, Micros]:
    size, micros = TIME_MARK.unpack(os.pread(descriptor, TIME_MARK.size, place * TIME_MARK.size))
    return size, micros
