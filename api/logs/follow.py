"""Read the logs of a job forwards from a position: first what is there, then what is added.

The lines of one rank come in order, attempt by attempt: the next attempt is opened only when the
previous one is over and read to its last byte, so one place per rank says exactly what was
delivered. Lines of several ranks that were written before are merged by time.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from api.logs import files as log_files
from api.logs.files import (
    GAP,
    LINE_LIMIT_BYTES,
    Place,
    Position,
    TimeIndex,
    decode,
    extent_of,
    logs_by_rank,
    read,
    shorten,
    size_of,
)
from muster.contracts.paths import LOG_EPOCH_BYTES, JobFiles, LogName

BATCH_BYTES: Final = 64 * 1024

IDLE_READS: Final = 10
"""After so many reads, about a second, a reader looks whether a log of the same size is another."""

IsOver = Callable[[LogName], bool]
"""True for logs to which nothing will be added."""

_Logs = Mapping[int, Sequence[LogName]]


class JobFollower:
    """Reads the logs of one job, all ranks or one, from `position` on.

    With `until` it reads exactly up to that position, below which everything is complete.
    """

    def __init__(
        self,
        files: JobFiles,
        rank: int | None,
        position: Position,
        until: Position | None = None,
    ) -> None:
        self._files = files
        self._rank = rank
        self._until = until
        self._position = {
            place: position[place] for place in position if rank is None or place == rank
        }
        self._ranks: dict[int, _RankFollower] = {}

    @property
    def position(self) -> Position:
        """The position after the last line that was returned."""
        return dict(self._position)

    @property
    def is_ahead(self) -> bool:
        """True if the place of a rank is beyond `until`."""
        return any(self._is_ahead(rank) for rank in self._position)

    def next_batch(self, is_over: IsOver) -> str | None:
        """Return about `BATCH_BYTES` of lines, joined by line ends, or None if there are none now.

        `is_over` is what was known *before* this call: the unfinished last line of a log that is
        over is a line as well.
        """
        logs = self._logs()
        for rank in logs.keys() - self._ranks.keys():
            until = None if self._until is None else self._until[rank]
            self._ranks[rank] = _RankFollower(self._files, self._position.get(rank), until)
        texts = self._take_lines(logs, is_over)
        return "\n".join(texts) if texts else None

    def _logs(self) -> _Logs:
        logs = logs_by_rank(self._files, self._rank)
        if self._until is None:
            return logs
        known = {
            rank: [name for name in names if name.incarnation <= self._until[rank][0]]
            for rank, names in logs.items()
            if rank in self._until and not self._is_ahead(rank)
        }
        return {rank: names for rank, names in known.items() if names}

    def _is_ahead(self, rank: int) -> bool:
        place = self._position.get(rank)
        if self._until is None or place is None or place <= self._until.get(rank, (0, 0)):
            return False
        # A place that does not exist comes from an earlier job with the same id.
        attempt, offset = place
        log = self._files.log(rank, attempt)
        return log.exists() and offset <= extent_of(log)[1]

    def _take_lines(self, logs: _Logs, is_over: IsOver) -> list[str]:
        # Among equal or unknown times the rank that waited longest is next, so that a rank that
        # writes faster than we read does not hold up the others.
        heads = [
            (head, 0, rank)
            for rank, names in logs.items()
            if (head := self._ranks[rank].head(names, is_over)) is not None
        ]
        heapq.heapify(heads)
        texts: list[str] = []
        size = 0
        while heads and size < BATCH_BYTES:
            _, _, rank = heads[0]
            texts.append(self._take(rank))
            size += len(texts[-1]) + 1
            head = self._ranks[rank].head(logs[rank], is_over)
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (head, len(texts), rank))
        return texts

    def _take(self, rank: int) -> str:
        follower = self._ranks[rank]
        _, chunk = follower.queue.popleft()
        self._position[rank] = (follower.attempt, chunk.end)
        if self._rank is not None:
            return chunk.text
        prefix = f"[rank {rank}] "
        return prefix + chunk.text.replace("\n", f"\n{prefix}")


class _RankFollower:
    """Reads the logs of one rank, one attempt after the other, up to the place `until`."""

    def __init__(self, files: JobFiles, place: Place | None, until: Place | None) -> None:
        self._files = files
        self._name: LogName | None = None
        self._place = place
        self._until = until
        self.queue: deque[tuple[float, Chunk]] = deque()
        """What was read and not returned yet, each chunk of one time (infinite: not known)."""

    @property
    def attempt(self) -> int:
        return self._name.incarnation if self._name else 0

    def head(self, names: Sequence[LogName], is_over: IsOver) -> float | None:
        """Return the time of the next line, or None if there is no line now.

        Opens the next of `names` when the current one is over and read to its end.
        """
        if self._name is None:
            self._open(self._first(names))
        while not self.queue and self._name is not None:
            self._add(self._follower.read())
            later = [name for name in names if name > self._name]
            if self.queue or not (later or is_over(self._name)):
                break
            self._add(self._follower.read_rest())
            if self.queue or not later:
                break
            self._open(later[0])
        return self.queue[0][0] if self.queue else None

    def _first(self, names: Sequence[LogName]) -> LogName:
        if self._place is None:
            return names[0]
        attempt, _ = self._place
        return next((name for name in names if name.incarnation >= attempt), names[0])

    def _open(self, name: LogName) -> None:
        offset, limit = 0, math.inf
        if self._place is not None and self._place[0] == name.incarnation:
            offset = self._place[1]
        if self._until is not None and self._until[0] == name.incarnation:
            limit = self._until[1]
        self._name = name
        self._follower = FileFollower(self._files.log(name.rank, name.incarnation), offset, limit)
        self._times = TimeIndex(self._files.times(name.rank, name.incarnation))

    def _add(self, chunks: Sequence["Chunk"]) -> None:
        for chunk in chunks:
            rest: Chunk | None = chunk
            while rest is not None:
                micros = self._times.at(rest.first_end)
                if micros is None:
                    self.queue.append((math.inf, rest))
                    break
                part, rest = rest.split(self._times.covered)
                self.queue.append((micros, part))


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Whole lines, or a piece of one line: the bytes [start, end), the last line end included.

    Adjacent lines stay together, because handling a line by itself costs more than its content.
    """

    start: int
    end: int
    raw: bytes
    """What is shown, without the last line end."""

    @property
    def text(self) -> str:
        return decode(self.raw)

    @property
    def first_end(self) -> int:
        """Where the first line ends."""
        newline = self.raw.find(b"\n")
        return self.end if newline < 0 else self.start + newline + 1

    def split(self, place: int) -> tuple[Self, Self | None]:
        """Return the lines that end at `place` or below, at least one, and the rest."""
        newline = self.raw.rfind(b"\n", 0, place - self.start)
        if place >= self.end or newline < 0:
            return self, None
        middle = self.start + newline + 1
        return (
            type(self)(start=self.start, end=middle, raw=self.raw[:newline]),
            type(self)(start=middle, end=self.end, raw=self.raw[newline + 1 :]),
        )


