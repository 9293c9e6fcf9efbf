"""Which values of which rank the series of a job hold, across restarts."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.series import CHECK_EVERY, NAMES_LIMIT, UNWRITTEN, JobSeries
from muster.contracts.series import Point, Window, aggregate, are_live

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)


class Told:
    """The series of a job, and which attempts are alive."""

    def __init__(self) -> None:
        self.series = JobSeries()
        self.alive = {0: 0}

    def says(
        self, since: int, step: int, rank: int = 0, *, is_back: bool = False, **names: float
    ) -> None:
        """A rank reports: the number of the step as its loss, once for each step."""
        losses = [float(it) for it in range(since + 1, step + 1)]
        values = {name: aggregate([value]) for name, value in names.items()}
        window = Window(since, step, is_back, values or {"loss": aggregate(losses)})
        self.series.take(
            rank,
            self.alive[rank],
            window,
            NOON,
            lambda one, attempt: self.alive.get(one) == attempt,
        )

    def dies(self, rank: int = 0) -> None:
        self.alive[rank] += 1

    def points(self, name: str = "loss", *, is_live: bool = True) -> list[Point]:
        own = [point for point in self.series.points.values() if point.name == name]
        kinds = zip(own, are_live(own), strict=True)
        return [point for point, found in kinds if found == is_live]

    def steps(self, name: str = "loss", *, is_live: bool = True) -> list[tuple[int, int]]:
        return [(point.since, point.step) for point in self.points(name, is_live=is_live)]


@pytest.fixture
def told() -> Told:
    return Told()


def test_points_beyond_a_restart_are_abandoned(told: Told) -> None:
    for step in range(10):
        told.says(step, step + 1)
    told.says(10, 10, val_loss=0.5)
    told.dies()
    told.says(6, 8, is_back=True)
    assert told.steps()[-2:] == [(5, 6), (6, 8)]
    assert told.steps(is_live=False) == [(6, 7), (7, 8), (8, 9), (9, 10)]
    told.says(8, 8, val_loss=0.4)
    assert told.steps("val_loss") == [(8, 8)]


def test_a_restart_in_the_same_process_is_seen(told: Told) -> None:
    told.says(0, 4)
    told.says(4, 6)
    told.says(4, 5, is_back=True)
    assert told.steps() == [(0, 4), (4, 5)]


def test_of_ranks_that_train_together_the_lowest_is_taken(told: Told) -> None:
    told.alive = {0: 0, 1: 0}
    told.says(0, 3, rank=1, is_back=True)
    told.says(0, 5, rank=0, is_back=True)
    told.says(3, 9, rank=1)
    assert told.steps() == [(0, 3), (3, 5)]


def test_survivors_go_on_where_a_dead_rank_ended(told: Told) -> None:
    told.alive = {0: 0, 1: 0}
    told.says(0, 4, rank=0, is_back=True)
    told.says(0, 3, rank=1, is_back=True)
    told.dies(0)
    told.says(3, 6, rank=1)
    told.says(6, 8, rank=0, is_back=True)
    assert told.steps() == [(0, 4), (4, 6), (6, 8)]
    assert [point.count for point in told.points()] == [4, 2, 2], "step 4 counts once"


def test_each_name_comes_from_the_rank_that_reports_it(told: Told) -> None:
    told.alive = {0: 0, 1: 0}
    told.says(0, 4, rank=0)
    told.says(0, 3, rank=1, gpu=0.5)
    assert told.steps("gpu") == [(0, 3)]


def test_names_are_limited_and_printable(told: Told) -> None:
    told.says(0, 1, **{"a\0b": 1.0}, **{f"m{number}": 1.0 for number in range(NAMES_LIMIT + 9)})
    assert len(told.series.points) == NAMES_LIMIT
    assert "a\0b" not in {name for name, _ in told.series.points}


def test_points_of_one_moment_have_different_times(told: Told) -> None:
    told.says(0, 1)
    told.says(1, 2)
    first, second = told.points()
    assert first.at < second.at


def test_what_cannot_be_written_for_long_is_merged(told: Told) -> None:
    for step in range(3 * UNWRITTEN):
        told.says(step, step + 1)
    assert len(told.series.points) == UNWRITTEN
    assert sum(point.count for point in told.points()) == 3 * UNWRITTEN
    assert told.steps()[-1] == (UNWRITTEN - 1, 3 * UNWRITTEN)


def test_points_are_later_than_those_of_the_coordinator_before(told: Told) -> None:
    told.series = JobSeries(NOON + timedelta(seconds=2))
    told.says(0, 1)
    told.says(1, 2)
    first, second = told.points()
    assert NOON + timedelta(seconds=2) < first.at < second.at


def test_a_name_is_looked_at_after_some_points(told: Told) -> None:
    for step in range(CHECK_EVERY):
        told.says(step, step + 1)
    assert told.series.due == {"loss"}


@pytest.mark.slow
@given(
    moves=st.lists(
        st.one_of(
            st.tuples(st.just("steps"), st.integers(1, 40)),
            st.tuples(st.sampled_from(["saves", "dies", "takeover"]), st.just(0)),
        ),
        max_size=60,
    )
)
def test_no_step_is_live_twice_in_any_history(moves: list[tuple[str, int]]) -> None:
    told, step, saved, is_back = Told(), 0, 0, True
    for move, steps in moves:
        if move == "steps":
            told.says(step, step + steps, is_back=is_back)
            step, is_back = step + steps, False
        elif move == "saves":
            saved = step
        elif move == "dies":
            told.dies()
            step, is_back = saved, True
        else:
            points = told.series.points
            last = max((point.at for point in points.values()), default=None)
            told.series = JobSeries(last, points)
    told.says(step, step + 1, is_back=is_back)
    live = told.points()
    assert [it.step for it in live] == sorted({it.step for it in live})
    assert all(it.count <= it.step - it.since for it in live)
    assert live[-1].step == step + 1
