"""One log on this machine: its bytes, its lines from the end, and when they were written.

A line longer than `PIECE_BYTES` is read as several lines, so that no reader looks further than that
for a line end. The beginning of a log may be gone: discarded by the job's agent, which leaves a
hole, or truncated by the program, after which offsets count from the next multiple of
`LOG_EPOCH_BYTES`.
"""

import io
import os
import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from muster.contracts.settings.paths import LOG_EPOCH_BYTES, TIME_MARK, JobFiles, LogName
from muster.host.files import closing, open_directory, open_file, open_named_directory
from muster.logs.source import Lines, Micros, decode

BLOCK_BYTES: Final = 32 * 1024
"""Small, because a job may have thousands of ranks."""

PIECE_BYTES: Final = 8 * BLOCK_BYTES
"""A stretch of this length without a line end counts as a line."""

ARRIVAL_SECONDS: Final = 10.0
"""A log from another host that has not grown for so long is complete."""

_JOB_DIRECTORIES: Final = 2
"""The last directories of a log's path that the job can write to."""

_REPLACEMENT: Final = "\ufffd"
"""Decoding puts this in place of invalid bytes, so its own bytes are not in the file."""

_LATEST: Final[Micros] = 1 << 64

NEIGHBOURS: Final = 128
"""How many marks of a time index are read on either side of the one that is needed."""

_Mark = tuple[int, Micros]
"""A size of the log, and when it had been reached."""


def logs_by_rank(files: JobFiles, rank: int | None) -> dict[int, list[LogName]]:
    """Return the existing logs of all ranks or one, by rank and in order of attempt."""
    found: dict[int, list[LogName]] = defaultdict(list)
    with suppress(OSError):  # nothing was written yet, or the job was deleted
        names = (LogName.parse(path.name) for path in files.logs.iterdir())
        for name in sorted(filter(None, names)):
            if rank in {None, name.rank}:
                found[name.rank].append(name)
    return found


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


