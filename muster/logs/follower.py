"""Read the logs of a job forwards from a position: first what is there, then what is added.

The lines of one rank come in order, attempt by attempt: the next attempt is opened only when the
previous one is over and read to its last byte, so one place per rank says exactly what was
delivered. Lines of several ranks that were written before are merged by time.
"""

import heapq
import math
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from muster.contracts.settings.paths import LOG_EPOCH_BYTES, JobFiles, LogName
from muster.logs import log_file
from muster.logs.log_file import LogFile, logs_by_rank
from muster.logs.source import GAP, IsOver, Lines, Place, Position

BATCH_BYTES: Final = 64 * 1024

IDLE_READS: Final = 10
"""After so many reads, about a second, a reader looks whether a log of the same size is another."""

STATE_READS: Final = 100
"""After so many reads, five to ten seconds, a line that is being overwritten is returned so far."""

_START: Final = 0, 0
_END: Final = sys.maxsize, 0
"""Places of a rank before and after all others."""


class JobFollower:
    """Reads logs forwards from a position: what is there, then what is added. For one thread."""

    def __init__(
        self, files: JobFiles, rank: int | None, position: Position, until: Position | None
    ) -> None:
        self._files = files
        self._rank = rank
        self._until = until
        self._position = {name: place for name, place in position.items() if rank in {None, name}}
        self._ranks: dict[int, _RankFollower] = {}

    @property
    def position(self) -> Position:
        """The position after the last line that was returned."""
        return dict(self._position)

    @property
    def is_ahead(self) -> bool:
        """True if the place of a rank is beyond `until`."""
        return any(self._is_ahead(rank) for rank in self._position)

    def next_batch(self, is_over: IsOver) -> list[Lines]:
        """Return about `BATCH_BYTES` of lines; nothing if there are none now.

        `is_over` is what was known *before* this call: the unfinished last line of a log that is
        over is a line as well.
        """
        logs = self._logs()
        for rank in logs.keys() - self._ranks.keys():
            place = self._position.get(rank, _START)
            until = _END if self._until is None else self._until[rank]
            self._ranks[rank] = _RankFollower(self._files, place, until)
        found: list[Lines] = []
        heads: list[tuple[float, int, int]] = []

        def push(rank: int) -> None:
            # Among equal or unknown times the rank that waited longest is next, so that a rank that
            # writes faster than we read does not hold up the others.
            head = self._ranks[rank].head(logs[rank], is_over)
            if head is not None:
                heapq.heappush(heads, (head, len(found), rank))

        for rank in logs:
            push(rank)
        size = 0
        while heads and size < BATCH_BYTES:
            _, _, rank = heapq.heappop(heads)
            lines = self._ranks[rank].queue.popleft()
            self._position[rank] = (lines.name.attempt, lines.end)
            found.append(lines)
            size += len(lines.raw) + 1
            push(rank)
        return found

    def _logs(self) -> dict[int, list[LogName]]:
        logs = logs_by_rank(self._files, self._rank)
        if self._until is None:
            return logs
        known = {
            rank: [name for name in names if name.attempt <= self._until[rank][0]]
            for rank, names in logs.items()
            if rank in self._until and not self._is_ahead(rank)
        }
        return {rank: names for rank, names in known.items() if names}

    def _is_ahead(self, rank: int) -> bool:
        place = self._position.get(rank)
        if self._until is None or place is None or place <= self._until.get(rank, _START):
            return False
        # A place that does not exist comes from an earlier job with the same id.
        attempt, offset = place
        log = LogFile(self._files, LogName(rank, attempt))
        return log.exists() and offset <= log.extent()[1]


