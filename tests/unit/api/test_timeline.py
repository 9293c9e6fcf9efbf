"""Bars and marks of the time line."""

from datetime import UTC, datetime, timedelta

import pytest

from api.page.timeline import timeline
from muster.contracts.views.history import AttemptView, EventView

MOMENT = datetime(2026, 1, 2, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return MOMENT + timedelta(seconds=seconds)


def attempt(
    rank: int, number: int, begin: float, end: float | None, why: str = "killed"
) -> AttemptView:
    return AttemptView(
        rank=rank,
        attempt=number,
        pid=1,
        started_at=at(begin),
        ended_at=None if end is None else at(end),
        retry_class=None if end is None else why,
    )


def event(
    kind: str, seconds: float, rank: int | None = None, attempt: int | None = None
) -> EventView:
    return EventView(at=at(seconds), kind=kind, message=kind, rank=rank, attempt=attempt)


SUBMITTED = event("submitted", 0)
BEGUN = [SUBMITTED, event("group_announced", 5), event("step_taken", 10)]


@pytest.mark.parametrize(
    ("attempts", "events", "expected"),
    [
        ([], [], {}),
        ([attempt(0, 0, 10, None)], [], {0: [("starting", 10, 90)]}),
        (
            [attempt(0, 0, 10, None)],
            [SUBMITTED, event("step_taken", 30)],
            {0: [("starting", 10, 20), ("training", 30, 70)]},
        ),
        (
            [attempt(0, 1, 50, None), attempt(0, 0, 10, 50)],
            [SUBMITTED, event("step_taken", 20), event("step_taken", 60)],
            {
                0: [
                    ("starting", 10, 10),
                    ("training", 20, 30),
                    ("lost", 50, 0.1),
                    ("gone", 50, 0.1),
                    ("starting", 50, 10),
                    ("training", 60, 40),
                ]
            },
        ),
        (
            [attempt(1, 0, 0, 40, "finished")],
            [SUBMITTED, event("step_taken", 10)],
            {1: [("starting", 0, 10), ("training", 10, 30)]},
        ),
        (  # paused, and saved while it trains
            [attempt(0, 0, 0, None)],
            [
                *BEGUN,
                event("group_announced", 20),
                event("job_paused", 21),
                event("group_announced", 25),
                event("resume_requested", 30),
                event("step_taken", 32),
                event("checkpoint_requested", 40),
                event("group_announced", 42),
                event("checkpoint_saved", 45),
                event("step_taken", 46),
            ],
            {
                0: [
                    ("starting", 0, 10),
                    ("training", 10, 10),
                    ("waiting", 20, 1),
                    ("paused", 21, 9),
                    ("waiting", 30, 2),
                    ("training", 32, 10),
                    ("saving", 42, 3),
                    ("waiting", 45, 1),
                    ("training", 46, 54),
                ]
            },
        ),
        (  # a rank is lost; the others go on without it, and then with it
            [attempt(0, 0, 0, 99, "finished"), attempt(1, 0, 0, 20), attempt(1, 1, 25, None)],
            [
                *BEGUN,
                event("rank_exited", 20, 1, 0),
                event("group_announced", 22),
                event("step_taken", 23),
                event("rank_ready", 30, 1, 1),
                event("step_taken", 31),
                event("group_announced", 33),
                event("step_taken", 36),
                event("rank_exited", 99, 0, 0),
            ],
            {
                0: [
                    ("starting", 0, 10),
                    ("training", 10, 10),
                    ("waiting", 20, 3),
                    ("training", 23, 10),
                    ("waiting", 33, 3),
                    ("training", 36, 63),
                ],
                1: [
                    ("starting", 0, 10),
                    ("training", 10, 10),
                    ("lost", 20, 0.1),
                    ("gone", 20, 5),
                    ("starting", 25, 5),
                    ("restoring", 30, 6),
                    ("training", 36, 64),
                ],
            },
        ),
        (  # the first events are not known any more
            [attempt(0, 0, 0, None)],
            [event("step_taken", 50)],
            {0: [("alive", 0, 50), ("training", 50, 50)]},
        ),
    ],
)
def test_each_phase_has_a_bar(
    attempts: list[AttemptView], events: list[EventView], expected: dict[int, list[object]]
) -> None:
    found = timeline(MOMENT, at(100), attempts, events)
    bars = {rank: [(it.phase, it.left, it.width) for it in row] for rank, row in found.rows.items()}
    assert bars == expected


def test_marks_stand_where_things_happened() -> None:
    events = [event("group_announced", 25), event("rank_exited", 50, rank=2), event("warned", 60)]
    marks = timeline(MOMENT, at(100), [], events).marks
    assert [(it.kind, it.left, it.rank) for it in marks] == [("round", 25, None), ("fault", 50, 2)]


def test_a_job_without_duration_has_a_time_line() -> None:
    found = timeline(MOMENT, MOMENT, [attempt(0, 0, 0, 0)], [event("step_taken", 0)])
    assert all(0 <= bar.left <= 100 for bar in found.rows[0])