class LogFile:
    """The log of one attempt. A missing one is empty; each read opens it anew."""

    def __init__(self, files: JobFiles, name: LogName) -> None:
        self.name = name
        self.times = TimeIndex(files.times(name.rank, name.attempt))
        self._path = files.log(name.rank, name.attempt)
        self._sender = files.log_host(name.rank, name.attempt)
        self._exit = files.exit_record(name.rank, name.attempt)

    def exists(self) -> bool:
        return self._path.exists()

    def size(self) -> int:
        """Return its size in bytes, which does not tell how often it was truncated."""
        with suppress(OSError):
            return self._path.stat().st_size
        return 0

    def is_arriving(self) -> bool:
        """Return True while another host may still send lines of an attempt that has ended.

        Its exit record comes after the last line. A host that was lost sends nothing more.
        """
        with suppress(OSError):
            is_sent = self._sender.is_symlink() and not self._exit.exists()
            return is_sent and time.time() < self._path.stat().st_mtime + ARRIVAL_SECONDS
        return False

    def extent(self) -> tuple[int, int]:
        """Return the offsets at which the bytes begin that still exist, and end."""
        last = self.times.size_at(_LATEST)
        epoch = last - last % LOG_EPOCH_BYTES
        begin, size = 0, self.size()
        with suppress(OSError), closing(open_log(self._path)) as descriptor:
            begin = size
            begin = os.lseek(descriptor, 0, os.SEEK_DATA)  # ENXIO: there is only a hole, or nothing
        return epoch + begin, epoch + size

    def read(self, start: int, count: int) -> bytes:
        with suppress(OSError), closing(open_log(self._path)) as descriptor:
            return os.pread(descriptor, count, start % LOG_EPOCH_BYTES)
        return b""

    def line_end_before(self, end: int, begin: int) -> int:
        """Return where the last line of [begin, end) ends that is complete; `begin` if none is.

        Inside a line that is longer than a piece this is `end` itself.
        """
        start, raw = next(self._blocks_backwards(end, begin), (begin, b""))
        complete = raw.rfind(b"\n") + 1
        is_piece = not complete and begin < start and self.read(start - 1, 1) != b"\n"
        return end if is_piece else start + complete

    def read_backwards(self, end: int, begin: int, text: str = "") -> Iterator[Lines]:
        """Yield each line of [begin, end), the last one first.

        With `text`, lines that do not contain it show nothing, and adjacent ones may come together.
        A line that starts before `begin` is shown from there. Of the pieces of a long line, the one
        in which the text begins contains it.
        """
        wanted = text.encode("utf-8", "surrogatepass")
        after = b""
        for start, raw in self._blocks_backwards(end, begin):
            place = start + len(raw)
            is_sure = raw.endswith(b"\n") and _REPLACEMENT not in text
            if is_sure and wanted not in raw:
                yield Lines(self.name, start, place, b"", self.times.at(place))
                after = raw[: len(wanted)]
                continue
            for line in reversed(io.BytesIO(raw).readlines()):
                shown = line.removesuffix(b"\n")
                # Without a line end its last state goes on in the piece that was read before.
                is_open = shown == line and not line.endswith(b"\r")
                whole = line + after.partition(b"\r")[0] if is_open else shown
                if text and text not in decode(whole):
                    shown = b""
                yield Lines(self.name, place - len(line), place, shown, self.times.at(place))
                place -= len(line)
                after = line[: len(wanted)]

    def _blocks_backwards(self, end: int, begin: int) -> Iterator[tuple[int, bytes]]:
        """Yield [begin, end) as blocks that begin with a line or a piece, and where each begins."""
        count = BLOCK_BYTES
        while end > begin:
            start = max(end - count, begin)
            # A file that was truncated meanwhile is padded, so that offsets stay correct.
            raw = self.read(start, end - start).ljust(end - start, b"\0")
            # The last byte is the line end of the last line itself.
            cut = raw.find(b"\n", 0, len(raw) - 1) + 1 if start > begin else 0
            if start > begin and not cut and count < PIECE_BYTES:
                count = min(2 * count, PIECE_BYTES)
                continue
            if start > begin and not cut:  # between two states of a progress bar, if it is one
                cut = raw.find(b"\r", 0, PIECE_BYTES // 2) + 1
            yield start + cut, raw[cut:]
            end, count = start + cut, BLOCK_BYTES


class TimeIndex:
    """When each byte of a log was written: the marks in the file beside it.

    Lookups in order of position rarely read that file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._marks: list[_Mark] = []
        """Some adjacent ones."""
        self._low = 0
        self._micros: Micros | None = None
        self.covered = 0
        """Bytes from the previously looked up position to this one have the same time."""

    def at(self, end: int) -> Micros | None:
        """Return when the bytes below `end` had been written; None while no mark covers them."""
        if self._low < end <= self.covered:
            return self._micros
        place = bisect_left(self._marks, (end,))
        if not 0 < place < len(self._marks):
            self._marks = self._neighbours(end)
            place = bisect_left(self._marks, (end,))
            if not 0 < place < len(self._marks):
                return None
        self._low, _ = self._marks[place - 1]
        self.covered, self._micros = self._marks[place]
        return self._micros

    def size_at(self, micros: Micros) -> int:
        """Return how many bytes had been written by then, as far as the marks tell."""
        with suppress(OSError), closing(open_log(self._path)) as descriptor:
            mark = partial(_read_mark, descriptor)
            later = bisect_right(_indexes(descriptor), micros, key=lambda index: mark(index)[1])
            return mark(later - 1)[0] if later else 0
        return 0

    def _neighbours(self, end: int) -> list[_Mark]:
        """Return the first mark that covers `end`, and those around it."""
        with suppress(OSError), closing(open_log(self._path)) as descriptor:
            mark = partial(_read_mark, descriptor)
            indexes = _indexes(descriptor)
            first = bisect_left(indexes, end, key=lambda index: mark(index)[0]) - NEIGHBOURS
            around = indexes[max(first, 0) : first + 2 * NEIGHBOURS]
            raw = os.pread(descriptor, len(around) * TIME_MARK.size, around.start * TIME_MARK.size)
            marks = list(TIME_MARK.iter_unpack(raw))
            return marks if first > 0 else [(0, 0), *marks]
        return []


def _indexes(descriptor: int) -> range:
    return range(os.fstat(descriptor).st_size // TIME_MARK.size)


def _read_mark(descriptor: int, index: int) -> _Mark:
    size, micros = TIME_MARK.unpack(os.pread(descriptor, TIME_MARK.size, index * TIME_MARK.size))
    return size, micros
