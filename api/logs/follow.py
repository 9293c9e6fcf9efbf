"""The logs of a job from a position on: history first, then whatever is written.

One rank's lines come in their order, incarnation by incarnation: the next one is opened only
when the one before is over and handed out to its last byte. So one place per rank says exactly
what was delivered. Between ranks, lines that were written already come in the order of time.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from api.logs.lines import Follower, Line
from api.logs.position import Place, Position, format_position
from api.logs.tail import logs_by_rank
from api.logs.times import TimeIndex
from muster.contracts.layout import JobFiles, LogName

BATCH_BYTES: Final = 64 * 1024
READ_BYTES: Final = 16 * 1024
"""What is read ahead of one rank."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines for one event, and the position behind them."""

    lines: Sequence[str]
    position: str


class JobFollower:
    """Reads the logs of one job, of all ranks or one, from `position` on."""

    def __init__(self, files: JobFiles, rank: int | None, position: Position) -> None:
        self._files = files
        self._rank = rank
        self._position = {
            place: position[place] for place in position if rank is None or place == rank
        }
        self._ranks: dict[int, _RankFollower] = {}

    @property
    def position(self) -> str:
        """Behind the last line handed out."""
        return format_position(self._position)

    def next_batch(self, is_over: Callable[[LogName], bool]) -> Batch | None:
        """Return what there is to hand out, at most `BATCH_BYTES`, or None if there is nothing.

        `is_over` says of which incarnations it was known *before* this call that they will write
        no more: their unfinished last line is a line too.
        """
        logs = logs_by_rank(self._files, self._rank)
        for rank in logs.keys() - self._ranks.keys():
            self._ranks[rank] = _RankFollower(self._files, self._position.get(rank))
        lines = self._merged(logs, is_over)
        return Batch(lines, self.position) if lines else None

    def _merged(
        self, logs: Mapping[int, Sequence[LogName]], is_over: Callable[[LogName], bool]
    ) -> list[str]:
        # Of several whose time is the same, or not known yet, the one that waited longest is
        # next: a rank that writes faster than we read must not silence the others.
        heads = [
            (head, 0, rank)
            for rank, names in logs.items()
            if (head := self._ranks[rank].head(names, is_over)) is not None
        ]
        heapq.heapify(heads)
        lines: list[str] = []
        size = 0
        while heads and size < BATCH_BYTES:
            _, _, rank = heads[0]
            lines.append(self._take(rank))
            size += len(lines[-1]) + 1
            head = self._ranks[rank].head(logs[rank], is_over)
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (head, len(lines), rank))
        return lines

    def _take(self, rank: int) -> str:
        follower = self._ranks[rank]
        _, line = follower.queue.popleft()
        self._position[rank] = (follower.incarnation, line.end)
        return line.text if self._rank is not None else f"[rank {rank}] {line.text}"


class _RankFollower:
    """The logs of one rank, one incarnation after the other."""

    def __init__(self, files: JobFiles, place: Place | None) -> None:
        self._files = files
        self.queue: deque[tuple[float, Line]] = deque()
        """Lines that were read and not handed out, each with its time (infinite: not known)."""
        self._name: LogName | None = None
        self._place = place

    @property
    def incarnation(self) -> int:
        return self._name.incarnation if self._name else 0

    def head(self, names: Sequence[LogName], is_over: Callable[[LogName], bool]) -> float | None:
        """Return the time of the next line, or None if there is none now.

        Goes on to the next of `names` where one is over and at its end.
        """
        if self._name is None:
            self._open(self._first(names))
        while not self.queue and self._name is not None:
            self._queue(self._follower.read(READ_BYTES))
            later = [name for name in names if name > self._name]
            if self.queue or not (later or is_over(self._name)):
                break
            self._queue(self._follower.rest())
            if self.queue or not later:
                break
            self._open(later[0])
        return self.queue[0][0] if self.queue else None

    def _first(self, names: Sequence[LogName]) -> LogName:
        if self._place is None:
            return names[0]
        incarnation, _ = self._place
        return next((name for name in names if name.incarnation >= incarnation), names[0])

    def _open(self, name: LogName) -> None:
        offset = 0
        if self._place is not None and self._place[0] == name.incarnation:
            offset = self._place[1]
        self._name = name
        self._follower = Follower(self._files.log(name.rank, name.incarnation), offset)
        self._times = TimeIndex(self._files.times(name.rank, name.incarnation))

    def _queue(self, lines: Sequence[Line]) -> None:
        for line in lines:
            micros = self._times.at(line.end)
            self.queue.append((math.inf if micros is None else micros, line))
