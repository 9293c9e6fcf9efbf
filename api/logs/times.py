"""When was this byte written? A binary search in the time index that lies beside a log."""

import os
from collections.abc import Callable
from pathlib import Path

from api.logs.opening import open_log
from muster.contracts.layout import TIME_MARK

Micros = int
"""Microseconds since 1970 (UTC)."""


class TimeIndex:
    """The marks of one log file. Lines next to each other cost no second search."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._low = self._high = 0
        self._micros: Micros | None = None

    def at(self, end: int) -> Micros | None:
        """Return when the bytes below `end` had been written; None while no mark covers them."""
        if self._low < end <= self._high:
            return self._micros
        try:
            descriptor = open_log(self._path)
        except OSError:
            return None
        try:
            self._search(descriptor, end)
        finally:
            os.close(descriptor)
        return self._micros if self._low < end <= self._high else None

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

    def _search(self, descriptor: int, end: int) -> None:
        first = _first(descriptor, lambda mark: mark[0] >= end)
        if first < _count(descriptor):
            self._low = _mark(descriptor, first - 1)[0] if first else 0
            self._high, self._micros = _mark(descriptor, first)


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
