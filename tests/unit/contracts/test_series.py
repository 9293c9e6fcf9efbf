"""Points and windows: whatever is merged, extremes, counts, first and last stay."""

from datetime import UTC, datetime, timedelta
from functools import reduce
from math import inf, isfinite, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.contracts.series import Point, Window, aggregate, are_live, compact, joined, merged

VALUES = st.lists(st.floats(width=32) | st.sampled_from([nan, inf, -inf]), min_size=1)
NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


def points_of(*steps: int) -> list[Point]:
    """Return a point for each step, in order of time."""
    return [
        Point(
            **msgspec.structs.asdict(aggregate([float(step % 7)])),
            name="loss",
            at=NOON + timedelta(seconds=second),
            since=step - 1,
            step=step,
        )
        for second, step in enumerate(steps)
    ]


@pytest.mark.slow
@given(parts=st.lists(VALUES, min_size=1))
def test_merged_parts_are_the_aggregate_of_all_values(parts: list[list[float]]) -> None:
    values = [value for part in parts for value in part]
    finite = list(filter(isfinite, values))
    found = reduce(merged, map(aggregate, parts))
    assert (found.count, found.not_finite) == (len(finite), len(values) - len(finite))
    known = (found.first, found.least, found.greatest, found.last)
    ends = (finite[0], min(finite), max(finite), finite[-1]) if finite else (None,) * 4
    assert known == ends


def test_a_joined_window_forgets_what_was_gone_back_behind() -> None:
    def window(since: int, step: int, *, is_back: bool = False) -> Window:
        return Window(since, step, is_back, {"loss": aggregate([float(step)])})

    both = joined(window(0, 3, is_back=True), window(3, 5))
    assert (both.since, both.step, both.is_back, both.values["loss"].count) == (0, 5, True, 2)
    back = window(2, 4, is_back=True)
    assert joined(both, back) == back


def test_points_beyond_a_restart_are_abandoned() -> None:
    steps = [1, 2, 3, 4, 3, 4, 5, 4, 5]
    live = [it for it, is_live in zip(steps, are_live(points_of(*steps)), strict=True) if is_live]
    assert live == [1, 2, 3, 4, 5]
    assert are_live(points_of(*steps)) == [True, True, False, False, True, False, False, True, True]


def test_an_abandoned_step_far_away_does_not_flatten_the_curve() -> None:
    points = points_of(*range(1, 101), 10**15, *range(101, 201))
    points[101] = msgspec.structs.replace(points[101], since=100)
    assert 50 <= len(compact(points, 50, 50)) <= 53


@pytest.mark.slow
@given(
    runs=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=6),
    limit=st.integers(1, 50),
)
def test_compact_points_lose_nothing_that_is_live(runs: list[tuple[int, int]], limit: int) -> None:
    steps: list[int] = []
    for back, forward in runs:
        since = max(0, (steps[-1] if steps else 0) - back)
        steps += range(since + 1, since + forward + 1)
    points = points_of(*steps)
    found = compact(points, limit, limit)

    def live(among: list[Point]) -> list[Point]:
        return [it for it, is_live in zip(among, are_live(among), strict=True) if is_live]

    nothing = aggregate([])
    assert reduce(merged, live(found), nothing) == reduce(merged, live(points), nothing)
    assert (live(found)[0].since, live(found)[-1].step) == (0, live(points)[-1].step)
    assert len(live(found)) <= limit + len(runs)
    assert len(found) - len(live(found)) <= limit
