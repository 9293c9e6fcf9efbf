"""The logs of a job: places in them, the lines of one file, and when these were written.

A rank may write anything, also without line ends. A line shows at most `LINE_LIMIT_BYTES`, and a
line longer than `PIECE_BYTES` is read as several lines, so that no reader looks further than that
for a line end.

A position says how far a reader is. In ``6f1c2ab9/0.2:4096,1.0:512`` it has everything of rank 0
before attempt 2 and the first 4096 bytes of that attempt. The prefix identifies the job, because an
id can be used again. A position is the id of a server-sent event, so a reader can resume at any
server after any restart.

The beginning of a log may be gone: discarded by the job's agent, which leaves a hole, or truncated
by the program, after which offsets count from the next multiple of `LOG_EPOCH_BYTES`.
"""

import os
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from muster.contracts.job import JobUid
from muster.contracts.paths import LOG_EPOCH_BYTES, TIME_MARK, JobFiles, LogName
from muster.host.files import closing, open_directory, open_file, open_named_directory

LINE_LIMIT_BYTES: Final = 16 * 1024
"""How much of one line is shown; the rest is counted."""

BLOCK_BYTES: Final = 32 * 1024
"""Small, because a job may have thousands of ranks; at least twice `LINE_LIMIT_BYTES`."""

GAP: Final = b"muster: lines are missing here (muster events tells why)"
"""Takes the place of the lines at the beginning of a log that are gone."""

PIECE_BYTES: Final = 8 * BLOCK_BYTES
"""A stretch of this length without a line end counts as a line."""

_JOB_DIRECTORIES: Final = 2
"""The last directories of a log's path that the job can write to."""

_REPLACEMENT: Final = "\ufffd"
"""Decoding puts this in place of invalid bytes, so its own bytes are not in the file."""

Place = tuple[int, int]
"""(attempt, offset of the next byte)"""

Position = Mapping[int, Place]
"""The place in each rank's logs; a rank that is missing starts at its beginning."""

_START: Final = "0.0:0"
"""The empty position. An empty id would make a browser send no Last-Event-ID at all."""

_PREFIX_LENGTH: Final = 8
_RANKS_LIMIT: Final = 4096

_PAIR: Final = re.compile(r"(\d{1,5})\.(\d{1,9}):(\d{1,20})", re.ASCII)

Micros = int
"""Microseconds since 1970 (UTC)."""

_LATEST: Final[Micros] = 1 << 64

NEIGHBOURS: Final = 128
"""How many marks of a time index are read on either side of the one that is needed."""

_Mark = tuple[int, Micros]
"""A size of the log, and when it had been reached."""


def format_event_id(uid: JobUid, position: Position) -> str:
    """Return the id of the event after which a reader of this job is at `position`."""
    pairs = (f"{rank}.{attempt}:{offset}" for rank, (attempt, offset) in sorted(position.items()))
    return f"{uid[:_PREFIX_LENGTH]}/{','.join(pairs) or _START}"


def parse_event_id(text: str) -> tuple[str, Position] | None:
    """Return the beginning of the job's uid, perhaps empty, and the position; None if invalid."""
    prefix, _, pairs = text.rpartition("/")
    position: dict[int, Place] = {}
    for pair in pairs.split(",", _RANKS_LIMIT):
        found = _PAIR.fullmatch(pair)
        if found is None or int(found[1]) in position:
            return None
        position[int(found[1])] = (int(found[2]), int(found[3]))
    return prefix, position


def logs_by_rank(files: JobFiles, rank: int | None) -> dict[int, list[LogName]]:
    """Return the existing logs of all ranks or one, by rank and in order of attempt."""
    try:
        names = sorted(
            name for path in files.logs.iterdir() if (name := LogName.parse(path.name)) is not None
        )
    except OSError:  # nothing was written yet, or the job was deleted
        names = []
    found: dict[int, list[LogName]] = defaultdict(list)
    for name in names:
        if rank is None or name.rank == rank:
            found[name.rank].append(name)
    return found


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


_Piece = tuple[bytes, int]
"""A line or a piece of one with its line end, and where that ends."""


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
    with suppress(OSError), closing(open_log(path)) as descriptor:
        return os.pread(descriptor, count, start % LOG_EPOCH_BYTES)
    return b""


