"""What a fault brings is told, once, and then how it ended."""

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any

import pytest
from summaries import RANK, rank, summary

from cli.aftermath import LOOK_SECONDS, PATIENCE_SECONDS, SILENCE_SECONDS, Aftermath, NotBack
from muster.client.views import EventView, SummaryView

TICKS = count()
BEFORE = {**RANK, "rank": 1, "worker_id": "1.0"}
GONE = {**BEFORE, "state": "exited", "pid": None}
WHY = "it trains on"
BACK = {**BEFORE, "worker_id": "1.1", "pid": 9}


class Job:
    """A job of which one thing more is known at each look."""

    def __init__(self, *looks: tuple[str, dict[str, Any]]) -> None:
        self._looks = iter(looks)
        self._last = looks[-1]
        self._events = [event("the job was submitted")]

    def events(self) -> list[EventView]:
        return list(self._events)

    def summary(self) -> SummaryView:
        status, worker = next(self._looks, self._last)
        self._events.append(event(f"rank 1 is {worker['state']}"))
        return summary(status=status, workers=[RANK, worker])


def event(message: str) -> EventView:
    at = datetime(2026, 3, 1, tzinfo=UTC) + timedelta(seconds=next(TICKS))
    return EventView(at=at, kind="k", message=message, rank=1, incarnation=None)


def sentences(job: Job) -> list[str]:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    aftermath = Aftermath(job, rank(**BEFORE), WHY, monotonic=lambda: now[0], sleep=sleep)
    told = []
    try:
        told.extend(aftermath.sentences())
    except NotBack as error:
        return [*told, f"not back: {error}"]
    return told


def test_each_event_is_told_until_the_rank_lives_again() -> None:
    job = Job(("RUNNING", BEFORE), ("RECOVERING", GONE), ("RUNNING", BACK))
    assert sentences(job) == [
        "rank 1 is live",
        "rank 1 is exited",
        "rank 1 is live",
        "rank 1 lives again, as pid 9",
    ]


@pytest.mark.parametrize(
    ("status", "worker"), [("FAILED", GONE), ("RUNNING", {**GONE, "state": "finished"})]
)
def test_nobody_waits_for_what_does_not_come_back(status: str, worker: dict[str, Any]) -> None:
    told = sentences(Job((status, worker)))
    assert told[1:] == ["rank 1 does not come back: it is done, or its job is over"]


def test_after_a_minute_it_is_said_that_it_is_not_back() -> None:
    told = sentences(Job(("RECOVERING", GONE)))
    assert told[-1] == "not back: rank 1 is not back after 60 s"
    assert len(told) - 1 <= PATIENCE_SECONDS / LOOK_SECONDS + 1


def test_of_a_process_that_does_not_end_it_is_said_soon_and_why_after_a_minute() -> None:
    *_, last = told = sentences(Job(("RUNNING", BEFORE)))
    assert last == "not back: rank 1 (pid 7) has not ended: it trains on"
    assert told.count("rank 1 (pid 7) has not ended yet") == 1
    looks_before = told.index("rank 1 (pid 7) has not ended yet")
    assert looks_before == pytest.approx(SILENCE_SECONDS / LOOK_SECONDS, abs=2)


def test_what_ends_late_is_said_to_have_come_back_all_the_same() -> None:
    looks = int(2 * SILENCE_SECONDS / LOOK_SECONDS)
    told = sentences(Job(*looks * [("RUNNING", BEFORE)], ("RECOVERING", GONE), ("RUNNING", BACK)))
    assert "rank 1 (pid 7) has not ended yet" in told
    assert told[-1] == "rank 1 lives again, as pid 9"
