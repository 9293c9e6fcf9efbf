"""Lines of one log file, and how people see them; backwards from a place, in blocks.

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

_REPLACED: Final = "\ufffd"
"""What bytes that are no text are shown as: not to be found in the file."""

BLOCK_BYTES: Final = 32 * 1024
"""Small, since a job may have thousands of ranks; at least twice `LINE_LIMIT_BYTES`."""

SEARCH_BYTES: Final = 8 * BLOCK_BYTES
"""What is looked through at once, and not kept, where a text was not found for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line and where it lies: the bytes [start, end) of its file, line end included."""

    start: int
    end: int
    head: bytes
    """Its first `LINE_LIMIT_BYTES` bytes, without the line end."""

    @property
    def marked(self) -> bytes:
        """Its head; what was cut off is counted."""
        cut = self.end - self.start - 1 - len(self.head)
        return self.head + f" … [{cut} bytes cut]".encode() if cut > 0 else self.head

    @property
    def text(self) -> str:
        """What people see."""
        return shown(self.marked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """Lines next to each other that were not taken apart: none of them holds what is wanted."""

    start: int
    end: int


def shown(raw: bytes) -> str:
    """Return lines, joined by line ends, as people see them: no carriage return ends a line."""
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").removesuffix(b"\r").replace(b"\r", b"\\r")
    return raw.decode("utf-8", "replace")


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
        newline = read(path, start, end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def backwards(path: Path, end: int, text: str | None = None) -> Iterator[Line | Passed]:
    """Yield the lines below `end`, the last one first; if `text` is wanted, not all of the others.

    A block without it is passed over as a whole.
    """
    block = _Block(path, None if text is None or _REPLACED in text else text)
    while end > 0:
        if passed := block.passed(end):
            yield passed
            end = passed.start
            continue
        # The byte at end - 1 is this line's own end, unless the line is unfinished.
        start = block.line_start(end - 1)
        yield block.line(start, end)
        end = start


class _Block:
    """A part of a file that is kept while lines are taken from it backwards."""

    def __init__(self, path: Path, text: str | None) -> None:
        self._path = path
        self._text = text.encode("utf-8", "surrogatepass") if text else None
        self._start = 0
        self._bytes = b""
        self._may_hold = False
        """Whether the text, if one is wanted, may be in a line of this block."""
        self._reach_bytes = BLOCK_BYTES

    def passed(self, end: int) -> Passed | None:
        """Return lines below `end`, if there are some that surely do not hold the text."""
        if self._text is None or (self._may_hold and self._covers(end)):
            return None
        start, raw = self._before(end)
        if self._is_in(raw) and self._reach_bytes > BLOCK_BYTES:
            self._reach_bytes = BLOCK_BYTES
            start, raw = self._before(end)
        if self._is_in(raw):
            self._load(end - 1)  # to be taken apart as a whole before there is another search
            return None
        self._reach_bytes = min(2 * self._reach_bytes, SEARCH_BYTES)
        first = start + raw.find(b"\n") + 1 if start else 0
        has_whole_line = not start or start < first < end
        return Passed(start=first, end=end) if has_whole_line else None

    def line_start(self, before: int) -> int:
        """Return where the line begins whose line end is at `before` or later."""
        while before > 0:
            if not self._covers(before):
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
        return line_at(self._path, start, end)

    def _load(self, end: int) -> None:
        # One byte more than asked for: the end of the line that is looked for.
        self._start = max(end - BLOCK_BYTES, 0)
        wanted = end + 1 - self._start
        # A file that was cut meanwhile reads as if the rest of it were one line.
        self._bytes = read(self._path, self._start, wanted).ljust(wanted, b"\0")
        self._may_hold = self._is_in(self._bytes)

    def _before(self, end: int) -> tuple[int, bytes]:
        start = max(end - self._reach_bytes, 0)
        return start, read(self._path, start, end - start)

    def _covers(self, end: int) -> bool:
        return self._start < end <= self._start + len(self._bytes)

    def _is_in(self, raw: bytes) -> bool:
        return self._text is not None and self._text in raw.replace(b"\r", b"\\r")


def line_at(path: Path, start: int, end: int) -> Line:
    """Return the line that fills [start, end) of a file."""
    return _headed(start, end, read(path, start, min(end - start, LINE_LIMIT_BYTES + 1)))


def _headed(start: int, end: int, raw: bytes) -> Line:
    return Line(start=start, end=end, head=raw.partition(b"\n")[0][:LINE_LIMIT_BYTES])


def read(path: Path, start: int, count: int) -> bytes:
    """Return bytes of a file that is opened for this only; a missing one is empty."""
    try:
        descriptor = open_log(path)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, count, start)
    finally:
        os.close(descriptor)