def size_of(path: Path) -> int:
    """Return the size of a log in bytes; 0 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def extent_of(path: Path) -> tuple[int, int]:
    """Return the offsets at which the bytes of a log begin that still exist, and end."""
    last = TimeIndex(path.with_suffix(".times")).size_at(_LATEST)
    epoch = last - last % LOG_EPOCH_BYTES
    begin, size = 0, size_of(path)
    with suppress(OSError), closing(open_log(path)) as descriptor:
        begin = size
        begin = os.lseek(descriptor, 0, os.SEEK_DATA)  # ENXIO: there is only a hole, or nothing
    return epoch + begin, epoch + size


def line_end_before(path: Path, end: int, begin: int = 0) -> int:
    """Return where the last line of [begin, end) ends that is complete; `begin` if none is.

    Inside a line that is longer than a piece this is `end` itself.
    """
    lowest = max(end - PIECE_BYTES, begin)
    place = end
    while place > lowest:
        start = max(place - BLOCK_BYTES, lowest)
        newline = read(path, start, place - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        place = start
    return end if lowest > begin else begin


def read_backwards(
    path: Path, end: int, text: str | None = None, begin: int = 0
) -> Iterator[Line | Skipped]:
    """Yield the lines of [begin, end), the last one first.

    With `text`, lines that do not contain it come as `Skipped`. A line that starts before `begin`
    is shown from there. Of the pieces of a long line, the one in which the text begins contains it.
    """
    wanted = (text or "").encode("utf-8", "surrogatepass")
    after = b""
    for found in _read_raw(path, end, b"" if _REPLACEMENT in (text or "") else wanted, begin):
        if isinstance(found, Skipped):
            yield found
            continue
        raw, _ = found
        line = _line(*found)
        shown = raw[:-1] if raw.endswith(b"\n") else raw + after
        yield line if not text or text in decode(shown) else Skipped(line.start, line.end)
        after = raw[: len(wanted)]


def _read_raw(path: Path, end: int, wanted: bytes, begin: int) -> Iterator[_Piece | Skipped]:
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
            yield raw[-PIECE_BYTES:], end
            end -= PIECE_BYTES
            raw = raw[:-PIECE_BYTES]
        if cut or start == begin:
            # Without a line end at its end it goes on in the piece that was read before.
            is_whole = raw.endswith(b"\n")
            if wanted and is_whole and wanted not in raw[cut:].replace(b"\r", b"\\r"):
                yield Skipped(start + cut, end)
            else:
                yield from _lines_reversed(raw, cut, end)
            end = start + cut
            raw = raw[:cut]
        rest = raw


def _lines_reversed(raw: bytes, cut: int, end: int) -> Iterator[_Piece]:
    place = len(raw)
    while place > cut:
        lowest = max(cut, place - PIECE_BYTES)
        start = max(raw.rfind(b"\n", cut, place - 1) + 1, lowest)
        yield raw[start:place], end - (len(raw) - place)
        place = start


def _line(raw: bytes, end: int) -> Line:
    length = len(raw) - raw.endswith(b"\n")
    return Line(end - len(raw), end, shorten(raw, length))


class TimeIndex:
    """When each byte of a log was written: the marks in the file beside it.

    Lookups in order of position rarely read that file.
    """

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
        with suppress(OSError), closing(open_log(self._path)) as descriptor:
            later = _first_index(descriptor, lambda mark: mark[1] > micros)
            return _read_mark(descriptor, later - 1)[0] if later else 0
        return 0

    def _load(self, end: int) -> None:
        first, raw = 0, b""
        with suppress(OSError), closing(open_log(self._path)) as descriptor:
            first = max(_first_index(descriptor, lambda mark: mark[0] >= end) - NEIGHBOURS, 0)
            length = 2 * NEIGHBOURS * TIME_MARK.size
            raw = os.pread(descriptor, length, first * TIME_MARK.size)
        marks = list(TIME_MARK.iter_unpack(raw[: len(raw) // TIME_MARK.size * TIME_MARK.size]))
        if first == 0:
            marks.insert(0, (0, 0))
        self._sizes = [size for size, _ in marks]
        self._times = [micros for _, micros in marks[1:]]


def _first_index(descriptor: int, condition: Callable[[_Mark], bool]) -> int:
    """Return the index of the first mark that meets a monotonic condition; else their number."""
    marks = range(os.fstat(descriptor).st_size // TIME_MARK.size)
    return bisect_left(marks, x=True, key=lambda index: condition(_read_mark(descriptor, index)))


def _read_mark(descriptor: int, index: int) -> _Mark:
    size, micros = TIME_MARK.unpack(os.pread(descriptor, TIME_MARK.size, index * TIME_MARK.size))
    return size, micros
