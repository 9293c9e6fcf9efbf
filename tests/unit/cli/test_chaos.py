"""A fault meets the rank that was named, or nobody."""

import os
import platform
import signal
import subprocess
from collections.abc import Iterator

import pytest
from summaries import job, rank
from typer import BadParameter

from cli.chaos import FaultRefused, NothingRuns, fault_named, process_of
from muster.client.views import WorkerView
from muster.contracts.environ import MARK
from muster.processes import send_signal

JOB = job(job_uid="uid")


def worker(**said: object) -> WorkerView:
    return rank(**{"pid": None, "node": platform.node(), **said})


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the mark of rank 0."""
    mark = {MARK: "uid/0/3"}
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **mark}) as process:  # noqa: S607
        yield process
        process.kill()


def test_a_rank_is_found_by_its_pid_and_proved_by_its_mark(
    process: subprocess.Popen[bytes],
) -> None:
    record = process_of(JOB, [worker(pid=process.pid)], 0)
    assert record.pid == process.pid
    assert send_signal(record, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("said", "word"),
    [
        pytest.param({}, "no process", id="a rank between two processes"),
        pytest.param({"pid": 1, "node": "elsewhere"}, "runs on elsewhere", id="another machine"),
        pytest.param({"pid": 1}, "mark", id="a pid that is somebody else's by now"),
        pytest.param({"pid": 2**22 + 1}, "mark", id="a pid that nobody has"),
    ],
)
def test_what_is_not_certain_is_refused(said: dict[str, object], word: str) -> None:
    with pytest.raises(FaultRefused, match=word):
        process_of(JOB, [worker(**said)], 0)


def test_a_fault_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadParameter, match="'freeze' is none of kill, stop, term"):
        fault_named("freeze")


def test_the_mark_of_another_rank_or_job_is_not_enough(process: subprocess.Popen[bytes]) -> None:
    ranks = [worker(pid=process.pid, rank=number) for number in range(2)]
    with pytest.raises(FaultRefused, match="mark of rank 1"):
        process_of(JOB, ranks, 1)
    with pytest.raises(FaultRefused, match="mark of rank 0"):
        process_of(job(job_uid="u"), ranks, 0)
    assert process.poll() is None


def test_a_job_that_is_over_and_a_rank_that_is_not_there_are_refused() -> None:
    with pytest.raises(NothingRuns, match="is COMPLETED"):
        process_of(job(status="COMPLETED"), [worker()], 0)
    with pytest.raises(FaultRefused, match="has no rank 7"):
        process_of(JOB, [worker()], 7)
    with pytest.raises(FaultRefused, match="ranks 0 to 1, choose with --rank"):
        process_of(JOB, [worker(), worker(rank=1)], 7)
