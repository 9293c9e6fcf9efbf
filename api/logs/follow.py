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

from api.logs.forwards import Follower, Stretch
from api.logs.lines import size_of
from api.logs.position import Place, Position
from api.logs.tail import logs_by_rank
from api.logs.times import TimeIndex
from muster.contracts.layout import JobFiles, LogName

BATCH_BYTES: Final = 64 * 1024

Logs = Mapping[int, Sequence[LogName]]
IsOver = Callable[[LogName], bool]


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines for one event, joined by line ends, and the position behind them."""

    text: str
    position: Position


class JobFollower:
    """Reads the logs of one job, of all ranks or one, from `position` on.

    With `until` it reads exactly up to there: what lies below it is complete.
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
        """Behind the last line handed out."""
        return dict(self._position)

    @property
    def is_ahead(self) -> bool:
        """Whether a rank's place is beyond `until`: whoever named that one had not read so far."""
        return any(self._is_ahead(rank) for rank in self._position)

    def next_batch(self, is_over: IsOver) -> Batch | None:
        """Return what there is to hand out, about `BATCH_BYTES`, or None if there is nothing.

        `is_over` says of which incarnations it was known *before* this call that they will write
        no more: their unfinished last line is a line too.
        """
        logs = self._logs()
        for rank in logs.keys() - self._ranks.keys():
            until = None if self._until is None else self._until[rank]
            self._ranks[rank] = _RankFollower(self._files, self._position.get(rank), until)
        pieces = self._merged(logs, is_over)
        return Batch("\n".join(pieces), self.position) if pieces else None

    def _logs(self) -> Logs:
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
        # A place that is not there is of an earlier job with this id, and says nothing.
        incarnation, offset = place
        log = self._files.log(rank, incarnation)
        return log.exists() and offset <= size_of(log)

    def _merged(self, logs: Logs, is_over: IsOver) -> list[str]:
        # Of several whose time is the same, or not known yet, the one that waited longest is
        # next: a rank that writes faster than we read must not silence the others.
        heads = [
            (head, 0, rank)
            for rank, names in logs.items()
            if (head := self._ranks[rank].head(names, is_over)) is not None
        ]
        heapq.heapify(heads)
        pieces: list[str] = []
        size = 0
        while heads and size < BATCH_BYTES:
            _, _, rank = heads[0]
            pieces.append(self._take(rank))
            size += len(pieces[-1]) + 1
            head = self._ranks[rank].head(logs[rank], is_over)
            if head is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (head, len(pieces), rank))
        return pieces

    def _take(self, rank: int) -> str:
        follower = self._ranks[rank]
        _, stretch = follower.queue.popleft()
        self._position[rank] = (follower.incarnation, stretch.end)
        if self._rank is not None:
            return stretch.text
        prefix = f"[rank {rank}] "
        return prefix + stretch.text.replace("\n", f"\n{prefix}")


class _RankFollower:
    """The logs of one rank, one incarnation after the other; `until` is the last place of all."""

    def __init__(self, files: JobFiles, place: Place | None, until: Place | None) -> None:
        self._files = files
        self.queue: deque[tuple[float, Stretch]] = deque()
        """What was read and not handed out, each piece of one time (infinite: not known)."""
        self._name: LogName | None = None
        self._place = place
        self._until = until

    @property
    def incarnation(self) -> int:
        return self._name.incarnation if self._name else 0

    def head(self, names: Sequence[LogName], is_over: IsOver) -> float | None:
        """Return the time of the next line, or None if there is none now.

        Goes on to the next of `names` where one is over and at its end.
        """
        if self._name is None:
            self._open(self._first(names))
        while not self.queue and self._name is not None:
            self._queue(self._follower.read())
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
        limit = math.inf
        if self._until is not None and self._until[0] == name.incarnation:
            limit = self._until[1]
        self._name = name
        self._follower = Follower(self._files.log(name.rank, name.incarnation), offset, limit)
        self._times = TimeIndex(self._files.times(name.rank, name.incarnation))

    def _queue(self, stretches: Sequence[Stretch]) -> None:
        for stretch in stretches:
            rest: Stretch | None = stretch
            while rest is not None:
                micros = self._times.at(rest.first_end)
                if micros is None:
                    self.queue.append((math.inf, rest))
                    break
                piece, rest = rest.parted(self._times.covered)
                self.queue.append((micros, piece))
