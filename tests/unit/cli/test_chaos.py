"""A fault hits the rank that was named, or no process; what it causes is reported."""

import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import count
from subprocess import PIPE
from typing import Any, cast

import pytest

from cli import chaos
from cli.chaos import Strike, recovery_of, strike, targets, watch
from cli.errors import Misuse, WrongState
from muster.client import Job
from muster.contracts.environ import PROCESS_TAG
from muster.contracts.errors import MusterError
from muster.contracts.views import EventView, MemberView, SummaryView, WorkerView
from tests.support.summaries import RANK, job, rank, summary

JOB = job(job_uid="uid")


def worker(**fields: object) -> WorkerView:
    return rank(**{"pid": None, "node": platform.node(), **fields})


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the tag of rank 0."""
    environ = {**os.environ, PROCESS_TAG: "uid/0/3"}
    script = "echo; read line"
    with subprocess.Popen(["sh", "-c", script], env=environ, stdin=PIPE, stdout=PIPE) as process:  # noqa: S607
        assert process.stdout is not None
        process.stdout.readline()  # until then /proc may show no environment
        yield process
        process.kill()


def test_process_is_found_by_pid_and_proved_by_tag(process: subprocess.Popen[bytes]) -> None:
    assert strike(JOB, [worker(pid=process.pid)], 0, signal.SIGKILL).pid == process.pid
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        pytest.param({}, "no process", id="between two processes"),
        pytest.param({"pid": 1, "node": "elsewhere"}, "runs on elsewhere", id="another machine"),
        pytest.param({"pid": 1}, "tag", id="the pid of another process"),
        pytest.param({"pid": 2**22 + 1}, "tag", id="an unused pid"),
    ],
)
def test_uncertain_process_is_refused(fields: dict[str, object], word: str) -> None:
    with pytest.raises(MusterError, match=word):
        strike(JOB, [worker(**fields)], 0, signal.SIGKILL)


def test_tag_of_another_rank_or_job_is_refused(process: subprocess.Popen[bytes]) -> None:
    ranks = [worker(pid=process.pid, rank=number) for number in range(2)]
    with pytest.raises(MusterError, match="tag of rank 1"):
        strike(JOB, ranks, 1, signal.SIGKILL)
    with pytest.raises(MusterError, match="tag of rank 0"):
        strike(job(job_uid="u"), ranks, 0, signal.SIGKILL)
    assert process.poll() is None


def test_ended_job_and_missing_rank_are_refused() -> None:
    with pytest.raises(WrongState, match="is COMPLETED"):
        strike(job(status="COMPLETED"), [worker()], 0, signal.SIGKILL)
    with pytest.raises(Misuse, match="has no rank 7: choose 0 to 1 with --rank"):
        strike(JOB, [worker(), worker(rank=1)], 7, signal.SIGKILL)


STRUCK = datetime(2026, 3, 1, tzinfo=UTC)
BEFORE = {**RANK, "rank": 1, "worker_id": "1.0"}
GONE = {**BEFORE, "state": "exited", "pid": None}
BACK = {**BEFORE, "worker_id": "1.1", "pid": 9}


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
        self._events.append(event(f"rank 1 is {worker['state']}", number))
        return summary(status=status, workers=[RANK, worker])


def event(message: str, number: int) -> EventView:
    return EventView(at=STRUCK, kind="k", message=message, rank=1, event_id=number)


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
    watching = watch(cast("Job", fake), Strike(1, 0, 7, STRUCK), newest=1)
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
        ([("RUNNING", {**GONE, "state": "finished"})], "rank 1 is not replaced: it is finished"),
        ([("RECOVERING", GONE)], "not back: rank 1 has not been replaced within 60 s"),
        ([("RUNNING", BEFORE)], "not back: rank 1 has not been replaced within 60 s"),
    ],
    ids=["it ends late", "failed", "finished", "not replaced in time", "it survives"],
)
def test_the_outcome_is_reported_last(
    looks: list[tuple[str, dict[str, Any]]], outcome: str
) -> None:
    found = messages(FakeJob(*looks))
    assert found[-1].startswith(outcome)
    assert len(found) - 1 <= chaos.WAIT_SECONDS / chaos.POLL_SECONDS + 1


EXIT, READY = ("rank_exited", 1, 3), ("rank_ready", 1, 4)
GROUP, STEP = ("group_announced", None, None), ("step_taken", None, None)


@pytest.mark.parametrize(
    ("told", "is_member", "milliseconds"),
    [
        ([GROUP, EXIT, STEP, GROUP, STEP, READY, GROUP, STEP], True, [10, 40, 50]),
        ([GROUP, EXIT, READY, GROUP, STEP], False, [10, None, 20]),
        ([GROUP, ("rank_killed", 1, 3), GROUP], True, [10, None, None]),
        ([GROUP, ("rank_exited", 0, 3), ("rank_ready", 0, 4), EXIT], True, [30, None, None]),
    ],
    ids=["all", "no member of the group yet", "not over", "another rank in between"],
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
    assert recovery_of(Strike(1, 3, 7, STRUCK), events, list(map(member, joined))) == milliseconds


def test_only_live_ranks_of_this_host_are_targets() -> None:
    here = worker(pid=1, state="live")
    other = worker(pid=1, rank=1, state="live", node="elsewhere")
    ended = worker(rank=2, state="exited")
    assert targets([here, other, ended], None) == ([here], {1: "elsewhere"})
    assert targets([here, other], 1) == ([], {1: "elsewhere"})


def member(joined_step: int | None) -> MemberView:
    return MemberView(
        worker_id="",
        rank=1,
        state="failed",
        pid=None,
        node=None,
        gpu_count=0,
        backend=None,
        joined_at=None,
        joined_step=joined_step,
        last_heartbeat_age_seconds=None,
        step=None,
    )