class FileFollower:
    """Returns the lines of one file from `offset` on, none beyond `limit`."""

    def __init__(self, path: Path, offset: int, limit: float = math.inf) -> None:
        self._path = path
        self._limit = limit
        self.offset = offset
        """Where the first line starts that was not returned yet."""
        self._searched = offset
        """There is no line end between `offset` and here; a growing line is searched only once."""
        self._reads = 0

    def read(self) -> list[Chunk]:
        """Return the complete lines of a block, or one long line; nothing if there is none.

        A line longer than `PIECE_BYTES` comes in pieces, whether it is complete or not.
        """
        found: list[Chunk] = []
        size = self.offset // LOG_EPOCH_BYTES * LOG_EPOCH_BYTES + size_of(self._path)
        self._reads += 1
        if size != self._searched or self._reads % IDLE_READS == 0:
            begin, _ = extent_of(self._path)
            if begin > self.offset:
                return self._skip_to(begin)
        end = int(min(size, self._limit))
        while self._searched < end and not found:
            # One byte more than a piece: a line end there belongs to this line.
            beyond = min(end, self.offset + log_files.PIECE_BYTES + 1)
            block = read(
                self._path, self._searched, min(log_files.BLOCK_BYTES, beyond - self._searched)
            )
            if not block:
                break
            found += self._split(block)
            if not found and self._searched - self.offset > log_files.PIECE_BYTES:
                start = self.offset
                self.offset += log_files.PIECE_BYTES
                found.append(self._single(start, self.offset))
        return found

    def _skip_to(self, begin: int) -> list[Chunk]:
        """Go to where the log begins now, and return a line about that."""
        gap = Chunk(start=min(self.offset, begin), end=begin, raw=GAP)
        self.offset = self._searched = begin
        return [gap]

    def read_rest(self) -> list[Chunk]:
        """Return the unfinished last line of a file that does not grow any more."""
        begin, size = extent_of(self._path)
        if not begin <= self.offset <= size:
            return self._skip_to(begin)
        end = int(min(size, self._limit))
        if end <= self.offset:
            return []
        rest = self._single(self.offset, end)
        self.offset = self._searched = end
        return [rest]

    def _split(self, block: bytes) -> Iterator[Chunk]:
        start = self._searched
        last = block.rfind(b"\n")
        if last < 0:
            self._searched += len(block)
            return
        first = 0
        if self.offset < start:  # the first line starts in an earlier block
            first = block.find(b"\n") + 1
            yield self._single(self.offset, start + first)
        if first <= last:
            yield from self._chunks(start + first, block[first:last])
        # What follows the last line end is read again with what is added to it.
        self.offset = self._searched = start + last + 1

    def _chunks(self, start: int, raw: bytes) -> Iterator[Chunk]:
        if len(raw) <= LINE_LIMIT_BYTES or max(map(len, raw.split(b"\n"))) <= LINE_LIMIT_BYTES:
            yield Chunk(start=start, end=start + len(raw) + 1, raw=raw)
            return
        for line in raw.split(b"\n"):
            end = start + len(line) + 1
            yield Chunk(start=start, end=end, raw=shorten(line, len(line)))
            start = end

    def _single(self, start: int, end: int) -> Chunk:
        raw = read(self._path, start, min(end - start, LINE_LIMIT_BYTES + 1))
        last = raw if len(raw) == end - start else read(self._path, end - 1, 1)
        length = end - start - last.endswith(b"\n")
        return Chunk(start=start, end=end, raw=shorten(raw, length))
