"""What ranks report from step to step, in bounded size. Pure.

A heartbeat sums up all values since the one before in a *window*; each becomes a *point* of a
series, and old points merge. Both hold first, least, greatest and last value (M4, Jugel et al.,
VLDB 2014), so a line drawn through them shows every spike, however often they were merged.
"""

from collections.abc import Sequence
from datetime import datetime
from math import isfinite
from typing import Final

import msgspec

from muster.contracts.rank import Count

LOSS: Final = "loss"
THROUGHPUT: Final = "throughput_steps_per_sec"
"""Measured by the coordinator; a metric of this name is left out."""

POINTS_LIMIT: Final = 2048  # of one series, with what is abandoned
SERIES_LIMIT: Final = POINTS_LIMIT - 64  # from here on points merge, at the next check
LIVE_KEPT: Final = 1024
ABANDONED_KEPT: Final = 512
"""About so many are left when points merge."""


class Aggregate(msgspec.Struct, frozen=True, array_like=True):
    """Values in the order they came. The first four are None if none of them was finite."""

    first: float | None
    least: float | None
    greatest: float | None
    last: float | None
    count: Count  # of the finite ones
    not_finite: Count


class Window(msgspec.Struct, frozen=True, array_like=True):
    """What a rank reported in the steps after `since`, up to and including `step`, by name."""

    since: Count
    step: Count
    is_back: bool  # this process began with `since`, or has gone back to it
    values: dict[str, Aggregate]


class Point(Aggregate, frozen=True, kw_only=True, array_like=False):
    """The values of one name in the steps after `since`, up to and including `step`."""

    name: str
    at: datetime  # when the last of them became known; the points of a name have different times
    since: Count
    step: Count


def aggregate(values: Sequence[float]) -> Aggregate:
    """Return what sums up these values."""
    finite = values if all(map(isfinite, values)) else list(filter(isfinite, values))
    others = len(values) - len(finite)
    if not finite:
        return Aggregate(None, None, None, None, 0, others)
    return Aggregate(finite[0], min(finite), max(finite), finite[-1], len(finite), others)


def merged(earlier: Aggregate, later: Aggregate) -> Aggregate:
    """Return what sums up the values of both."""
    count = earlier.count + later.count
    others = earlier.not_finite + later.not_finite
    known = [point for point in (earlier, later) if point.count]
    least = min((point.least for point in known if point.least is not None), default=None)
    greatest = max((point.greatest for point in known if point.greatest is not None), default=None)
    first, last = (known[0].first, known[-1].last) if known else (None, None)
    return Aggregate(first, least, greatest, last, count, others)


def joined(earlier: Window | None, later: Window) -> Window:
    """Return one window for both; what `later` goes back behind is forgotten."""
    if earlier is None or (later.is_back and later.since < earlier.step):
        return later
    values = dict(earlier.values)
    for name, own in later.values.items():
        values[name] = merged(values[name], own) if name in values else own
    return Window(earlier.since, later.step, earlier.is_back or later.is_back, values)


def are_live(points: Sequence[Point]) -> list[bool]:
    """Return of each point of a series, in order of time, whether it is part of its curve.

    The others were abandoned: training has gone back to a step before their last one.
    """
    live: list[int] = []
    for at, point in enumerate(points):
        while live and points[live[-1]].step > point.since:
            live.pop()
        live.append(at)
    kept = set(live)
    return [at in kept for at in range(len(points))]


def compact(points: Sequence[Point], live: int, abandoned: int) -> list[Point]:
    """Merge neighbours in the same part of the steps; return about so many of each kind.

    Points on the two sides of a restart stay apart. Of too many abandoned ones the oldest go.
    """
    kinds = are_live(points)
    # The last point is always live, and no live one before it has a later step.
    began = min((point.since for point in points), default=0)
    steps = (points[-1].step if points else 0) - began + 1
    kept: list[tuple[Point, bool]] = []
    for point, is_live in zip(points, kinds, strict=True):
        limit = live if is_live else abandoned
        if kept:
            before, was_live = kept[-1]
            is_near = (before.step - began) * limit // steps == (
                point.step - began
            ) * limit // steps
            if is_near and was_live == is_live and point.since >= before.step:
                kept[-1] = merged_points(before, point), is_live
                continue
        kept.append((point, is_live))
    surplus = sum(not is_live for _, is_live in kept) - abandoned
    return [point for point, is_live in kept if is_live or (surplus := surplus - 1) < 0]


def merged_points(earlier: Point, later: Point) -> Point:
    """Return one point for both, at the time of the later one."""
    values = msgspec.structs.asdict(merged(earlier, later))
    return msgspec.structs.replace(later, since=earlier.since, **values)
