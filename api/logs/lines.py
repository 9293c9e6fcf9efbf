"""Lines of one log file, and how people see them; backwards from a place, in blocks.

A rank may write what it likes, and no line end at all. So of a line no more than `LINE_LIMIT_BYTES`
are kept, and one that is longer than `PIECE_BYTES` is several lines to us, each a piece of it:
nobody looks any further for a line end.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from api.logs.opening import open_log
from muster.letters import whole_letters

LINE_LIMIT_BYTES: Final = 16 * 1024
"""What is shown of one line; the rest is counted."""

_REPLACED: Final = "\ufffd"
"""What bytes that are no text are shown as: not to be found in the file."""

BLOCK_BYTES: Final = 32 * 1024
"""Small, since a job may have thousands of ranks; at least twice `LINE_LIMIT_BYTES`."""

PIECE_BYTES: Final = 8 * BLOCK_BYTES
"""Where so many bytes hold no line end, they are a line as they are."""

SEARCH_BYTES: Final = 8 * BLOCK_BYTES
"""What is looked through at once, and not kept, where a text was not found for a while."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line, or a piece of one, and where it lies: the bytes [start, end) of its file.

    They include the line end, if there is one.
    """

    start: int
    end: int
    head: bytes
    """Its first `LINE_LIMIT_BYTES` bytes, without the line end or a letter that is cut there."""
    cut_bytes: int
    """How many more there are before the line end."""

    @property
    def marked(self) -> bytes:
        """Its head; what was cut off is counted."""
        cut = self.cut_bytes
        return self.head + f" … [{cut} bytes cut]".encode() if cut else self.head

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
    """Return where the last line ends that is complete below `end`; 0 if none is.

    That is `end` in the midst of a line that is longer than a piece.
    """
    lowest = max(end - PIECE_BYTES, 0)
    place = end
    while place > lowest:
        start = max(place - BLOCK_BYTES, lowest)
        newline = read(path, start, place - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        place = start
    return end if lowest else 0


def backwards(
    path: Path, end: int, text: str | None = None, begin: int = 0
) -> Iterator[Line | Passed]:
    """Yield the lines of [begin, end), the last one first; of those without `text` not all.

    A block without it is passed over as a whole. A line that begins before `begin` is a piece.
    """
    block = _Block(path, None if text is None or _REPLACED in text else text)
    while end > begin:
        if passed := block.passed(end):
            yield passed
            end = passed.start
            continue
        # The byte at end - 1 is this line's own end, unless the line is unfinished.
        start = max(block.line_start(end - 1), begin)
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
        """Return where the line, or its last piece, begins whose end is at `before` or later."""
        lowest = max(before + 1 - PIECE_BYTES, 0)
        while before > lowest:
            if not self._covers(before):
                self._load(before)
            newline = self._bytes.rfind(b"\n", 0, before - self._start)
            if newline >= 0:
                return max(self._start + newline + 1, lowest)
            before = self._start
        return lowest

    def line(self, start: int, end: int) -> Line:
        """Return the line that fills [start, end)."""
        if self._start <= start and end <= self._start + len(self._bytes):
            raw = self._bytes[start - self._start : end - self._start]
            return _headed(start, end, raw, raw)
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
    """Return the line, or the piece of one, that fills [start, end) of a file."""
    raw = read(path, start, min(end - start, LINE_LIMIT_BYTES + 1))
    # What is longer than what is shown of it is looked at once more: does it have a line end?
    last = raw if len(raw) == end - start else read(path, end - 1, 1)
    return _headed(start, end, raw, last)


def _headed(start: int, end: int, raw: bytes, last: bytes) -> Line:
    said = raw.partition(b"\n")[0]
    head = said[:LINE_LIMIT_BYTES]
    if len(head) < len(said):
        head = head[: whole_letters(head)]
    cut_bytes = end - start - last.endswith(b"\n") - len(head)
    return Line(start=start, end=end, head=head, cut_bytes=cut_bytes)


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
