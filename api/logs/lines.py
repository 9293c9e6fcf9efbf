"""Lines of one log file, backwards from a place or forwards from it, in blocks.

A file is never read whole, and a line is never longer than `LINE_LIMIT_BYTES` in memory however
long it is on disk: a rank may write what it likes.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from api.logs.opening import open_log

LINE_LIMIT_BYTES: Final = 16 * 1024
"""What is shown of one line; the rest is counted."""

BLOCK_BYTES: Final = 32 * 1024
"""Small, since a job may have thousands of ranks; at least twice `LINE_LIMIT_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line and where it lies: the bytes [start, end) of its file, line end included."""

    start: int
    end: int
    head: bytes
    """Its first `LINE_LIMIT_BYTES` bytes, without the line end."""

    @property
    def text(self) -> str:
        """What people see: no carriage return is left, and what was cut off is counted."""
        text = self.head.removesuffix(b"\r").decode("utf-8", "replace").replace("\r", "\\r")
        cut = self.end - self.start - 1 - len(self.head)
        return f"{text} … [{cut} bytes cut]" if cut > 0 else text


def size_of(path: Path) -> int:
    """Return the size of a log in bytes; 0 if it is not there (yet, or any more)."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def complete_size(path: Path) -> int:
    """Return the size of a log up to the end of its last complete line."""
    return line_end_before(path, size_of(path))


def line_end_before(path: Path, end: int) -> int:
    """Return where the last line ends that is complete below `end`; 0 if none is."""
    while end > 0:
        start = max(end - BLOCK_BYTES, 0)
        newline = _read(path, start, end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def backwards(path: Path, end: int) -> Iterator[Line]:
    """Yield the lines below `end`, the last one first."""
    block = _Block(path)
    while end > 0:
        # The byte at end - 1 is this line's own end, unless the line is unfinished.
        start = block.line_start(end - 1)
        yield block.line(start, end)
        end = start


class Follower:
    """Hands out the lines of one file from `offset` on, as they become complete."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self.offset = offset
        """Where the first line that was not handed out begins."""
        self._searched = offset
        """No line end lies between `offset` and here: a growing line is searched only once."""

    def read(self, budget_bytes: int) -> list[Line]:
        """Return complete lines, `budget_bytes` of file or one line; none if there is none."""
        size = size_of(self._path)
        if size < self.offset:
            # Shorter than what was handed out: it is another file, which begins anew.
            self.offset = self._searched = 0
        lines: list[Line] = []
        limit = self.offset + budget_bytes
        while self._searched < size and (not lines or self._searched < limit):
            block = _read(self._path, self._searched, min(BLOCK_BYTES, size - self._searched))
            if not block:
                break
            lines += self._split(block)
        return lines

    def rest(self) -> list[Line]:
        """Return the unfinished last line of a file that nobody writes to any more."""
        size = size_of(self._path)
        if size <= self.offset:
            return []
        line = _line(self._path, self.offset, size)
        self.offset = self._searched = size
        return [line]

    def _split(self, block: bytes) -> Iterator[Line]:
        start = self._searched
        place = 0
        while (newline := block.find(b"\n", place)) >= 0:
            end = start + newline + 1
            if self.offset >= start:
                head = block[self.offset - start : newline][:LINE_LIMIT_BYTES]
                line = Line(start=self.offset, end=end, head=head)
            else:  # it began in an earlier block
                line = _line(self._path, self.offset, end)
            self.offset = end
            place = newline + 1
            yield line
        self._searched = start + len(block)


class _Block:
    """A part of a file that is kept while lines are taken from it backwards."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = 0
        self._bytes = b""

    def line_start(self, before: int) -> int:
        """Return where the line begins whose line end is at `before` or later."""
        while before > 0:
            if not self._start < before <= self._start + len(self._bytes):
                self._load(before)
            newline = self._bytes.rfind(b"\n", 0, before - self._start)
            if newline >= 0:
                return self._start + newline + 1
            before = self._start
        return 0

    def line(self, start: int, end: int) -> Line:
        """Return the line that fills [start, end)."""
        if self._start <= start and end <= self._start + len(self._bytes):
            return _headed(start, end, self._bytes[start - self._start : end - self._start])
        return _line(self._path, start, end)

    def _load(self, end: int) -> None:
        # One byte more than asked for: the end of the line that is looked for.
        self._start = max(end - BLOCK_BYTES, 0)
        wanted = end + 1 - self._start
        # A file that was cut meanwhile reads as if the rest of it were one line.
        self._bytes = _read(self._path, self._start, wanted).ljust(wanted, b"\0")


def _line(path: Path, start: int, end: int) -> Line:
    return _headed(start, end, _read(path, start, min(end - start, LINE_LIMIT_BYTES + 1)))


def _headed(start: int, end: int, raw: bytes) -> Line:
    return Line(start=start, end=end, head=raw.partition(b"\n")[0][:LINE_LIMIT_BYTES])


def _read(path: Path, start: int, count: int) -> bytes:
    """Return bytes of a file that is opened for this only; a missing one is empty."""
    try:
        descriptor = open_log(path)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, count, start)
    finally:
        os.close(descriptor)
