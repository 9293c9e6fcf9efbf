"""Retry classes of exits, what they cost, and when the job fails."""

from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.decide.classify_exit import SIGKILL, SIGTERM
from muster.contracts.job.limits import LIMITS
from muster.contracts.job.retry import DO_NOT_RETRY_CODE, RETRIES, RetryClass
from muster.contracts.job.status import JobStatus, Reason
from muster.contracts.messages.rank import Orphaned
from tests.support.stories import Story, starts

CRASH, HANG, MEMORY = RetryClass.CRASH, RetryClass.HANG, RetryClass.OUT_OF_MEMORY
PREEMPTION = RetryClass.PREEMPTION
TRACEBACK = ["Traceback (most recent call last):", "MemoryError: Unable to allocate 9 PiB", ""]


# Classes


@pytest.mark.parametrize(
    ("end", "kind", "reason"),
    [
        ({"code": 1}, CRASH, Reason.WORKER_EXITED),
        ({"signal": SIGKILL}, RetryClass.KILLED, Reason.WORKER_EXITED),
        ({"signal": 11}, CRASH, Reason.WORKER_EXITED),
        ({"code": 126}, CRASH, Reason.WORKER_EXITED),
        ({"code": 1, "lines": ["no MemoryError: at all"]}, CRASH, Reason.WORKER_EXITED),
        ({"signal": SIGTERM}, PREEMPTION, Reason.PREEMPTED),
        ({"code": 143}, PREEMPTION, Reason.PREEMPTED),
        ({"signal": SIGKILL, "out_of_memory": True}, MEMORY, Reason.OUT_OF_MEMORY),
        ({"code": 137}, CRASH, Reason.WORKER_EXITED),
        ({"code": 137, "out_of_memory": True}, MEMORY, Reason.OUT_OF_MEMORY),
        ({"code": 1, "lines": TRACEBACK}, MEMORY, Reason.OUT_OF_MEMORY),
        ({"code": 1, "lines": ["torch.OutOfMemoryError: CUDA"]}, MEMORY, Reason.OUT_OF_MEMORY),
        ({"code": DO_NOT_RETRY_CODE}, RetryClass.DO_NOT_RETRY, Reason.DO_NOT_RETRY),
        ({"code": 0}, RetryClass.FINISHED, None),
    ],
)
def test_an_exit_is_classified_by_its_status(
    end: Mapping[str, Any], kind: RetryClass, reason: Reason | None
) -> None:
    rank = Story.running(world_size=2).is_ended(1, **end).rank(1)
    assert rank.ending is not None
    assert (rank.ending.retry_class, rank.ending.reason) == (kind, reason)
    assert rank.budget.endings == {kind: 1}


@pytest.mark.parametrize("end", [{"code": 0}, {"code": 1}, {"signal": SIGKILL}])
def test_a_stop_from_outside_is_a_preemption(end: Mapping[str, Any]) -> None:
    story = Story.running(world_size=1, max_restarts=0, max_fruitless=1)
    planned = story.beats(0, step=3, stopping=True).is_ended(0, **end).plans()
    assert story.rank(0).budget.endings == {PREEMPTION: 1}
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message is not None
    assert story.job.message.startswith("rank 0 was asked to stop by another process and ")
    assert (story.rank(0).budget.restarts, story.rank(0).budget.fruitless) == (0, 0)
    assert starts(planned) == [0]


@pytest.mark.parametrize("end", [{"code": 0}, {"code": 1}, {"code": 143}, {"signal": SIGTERM}])
@pytest.mark.parametrize("is_stopping", [False, True])
def test_a_stop_by_an_orphaned_agent_is_no_preemption(
    end: Mapping[str, Any],
    is_stopping: bool,  # noqa: FBT001  both are true
) -> None:
    story = Story.running(world_size=1, max_restarts=0, max_preemptions=0, max_fruitless=1)
    story.beats(0, step=3, stopping=is_stopping)
    story.rank_says(0, Orphaned(by="its agent (no coordinator for 300 s)"))
    story.is_ended(0, **end).plans()
    assert story.rank(0).budget.endings == {RetryClass.INFRASTRUCTURE: 1}
    assert (story.rank(0).budget.restarts, story.rank(0).budget.fruitless) == (0, 0)
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message is not None
    asked = "rank 0 was asked to stop by its agent (no coordinator for 300 s) and "
    assert story.job.message.startswith(asked)
    assert starts(story.passes(1).plans()) == [0]


# Budgets


@pytest.mark.parametrize(
    ("end", "is_believed"),
    [
        ({"code": 1, "lines": ["ModuleNotFoundError: No module named 'torch'"]}, True),
        ({"code": 1, "lines": ["SyntaxError: invalid syntax"]}, True),
        ({"code": 1, "error": "ImportError: cannot import name"}, True),
        ({"code": 1, "lines": ["[rank2]: NameError: name 'prin' is not defined"]}, True),
        ({"code": 1, "lines": ["NameError: x", "an exit handler prints"]}, True),
        ({"code": 1, "lines": ["/usr/bin/python: No module named nope"]}, True),
        ({"code": 2, "lines": ["a.py: error: unrecognized arguments: -x"]}, True),
        ({"code": 2, "lines": ["cp: cannot stat"]}, False),
        ({"code": 1, "lines": ["ConnectionRefusedError: store"]}, False),
        ({"signal": SIGKILL, "lines": ["NameError: x"]}, False),
    ],
)
def test_a_mistake_in_the_program_is_restarted_once(
    end: Mapping[str, Any],
    is_believed: bool,  # noqa: FBT001  a table's column
) -> None:
    story = Story.commands(world_size=1)
    story.is_ended(0, **end).passes(1).plans()
    warning = "it is started again, and a second failure like this ends the job"
    assert (story.job.message or "").endswith(warning) is is_believed
    story.executes(0)
    assert story.job.failure is None
    story.is_ended(0, **end)
    assert (story.job.failure is not None) is is_believed
    if story.job.failure is not None:
        assert story.job.failure.reason is Reason.INVALID_PROGRAM


def test_a_mistake_after_work_is_like_any_error() -> None:
    end: Mapping[str, Any] = {"code": 1, "lines": ["ImportError: libcuda.so.1"]}
    story = Story.commands(world_size=1)
    story.passes(60).is_ended(0, signal=SIGKILL).passes(1).plans()
    for _ in range(2):
        story.executes(0).is_ended(0, **end).passes(10).plans()
        assert "a second failure" not in (story.job.message or "")
    assert story.job.failure is None


@pytest.mark.parametrize(
    ("budget", "end"),
    [
        ("max_restarts", {"code": 3}),
        ("max_kills", {"signal": SIGKILL}),
        ("max_out_of_memory", {"code": 137, "out_of_memory": True}),
        ("max_preemptions", {"code": 143}),
    ],
)
def test_each_retry_class_has_its_own_budget(budget: str, end: Mapping[str, Any]) -> None:
    others = {retry.budget: 0 for retry in RETRIES.values()}
    story = Story.running(world_size=1, **{**others, budget: 2, "max_fruitless": 99})
    for _ in range(2):
        story.is_ended(0, **end).comes_back(0)
    assert story.job.failure is None
    story.is_ended(0, **end)
    assert story.job.failure.reason is Reason.RESTART_LIMIT
    assert " and has used its 2 restarts" in story.job.failure.message


def test_every_budget_is_a_field_with_limits() -> None:
    assert {retry.budget for retry in RETRIES.values()} <= set(LIMITS)


# No progress


# Errors that recur
