"""Retry classes of exits, what they cost, and when the job fails."""

from collections.abc import Mapping
from typing import Any

import pytest

from coordinator.decide.actions import Terminate
from coordinator.decide.classify_exit import SIGKILL, SIGTERM
from muster.contracts.job import JobStatus, Reason
from muster.contracts.messages import Executing, Orphaned, Raised
from muster.contracts.retry import DO_NOT_RETRY_CODE, RETRIES, RetryClass
from muster.contracts.spec import LIMITS
from tests.support.stories import Story, starts

CRASH, HANG, MEMORY = RetryClass.CRASH, RetryClass.HANG, RetryClass.OUT_OF_MEMORY
PREEMPTION = RetryClass.PREEMPTION
TRACEBACK = ["Traceback (most recent call last):", "MemoryError: Unable to allocate 9 PiB", ""]


# Classes


@pytest.mark.parametrize(
    ("end", "kind", "reason"),
    [
        ({"code": 1}, CRASH, Reason.WORKER_EXITED),
        ({"signal": SIGKILL}, CRASH, Reason.WORKER_EXITED),
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
    assert rank.endings == {kind: 1}


@pytest.mark.parametrize("end", [{"code": 0}, {"code": 1}, {"signal": SIGKILL}])
def test_a_stop_from_outside_is_a_preemption(end: Mapping[str, Any]) -> None:
    story = Story.running(world_size=1, max_restarts=0, max_fruitless=1)
    story.beats(0, step=3, stopping=True).is_ended(0, **end).plans()
    assert story.rank(0).endings == {PREEMPTION: 1}
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message is not None
    assert story.job.message.startswith("rank 0 was asked to stop by another process and ")
    assert (story.rank(0).restarts, story.rank(0).fruitless) == (0, 0)
    assert starts(story.passes(1).plans()) == [0]


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
    assert story.rank(0).endings == {RetryClass.INFRASTRUCTURE: 1}
    assert (story.rank(0).restarts, story.rank(0).fruitless) == (0, 0)
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message is not None
    asked = "rank 0 was asked to stop by its agent (no coordinator for 300 s) and "
    assert story.job.message.startswith(asked)
    assert starts(story.passes(1).plans()) == [0]


def test_a_rank_killed_for_silence_has_hung() -> None:
    story = Story.running(world_size=1).beats(0, stopping=True).passes(10)
    story.plans()
    assert story.dies(0).rank(0).endings == {HANG: 1}
    assert story.rank(0).ending.reason is Reason.HEARTBEAT_TIMEOUT
    assert story.rank(0).ending.message == "sent no heartbeat for 10 s and was killed"


def test_ends_of_a_stopping_job_are_no_failures() -> None:
    story = Story.running(world_size=2).is_stopped()
    story.plans()
    story.exits(0).is_ended(1, signal=SIGTERM).plans()
    assert [rank.endings for rank in story.job.ranks] == 2 * [{RetryClass.STOPPED: 1}]
    assert story.rank(0).ending.reason is Reason.STOPPED_BY_USER


def test_a_permanent_error_is_the_reason_of_the_exit() -> None:
    story = (
        Story.running(world_size=2).refuses(1, Reason.INVALID_DATASET, "no data").exits(1, code=1)
    )
    ending = story.rank(1).ending
    assert ending.retry_class is RetryClass.INVALID_PROGRAM
    assert (ending.reason, ending.message) == (Reason.INVALID_DATASET, "no data")
    story.plans()
    assert story.dies(0).rank(0).endings == {RetryClass.STOPPED: 1}


@pytest.mark.parametrize("end", [{"code": 3}, {"signal": 6}])
def test_a_written_error_report_explains_the_exit(
    end: Mapping[str, Any],
) -> None:
    written = "ValueError: no\x1b such optimizer\nand more"
    story = Story.running(world_size=1).is_ended(0, **end, lines=["[rank0] end"], error=written)
    assert story.rank(0).ending.message.endswith(" (ValueError: no  such optimizer)")
    assert story.rank(0).endings == {RetryClass.CRASH: 1}


def test_a_reported_memory_error_is_out_of_memory() -> None:
    written = "OutOfMemoryError: CUDA out of memory"
    story = Story.running(world_size=1).is_ended(0, code=1, lines=["bye"], error=written)
    assert story.rank(0).endings == {RetryClass.OUT_OF_MEMORY: 1}


def test_a_rank_lost_with_its_agent_costs_no_restart() -> None:
    story = Story.running(world_size=2, max_restarts=0).agent_is_lost()
    assert [rank.endings for rank in story.job.ranks] == 2 * [{RetryClass.INFRASTRUCTURE: 1}]
    assert story.job.failure is None


def test_a_removed_rank_returns_without_a_restart() -> None:
    story = Story.training(world_size=2, max_restarts=0).takes(Terminate(rank=1)).exits(1)
    assert story.rank(1).endings == {RetryClass.STOPPED: 1}
    assert story.job.failure is None
    assert starts(story.runs_for(2)) == [1]


# Budgets


@pytest.mark.parametrize(
    ("budget", "end"),
    [
        ("max_restarts", {"code": 3}),
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


def test_hangs_have_their_own_budget() -> None:
    story = Story.running(world_size=1, max_restarts=0, max_hangs=1)
    for _ in range(2):
        story.passes(10).plans()
        story.dies(0)
        if story.job.failure is None:
            story.wakes()
            story.says_hello(0)
    assert story.job.failure.message == (
        "rank 0 sent no heartbeat for 10 s and was killed and has used its one restart after a hang"
        "; its log is empty"
    )


def test_every_budget_is_a_field_with_limits() -> None:
    assert {retry.budget for retry in RETRIES.values()} <= set(LIMITS)


def test_the_do_not_retry_code_fails_at_once() -> None:
    story = Story.running(world_size=2).exits(1, code=DO_NOT_RETRY_CODE, lines=["bad arguments"])
    story.plans()
    story.dies(0).plans()
    assert (story.job.status, story.job.reason) == (JobStatus.FAILED, Reason.DO_NOT_RETRY)
    assert story.job.message == (
        "rank 1 exited with code 64 and is not to be started again; the last lines of its log:"
        "\n  bad arguments"
    )
    assert story.job.failure.exit_code == DO_NOT_RETRY_CODE


# No progress


def test_failures_without_a_new_checkpoint_fail_the_job() -> None:
    story = Story.running(world_size=2)
    for _ in range(4):
        story.exits(1, code=1, lines=["NameError: x"]).comes_back(1)
    assert story.job.failure is None
    story.exits(1, code=1, lines=["NameError: x"])
    assert story.job.failure.reason is Reason.NO_PROGRESS
    assert story.job.failure.message == (
        "rank 1 exited with code 1 and has failed 5 times in a row without a new checkpoint; "
        "the last lines of its log:\n  NameError: x"
    )


def test_only_a_new_checkpoint_resets_the_failures() -> None:
    story = Story.running(world_size=1, max_fruitless=3)
    counted = []
    for saved in (None, 5, 5, 10, 10):
        story.beats(0, step=7, last_checkpoint_step=saved).exits(0, code=1)
        counted.append(story.rank(0).fruitless)
        story.comes_back(0)
    assert counted == [1, 0, 1, 0, 1]


def test_in_a_group_any_checkpoint_is_progress() -> None:
    story = Story.training(world_size=2, max_fruitless=2)
    story.exits(1, code=1)
    assert story.rank(1).fruitless == 1
    story.comes_back(1).beats(0, step=9, last_checkpoint_step=5)
    assert story.exits(1, code=1).rank(1).fruitless == 0


def test_a_sigkill_from_outside_is_not_the_programs_failure() -> None:
    story = Story.running(world_size=1, max_fruitless=1).dies(0)
    assert (story.rank(0).restarts, story.rank(0).fruitless) == (1, 0)
    assert story.job.failure is None


def test_a_minute_alive_is_progress_without_checkpoints() -> None:
    story = Story.starting(world_size=1, max_fruitless=2)
    for seconds, fruitless in ((59, 1), (60, 0), (1, 1)):
        story.rank_says(0, Executing()).passes(seconds).exits(0, code=1).plans()
        assert story.rank(0).fruitless == fruitless
        story.passes(31).plans()


# Errors that recur


def test_the_same_error_at_the_same_step_fails_the_job() -> None:
    story = Story.training(world_size=1).fails_in_step(0, 7)
    story.comes_back(0).fails_in_step(0, 7).plans()
    assert story.rank(0).restarts == 1, "the second one costs nothing"
    assert story.rank(0).ending.retry_class is RetryClass.INVALID_PROGRAM
    assert (story.job.status, story.job.reason) == (JobStatus.FAILED, Reason.INVALID_PROGRAM)
    assert story.job.message == "rank 0: update() failed, and so did its process before this one"


def test_the_same_error_in_another_rank_fails_the_job() -> None:
    story = Story.training(world_size=2).fails_in_step(0, 7).fails_in_step(1, 7)
    assert story.job.failure.reason is Reason.INVALID_PROGRAM
    assert [rank.ending.retry_class for rank in story.job.ranks] == [
        CRASH,
        RetryClass.INVALID_PROGRAM,
    ]


@pytest.mark.parametrize("is_back", [False, True])
def test_the_message_names_the_first_rank_with_the_error(is_back: bool) -> None:  # noqa: FBT001  both are true
    story = Story.training(world_size=2).fails_in_step(0, 7)
    if is_back:
        story.comes_back(0)
    story.fails_in_step(1, 7)
    assert story.job.failure.message == "rank 1: update() failed, and so did rank 0"


@pytest.mark.parametrize(("step", "message"), [(8, "update() failed"), (7, "gradient() failed")])
def test_another_error_or_step_does_not_fail_the_job(step: int, message: str) -> None:
    story = Story.training(world_size=1).fails_in_step(0, 7)
    assert story.comes_back(0).fails_in_step(0, step, message).job.failure is None


def test_a_repeated_report_of_an_error_counts_once() -> None:
    story = Story.training(world_size=1)
    for _ in range(2):
        story.rank_says(0, Raised(step=7, message="update() failed"))
    assert story.job.failure is None
