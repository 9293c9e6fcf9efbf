"""Ends without an exit status, and processes that could not be started: class and budget."""

from collections.abc import Callable

import pytest

from coordinator.decide.state import AGENT_FAILURES_LIMIT, AgentState
from muster.contracts.job import JobStatus, Reason
from muster.contracts.messages import Orphaned, RankSaid
from muster.contracts.retry import RetryClass
from tests.support.stories import Story, starts

Find = Callable[[Story], Story]


def has_another_agent(story: Story) -> Story:
    story.plans()
    while story.job.agent is AgentState.ABSENT:
        story.passes(1).plans()
    return story.agent_connects()


def found_by_the_next_agent(story: Story) -> Story:
    return has_another_agent(story.agent_is_lost(living=[0, 1])).is_ended(1)


def found_by_a_takeover(story: Story) -> Story:
    return has_another_agent(story.agent_is_lost(living=[0]))


FINDERS = pytest.mark.parametrize("is_found", [found_by_the_next_agent, found_by_a_takeover])


@FINDERS
@pytest.mark.parametrize("is_stopping", [False, True])
def test_an_unobserved_end_is_infrastructure(is_found: Find, is_stopping: bool) -> None:  # noqa: FBT001  both are true
    story = Story.running(world_size=2, max_restarts=0, max_preemptions=0)
    rank = is_found(story.beats(1, step=3, stopping=is_stopping)).rank(1)
    assert rank.endings == {RetryClass.INFRASTRUCTURE: 1}
    assert rank.ending.reason is Reason.AGENT_LOST
    assert rank.restarts == 0
    assert story.job.failure is None
    assert story.rank(0).is_alive
    assert starts(story.passes(1).plans()) == [1]


@FINDERS
def test_unobserved_ends_without_progress_fail_the_job(is_found: Find) -> None:
    story = Story.running(world_size=2, max_fruitless=3)
    for _ in range(2):
        is_found(story).comes_back(1).is_spawned(1)
    assert story.job.failure is None
    assert is_found(story).job.failure.reason is Reason.NO_PROGRESS
    assert "and has failed 3 times in a row without a new checkpoint" in story.job.failure.message
    story.plans()
    assert story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


@FINDERS
def test_a_new_checkpoint_resets_unobserved_ends(is_found: Find) -> None:
    story = Story.running(world_size=2, max_fruitless=2)
    for saved in (5, 10, 15, 20):
        story.beats(1, step=saved, last_checkpoint_step=saved)
        is_found(story).comes_back(1).is_spawned(1)
    assert story.job.failure is None


@FINDERS
def test_an_unobserved_end_on_request_does_not_count(is_found: Find) -> None:
    story = Story.running(world_size=2, max_fruitless=1)
    asked = Orphaned(by="its agent (no coordinator for 60 s)")
    is_found(story.observes(RankSaid(rank=1, incarnation=0, message=asked)))
    assert story.rank(1).endings == {RetryClass.INFRASTRUCTURE: 1}
    assert (story.rank(1).fruitless, story.job.failure) == (0, None)


def test_an_unobserved_end_of_a_silent_rank_is_a_hang() -> None:
    story = Story.running(world_size=1).passes(10)
    story.plans()
    assert story.is_ended(0).rank(0).endings == {RetryClass.HANG: 1}


def test_an_agent_that_dies_first_counts_for_itself() -> None:
    story = Story.starting(world_size=1, max_fruitless=1)
    for _ in range(AGENT_FAILURES_LIMIT):
        has_another_agent(story.agent_is_lost()).plans()
        assert story.job.failure is None
    assert story.agent_is_lost().job.failure.reason is Reason.AGENT_LOST


NO_PROCESS = "cannot be started in /work: [Errno 11] Resource temporarily unavailable"


def is_started_again(story: Story, rank: int) -> None:
    while not story.rank(rank).is_alive:
        story.passes(1).plans()


def test_a_failed_start_is_repeated_with_its_reason() -> None:
    story = Story.running(world_size=2, max_restarts=1).dies(1)
    is_started_again(story, 1)
    story.is_ended(1, unstarted=NO_PROCESS).plans()
    rank = story.rank(1)
    assert rank.endings == {RetryClass.CRASH: 1, RetryClass.INFRASTRUCTURE: 1}
    assert (rank.ending.reason, rank.ending.message) == (Reason.HOST_EXHAUSTED, NO_PROCESS)
    assert rank.restarts == 1, "that of the crash"
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message == f"rank 1 {NO_PROCESS}; it is started again"
    assert story.rank(0).is_alive
    assert starts(story.plans()) == [], "there is a wait"
    story.comes_back(1).plans()
    assert story.job.status is JobStatus.RUNNING


def test_starts_that_always_fail_fail_the_job() -> None:
    story = Story.starting(world_size=1, max_fruitless=3)
    for _ in range(3):
        assert story.job.failure is None
        is_started_again(story, 0)
        story.is_ended(0, unstarted=NO_PROCESS)
    assert story.job.failure.reason is Reason.NO_PROGRESS
    assert story.job.failure.message == (
        f"rank 0 {NO_PROCESS} and has failed 3 times in a row without a new checkpoint"
    )
