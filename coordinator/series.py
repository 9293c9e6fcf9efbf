"""Which values of which rank the series of one job take. Pure."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final
from zlib import crc32

import msgspec

from muster.contracts.messages.rank import METRICS_LIMIT
from muster.contracts.series import Aggregate, Point, Window, merged_points

NAMES_LIMIT: Final = METRICS_LIMIT + 6  # and the loss, the throughput, and four of compression

CHECK_EVERY: Final = 64
"""How many points of a series come between two checks whether it has grown too long."""

UNWRITTEN: Final = 1024
"""So many points may wait for the database; beyond them the last ones of each name grow."""

_TICK: Final = timedelta(microseconds=1)


@dataclass(slots=True)
class _Head:
    """The end of a series: its source, and how far it has got."""

    rank: int
    attempt: int
    step: int
    at: datetime
    taken: int  # points


@dataclass(slots=True)
class JobSeries:
    """The points of one job that are not written yet.

    A name takes its values from the lowest living rank that reports it, each step once. A new
    coordinator does not know the source of the one before: it begins with the first that reports.
    """

    written_until: datetime | None = None
    """The time of the last point of the coordinator before us, whose clock may be ahead."""
    points: dict[tuple[str, datetime], Point] = field(default_factory=dict)
    """By name and time, which are their key in the database."""
    due: set[str] = field(default_factory=set)  # names that may have grown too long
    _heads: dict[str, _Head] = field(default_factory=dict)

    def take(
        self,
        rank: int,
        attempt: int,
        window: Window,
        at: datetime,
        is_alive: Callable[[int, int], bool],
    ) -> None:
        """Take the values of a heartbeat; `is_alive` tells whether an attempt of a rank runs."""

        def may_go_on(head: _Head) -> bool:
            is_own = (head.rank, head.attempt) == (rank, attempt)
            return is_own or not is_alive(head.rank, head.attempt)

        if window.is_back:
            for own in filter(may_go_on, self._heads.values()):
                own.step = min(own.step, window.since)
        for name, values in window.values.items():
            head = self._heads.get(name)
            if head is None:
                if len(self._heads) >= NAMES_LIMIT or not name.isprintable():
                    continue
                # Names count from different numbers, so that they are not due at the same time.
                first = crc32(name.encode()) % CHECK_EVERY
                before = max(at - _TICK, self.written_until or at - _TICK)
                head = _Head(rank, attempt, window.since, before, first)
            elif not (may_go_on(head) or rank < head.rank):
                continue
            is_same_step = window.since == window.step == head.step
            if window.step <= head.step and not is_same_step:
                continue
            point = _point_after(head, name, values, window, at)
            kept_at = self._append(point, head.at)
            self._heads[name] = _Head(rank, attempt, point.step, kept_at, head.taken + 1)
            if (head.taken + 1) % CHECK_EVERY == 0:
                self.due.add(name)

    def _append(self, point: Point, before: datetime) -> datetime:
        """Append a point to a series that has one at `before`; return the time of its last one."""
        last = self.points.get((point.name, before))
        if last is not None and len(self.points) >= UNWRITTEN and point.since >= last.step:
            point = msgspec.structs.replace(merged_points(last, point), at=last.at)
        self.points[point.name, point.at] = point
        return point.at


def _point_after(head: _Head, name: str, values: Aggregate, window: Window, at: datetime) -> Point:
    """Return the values of a window as a point; of steps before `head` they do not count again.

    There another rank has reported. Each new step counts as one value.
    """
    point = Point(
        **msgspec.structs.asdict(values),
        name=name,
        at=max(at, head.at + _TICK),
        since=max(window.since, head.step),
        step=window.step,
    )
    if window.since >= head.step:
        return point
    return msgspec.structs.replace(point, count=min(point.count, point.step - point.since))
