"""An end that nobody saw is of one class, whoever finds out that the process is gone.

So is that of a process which its host could not even start.
"""

from collections.abc import Callable

import pytest
from stories import Story, starts

from coordinator.snapshot import AGENT_FAILURES_LIMIT, AgentState
from muster.contracts.endings import RetryClass
from muster.contracts.job import JobStatus, Reason
from muster.contracts.messages import Orphaned, RankSaid

Find = Callable[[Story], Story]


def has_another_agent(story: Story) -> Story:
    story.plans()
    while story.job.agent is AgentState.ABSENT:
        story.passes(1).plans()
    return story.agent_joins()


def found_by_the_next_agent(story: Story) -> Story:
    return has_another_agent(story.agent_is_lost(living=[0, 1])).is_ended(1)


def found_by_a_takeover(story: Story) -> Story:
    return has_another_agent(story.agent_is_lost(living=[0]))


FINDERS = pytest.mark.parametrize("is_found", [found_by_the_next_agent, found_by_a_takeover])


@FINDERS
@pytest.mark.parametrize("is_stopping", [False, True])
def test_it_is_infrastructure_and_no_restart(is_found: Find, is_stopping: bool) -> None:  # noqa: FBT001  both are true
    story = Story.running(world_size=2, max_restarts=0, max_preemptions=0)
    rank = is_found(story.beats(1, step=3, stopping=is_stopping)).rank(1)
    assert rank.endings == {RetryClass.INFRASTRUCTURE: 1}
    assert rank.ending.reason is Reason.AGENT_LOST
    assert rank.restarts == 0
    assert story.job.verdict is None
    assert story.rank(0).is_alive
    assert starts(story.passes(1).plans()) == [1]


@FINDERS
def test_one_that_ends_like_this_for_ever_is_given_up(is_found: Find) -> None:
    story = Story.running(world_size=2, max_fruitless=3)
    for _ in range(2):
        is_found(story).comes_back(1).is_spawned(1)
    assert story.job.verdict is None
    assert is_found(story).job.verdict.reason is Reason.NO_PROGRESS
    assert "and has failed 3 times in a row without a new checkpoint" in story.job.verdict.message
    story.plans()
    assert story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


@FINDERS
def test_a_new_checkpoint_forgives_it(is_found: Find) -> None:
    story = Story.running(world_size=2, max_fruitless=2)
    for saved in (5, 10, 15, 20):
        story.beats(1, step=saved, last_checkpoint_step=saved)
        is_found(story).comes_back(1).is_spawned(1)
    assert story.job.verdict is None


@FINDERS
def test_one_that_we_had_asked_to_stop_is_not_to_blame(is_found: Find) -> None:
    story = Story.running(world_size=2, max_fruitless=1)
    asked = Orphaned(by="its warden (no agent for 60 s)")
    is_found(story.hears(RankSaid(rank=1, incarnation=0, message=asked)))
    assert story.rank(1).endings == {RetryClass.INFRASTRUCTURE: 1}
    assert (story.rank(1).fruitless, story.job.verdict) == (0, None)


def test_one_that_was_killed_for_its_silence_has_hung_all_the_same() -> None:
    story = Story.running(world_size=1).passes(10)
    story.plans()
    assert story.is_ended(0).rank(0).endings == {RetryClass.HANG: 1}


def test_an_agent_that_dies_before_there_is_a_process_is_its_own_failure() -> None:
    story = Story.starting(world_size=1, max_fruitless=1)
    for _ in range(AGENT_FAILURES_LIMIT):
        has_another_agent(story.agent_is_lost()).plans()
        assert story.job.verdict is None
    assert story.agent_is_lost().job.verdict.reason is Reason.AGENT_LOST


NO_PROCESS = "cannot be started in /work: [Errno 11] Resource temporarily unavailable"


def is_started_again(story: Story, rank: int) -> None:
    while not story.rank(rank).is_alive:
        story.passes(1).plans()


def test_one_that_could_not_be_started_is_tried_again_and_says_why() -> None:
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


def test_one_that_can_never_be_started_is_given_up() -> None:
    story = Story.starting(world_size=1, max_fruitless=3)
    for _ in range(3):
        assert story.job.verdict is None
        is_started_again(story, 0)
        story.is_ended(0, unstarted=NO_PROCESS)
    assert story.job.verdict.reason is Reason.NO_PROGRESS
    assert story.job.verdict.message == (
        f"rank 0 {NO_PROCESS} and has failed 3 times in a row without a new checkpoint"
    )