class _RankFollower:
    """Reads the logs of one rank, one attempt after the other, up to the place `until`."""

    def __init__(self, files: JobFiles, place: Place, until: Place) -> None:
        self._files = files
        self._place = place
        self._until = until
        self._file: FileFollower | None = None
        self.queue: deque[Lines] = deque()
        """What was read and not returned yet."""

    def head(self, names: Sequence[LogName], is_over: IsOver) -> float | None:
        """Return the time of the next line (infinite: not known), or None if there is none now.

        Opens the next of `names` when the current one is over and read to its end.
        """
        if self._file is None:
            first = (name for name in names if name.attempt >= self._place[0])
            self._file = self._open(next(first, names[0]))
        while not self.queue:
            current = self._file.name
            later = [name for name in names if name > current]
            is_complete = self._file.is_complete(has_ended=bool(later) or is_over(current))
            self.queue += self._file.read(is_over=is_complete)
            if self.queue or not (later and is_complete):
                break
            self._file = self._open(later[0])
        if not self.queue:
            return None
        micros = self.queue[0].micros
        return math.inf if micros is None else micros

    def _open(self, name: LogName) -> "FileFollower":
        offset = self._place[1] if self._place[0] == name.attempt else 0
        limit = self._until[1] if self._until[0] == name.attempt else math.inf
        return FileFollower(LogFile(self._files, name), offset, limit)


class FileFollower:
    """Returns the lines of one log from `offset` on, none beyond `limit`."""

    def __init__(self, log: LogFile, offset: int, limit: float = math.inf) -> None:
        self.name = log.name
        self.offset = offset
        """Where the first line starts that was not returned yet."""
        self._log = log
        self._limit = limit
        self._read_bytes = offset
        """How long the log was when it was read to its end; a log that stays so is not opened."""
        self._reads = 0
        self._has_states = False
        """True if the last line, which has not ended, was overwritten, as by a progress bar."""
        self._has_arrived = False

    def is_complete(self, *, has_ended: bool) -> bool:
        """Return True if all lines of an attempt that has ended are here."""
        self._has_arrived |= has_ended and not self._log.is_arriving()
        return has_ended and self._has_arrived

    def read(self, *, is_over: bool = False) -> list[Lines]:
        """Return the complete lines of a block, or one long line; nothing if there is none.

        A line longer than `PIECE_BYTES` comes in pieces, whether it is complete or not. Of one that
        carriage returns overwrite a piece comes after `STATE_READS`: all states but the last, which
        may be incomplete. The unfinished last line of a log that is over comes after all others.
        """
        size = self.offset // LOG_EPOCH_BYTES * LOG_EPOCH_BYTES + self._log.size()
        self._reads += 1
        is_due = self._has_states and self._reads % STATE_READS == 0
        if is_over or size != self._read_bytes or self._reads % IDLE_READS == 0:
            begin, end = self._log.extent()
            if begin > self.offset or (is_over and end < self.offset):
                micros = self._log.times.at(begin)
                gap = Lines(self.name, min(self.offset, begin), begin, GAP, micros)
                self.offset = self._read_bytes = begin
                return [gap]
        end = int(min(size, self._limit))
        if end <= self.offset or (size == self._read_bytes and not (is_over or is_due)):
            return []
        raw = self._log.read(self.offset, min(log_file.BLOCK_BYTES, end - self.offset))
        taken = raw.rfind(b"\n") + 1
        if not taken and len(raw) == log_file.BLOCK_BYTES:
            # One byte more than a piece: a line end there belongs to this line.
            raw = self._log.read(self.offset, min(log_file.PIECE_BYTES + 1, end - self.offset))
            taken = raw.find(b"\n") + 1
        if not taken and len(raw) > log_file.PIECE_BYTES:
            # Between two states of a progress bar, if it is one.
            taken = raw.rfind(b"\r", log_file.PIECE_BYTES // 2, -1) + 1 or log_file.PIECE_BYTES
        elif not taken and (is_over or is_due):
            taken = len(raw) if is_over else raw.rfind(b"\r") + 1
        self._has_states = not taken and b"\r" in raw.lstrip(b"\r")
        found = list(self._split(raw[:taken]))
        self._read_bytes = self.offset + (taken or len(raw))
        self.offset += taken
        return found

    def _split(self, raw: bytes) -> Iterator[Lines]:
        """Yield lines that begin at `offset`, together as far as they were written together."""
        start = 0
        while start < len(raw):
            first_end = raw.find(b"\n", start) + 1 or len(raw)
            micros = self._log.times.at(self.offset + first_end)
            end, covered = len(raw), self._log.times.covered - self.offset
            if micros is not None and covered < end:
                end = raw.rfind(b"\n", start, covered) + 1
            shown = raw[start:end].removesuffix(b"\n")
            yield Lines(self.name, self.offset + start, self.offset + end, shown, micros)
            start = end
