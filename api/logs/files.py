"""One log file: opening it safely, its lines as clients see them, and its lines backwards.

A rank may write anything, also without line ends. A line shows at most `LINE_LIMIT_BYTES`, and a
line longer than `PIECE_BYTES` is read as several lines, so that no reader looks further than that
for a line end.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.host.files import open_directory, open_file, open_named_directory

LINE_LIMIT_BYTES: Final = 16 * 1024
"""How much of one line is shown; the rest is counted."""

BLOCK_BYTES: Final = 32 * 1024
"""Small, because a job may have thousands of ranks; at least twice `LINE_LIMIT_BYTES`."""

PIECE_BYTES: Final = 8 * BLOCK_BYTES
"""A stretch of this length without a line end counts as a line."""

_JOB_DIRECTORIES: Final = 2
"""The last directories of a log's path that the job can write to."""

_REPLACEMENT: Final = "\ufffd"
"""Decoding puts this in place of invalid bytes, so its own bytes are not in the file."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line, or a piece of one: the bytes [start, end) of its file, the line end included."""

    start: int
    end: int
    shown: bytes
    """Without the line end, and with a note where bytes were cut off."""

    @property
    def text(self) -> str:
        return decode(self.shown)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Adjacent lines that do not contain the text that is searched for."""

    start: int
    end: int


def decode(raw: bytes) -> str:
    """Return lines, joined by line ends, as text; a carriage return never ends a line."""
    if b"\r" in raw:
        raw = raw.replace(b"\r\n", b"\n").removesuffix(b"\r").replace(b"\r", b"\\r")
    return raw.decode("utf-8", "replace")


def shorten(raw: bytes, length: int) -> bytes:
    """Return what is shown of a line that begins with `raw` and is `length` bytes long."""
    if length <= LINE_LIMIT_BYTES:
        return raw[:length]
    cut = length - LINE_LIMIT_BYTES
    return raw[:LINE_LIMIT_BYTES] + f" … [{cut} bytes cut]".encode()


def open_log(path: Path) -> int:
    """Return a descriptor of a log or of a file beside it; raise OSError.

    A program may replace its logs or their directory by links to files that only the service's
    user can read, so no link inside the job's directories is followed.
    """
    *directories, name = path.parts[-_JOB_DIRECTORIES - 1 :]
    directory = open_named_directory(path.parents[_JOB_DIRECTORIES])
    try:
        for part in directories:
            inner = open_directory(part, directory)
            os.close(directory)
            directory = inner
        return open_file(name, directory)
    finally:
        os.close(directory)


def read(path: Path, start: int, count: int) -> bytes:
    """Return bytes of a file that is opened for this read only; b"" if it is missing."""
    try:
        descriptor = open_log(path)
    except OSError:
        return b""
    try:
        return os.pread(descriptor, count, start)
    finally:
        os.close(descriptor)


def size_of(path: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def complete_size(path: Path) -> int:
    """Return the size of a log up to the end of its last complete line."""
    return line_end_before(path, size_of(path))


def line_end_before(path: Path, end: int) -> int:
    """Return where the last line ends that is complete below `end`; 0 if none is.

    Inside a line that is longer than a piece this is `end` itself.
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


def read_backwards(
    path: Path, end: int, text: str | None = None, begin: int = 0
) -> Iterator[Line | Skipped]:
    """Yield the lines of [begin, end), the last one first.

    With `text`, blocks that do not contain it come as `Skipped`. A line that starts before `begin`
    is shown from there.
    """
    wanted = text.encode("utf-8", "surrogatepass") if text and _REPLACEMENT not in text else b""
    unread = end
    rest = b""  # the bytes [unread, end): the start of `end`'s line may lie further below
    while unread > begin:
        start = max(unread - BLOCK_BYTES, begin)
        # A file that was truncated meanwhile is padded, so that offsets stay correct.
        raw = read(path, start, unread - start).ljust(unread - start, b"\0") + rest
        unread = start
        # The last byte is the line end of the last line itself.
        cut = raw.find(b"\n", 0, len(raw) - 1) + 1 if start > begin else 0
        while start > begin and not cut and len(raw) >= PIECE_BYTES:
            yield _line(raw[-PIECE_BYTES:], end)
            end -= PIECE_BYTES
            raw = raw[:-PIECE_BYTES]
        if cut or start == begin:
            if wanted and wanted not in raw[cut:].replace(b"\r", b"\\r"):
                yield Skipped(start + cut, end)
            else:
                yield from _lines_reversed(raw, cut, end)
            end = start + cut
            raw = raw[:cut]
        rest = raw


def _lines_reversed(raw: bytes, cut: int, end: int) -> Iterator[Line]:
    place = len(raw)
    while place > cut:
        lowest = max(cut, place - PIECE_BYTES)
        start = max(raw.rfind(b"\n", cut, place - 1) + 1, lowest)
        yield _line(raw[start:place], end - (len(raw) - place))
        place = start


def _line(raw: bytes, end: int) -> Line:
    length = len(raw) - raw.endswith(b"\n")
    return Line(end - len(raw), end, shorten(raw, length))
