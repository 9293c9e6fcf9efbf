"""What a fault causes is reported, and how long it took."""

from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, cast

import pytest

from cli.checks import chaos
from cli.checks.chaos import recovery_of, watch
from muster.client import Job
from muster.contracts.errors import MusterError
from muster.contracts.views.history import EventView, StruckProcess
from muster.contracts.views.job import MemberView, SummaryView
from tests.support.summaries import RANK, summary

STRUCK = datetime(2026, 3, 1, tzinfo=UTC)
BEFORE = {**RANK, "rank": 1}
GONE = {**BEFORE, "process": "exited", "pid": None}
BACK = {**BEFORE, "attempt": 1, "pid": 9}


class FakeJob:
    """A job whose state moves on with every look at it."""

    id = "job-1"

    def __init__(self, *looks: tuple[str, dict[str, Any]]) -> None:
        self._looks = iter(looks)
        self._last = looks[-1]
        self._events = [event("the job was submitted", 1)]

    def events(self, *, after: int) -> list[EventView]:
        return self._events[after:]

    def summary(self) -> SummaryView:
        status, worker = next(self._looks, self._last)
        number = len(self._events) + 1
        self._events.append(event(f"rank 1 is {worker['process']}", number))
        return summary(status=status, workers=[RANK, worker])


def event(message: str, number: int) -> EventView:
    kind = "fault_dropped" if message == "rank 1 is waiting" else "k"
    return EventView(at=STRUCK, kind=kind, message=message, rank=1, event_id=number)


@pytest.fixture(autouse=True)
def _fake_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now[0]

        @staticmethod
        def sleep(seconds: float) -> None:
            now[0] += seconds

    monkeypatch.setattr(chaos, "time", Clock)


def messages(fake: FakeJob) -> list[str]:
    found = []
    watching = watch(cast("Job", fake), [StruckProcess(rank=1, attempt=0, pid=7)], newest=1)
    try:
        found.extend(watching)
    except MusterError as error:
        found.append(f"not back: {error}")
    return found


def test_events_are_shown_until_the_rank_runs_again() -> None:
    fake = FakeJob(("RUNNING", BEFORE), ("RECOVERING", GONE), ("RUNNING", BACK))
    assert messages(fake) == [
        "rank 1 is live",
        "rank 1 is exited",
        "rank 1 is live",
        "rank 1 runs again, as pid 9",
    ]


@pytest.mark.parametrize(
    ("looks", "outcome"),
    [
        ([*[("RUNNING", BEFORE)] * 100, ("RUNNING", BACK)], "rank 1 runs again, as pid 9"),
        ([("FAILED", GONE)], "rank 1 is not replaced: job-1 is FAILED"),
        ([("RUNNING", {**GONE, "process": "finished"})], "rank 1 is not replaced: it is finished"),
        ([("RECOVERING", GONE)], "not back: rank 1 has not been replaced within 60 s"),
        ([("RUNNING", BEFORE)], "not back: rank 1 has not been replaced within 60 s"),
        ([("RUNNING", {**GONE, "process": "waiting"})], "not back: nothing was struck"),
    ],
    ids=["it ends late", "failed", "finished", "not replaced in time", "it survives", "dropped"],
)
def test_the_outcome_is_reported_last(
    looks: list[tuple[str, dict[str, Any]]], outcome: str
) -> None:
    found = messages(FakeJob(*looks))
    assert found[-1].startswith(outcome)
    assert len(found) - 1 <= chaos.WAIT_SECONDS / chaos.POLL_SECONDS + 1


SENT, EXIT, READY = ("fault_injected", 1, 3), ("rank_exited", 1, 3), ("rank_ready", 1, 4)
GROUP, STEP = ("group_announced", None, None), ("step_taken", None, None)


@pytest.mark.parametrize(
    ("told", "is_member", "milliseconds"),
    [
        ([GROUP, SENT, EXIT, STEP, GROUP, STEP, READY, GROUP, STEP], True, [10, 40, 50]),
        ([SENT, GROUP, EXIT, READY, GROUP, STEP], False, [20, None, 30]),
        ([SENT, GROUP, ("rank_killed", 1, 3), GROUP], True, [20, None, None]),
        ([SENT, ("rank_exited", 0, 3), ("rank_ready", 0, 4), EXIT], True, [30, None, None]),
        ([("fault_injected", 1, 2), GROUP, EXIT, READY], True, [None, None, None]),
    ],
    ids=["all", "no member of the group yet", "not over", "another rank in between", "not struck"],
)
def test_times_of_a_recovery_are_those_of_its_events(
    told: list[tuple[str, int | None, int | None]],
    is_member: bool,  # noqa: FBT001  a table's column
    milliseconds: list[int | None],
) -> None:
    ats = (STRUCK + timedelta(milliseconds=10 * number) for number in count())
    events = [
        EventView(at=at, kind=kind, message="", rank=rank, attempt=attempt)
        for at, (kind, rank, attempt) in zip(ats, told, strict=False)
    ]
    joined = [5, 5, 5, 5 if is_member else None]
    struck = StruckProcess(rank=1, attempt=3, pid=7)
    members = [member(attempt, step) for attempt, step in enumerate(joined)]
    assert recovery_of(struck, events, members) == milliseconds


def member(attempt: int, joined_step: int | None) -> MemberView:
    return MemberView(
        worker_id="",
        rank=1,
        state="failed",
        attempt=attempt,
        process=None,
        pid=None,
        node=None,
        gpu_count=0,
        backend=None,
        joined_at=None,
        joined_step=joined_step,
        last_heartbeat_age_seconds=None,
        step=None,
    )
