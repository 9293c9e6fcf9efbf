"""The logs of a job from a position on: history first, then whatever is written.

One rank's lines come in their order, incarnation by incarnation: the next one is opened only
when the one before is over and handed out to its last byte. So one place per rank says exactly
what was delivered. Between ranks, lines that were written already come in the order of time.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
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
        for rank, names in logs_by_rank(self._files, self._rank).items():
            follower = self._ranks.get(rank)
            if follower is None:
                follower = _RankFollower(self._files, self._position.get(rank))
                self._ranks[rank] = follower
            follower.refill(names, is_over)
        lines = self._merged()
        return Batch(lines, self.position) if lines else None

    def _merged(self) -> list[str]:
        heads = [(queue[0][0], rank) for rank in self._ranks if (queue := self._ranks[rank].queue)]
        heapq.heapify(heads)
        lines: list[str] = []
        size = 0
        while heads and size < BATCH_BYTES:
            _, rank = heads[0]
            follower = self._ranks[rank]
            _, line = follower.queue.popleft()
            self._position[rank] = (follower.incarnation, line.end)
            text = line.text if self._rank is not None else f"[rank {rank}] {line.text}"
            lines.append(text)
            size += len(text) + 1
            if not follower.queue:
                follower.read_more()
            if follower.queue:
                heapq.heapreplace(heads, (follower.queue[0][0], rank))
            else:
                heapq.heappop(heads)
        return lines


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

    def refill(self, names: Sequence[LogName], is_over: Callable[[LogName], bool]) -> None:
        """Read ahead, going on to the next of `names` where one is over and at its end."""
        if self._name is None:
            self._open(self._first(names))
        self.read_more()
        while not self.queue and self._name is not None:
            later = [name for name in names if name > self._name]
            if not later and not is_over(self._name):
                return
            self._queue(self._follower.rest())
            if self.queue or not later:
                return
            self._open(later[0])
            self.read_more()

    def read_more(self) -> None:
        if not self.queue:
            self._queue(self._follower.read(READ_BYTES))

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
