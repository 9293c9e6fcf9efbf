"""Limits that take long histories; the shorter ones are in `histories/*.txt`."""

from itertools import pairwise

import pytest

from coordinator.decide.actions import AgentNotStarted, DismissAgent
from coordinator.decide.plan import plan
from coordinator.decide.state.job import AGENT_FAILURES_LIMIT
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.status import JobStatus, Reason
from tests.support.stories import Story, queued_job, starts, terminations


def test_a_queued_job_gets_no_actions() -> None:
    assert plan(queued_job(), 0.0) == []


def test_the_backoff_doubles_up_to_its_cap() -> None:
    story = Story.running(world_size=1, max_restarts=9, max_fruitless=99)
    waits = []
    for _ in range(9):
        story.exits(0, code=1).plans()
        waits.append(story.wait_seconds)
        story.wakes()
        story.says_hello(0)
    assert all(before < after for before, after in pairwise(waits[:6]))
    for wait, scheduled in zip(waits, [0.5, 1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.75 * scheduled <= wait <= scheduled


def test_a_minute_of_health_resets_the_backoff() -> None:
    story = Story.running(world_size=1)
    for _ in range(3):
        story.exits(0, code=1).plans()
        story.wakes()
        story.says_hello(0).plans()
    assert story.rank(0).budget.failures == 3
    story.runs_for(59)
    assert story.rank(0).budget.failures == 3
    story.runs_for(2)
    assert story.rank(0).budget.failures == 0
    story.exits(0, code=1)
    assert story.rank(0).budget.failures == 1
    assert story.rank(0).budget.restarts == 4, "restarts are never reset"


def test_the_51st_failure_fails_the_job_with_its_log() -> None:
    story = Story.running(world_size=2, max_fruitless=99)
    for number in range(50):
        story.dies(1, signal=11, lines=["not these"]).all_beat()
        assert story.rank(1).budget.restarts == number + 1
        story.plans()
        assert starts(story.runs_for(31)) == [1]
        story.says_hello(1)
    planned = story.dies(1, signal=11, lines=["Traceback:", "it broke"]).plans()
    assert story.rank(1).budget.restarts == 50
    assert terminations(planned) == [0], "the other rank is ended with the job"
    assert story.job.status is JobStatus.STOPPING, "as long as a process is left"
    assert DismissAgent(host=LOCAL_HOST) in story.dies(0, signal=15).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.RESTART_LIMIT
    assert story.job.message == (
        "rank 1 was ended by signal 11 (SIGSEGV) and has used its 50 restarts; "
        "the last lines of its log:\n  Traceback:\n  it broke"
    )
    assert story.job.failure is not None
    assert story.job.failure.exit_code == 139


@pytest.mark.parametrize("connects", [False, True])
def test_agents_that_never_start_a_rank_fail_the_job(connects: bool) -> None:  # noqa: FBT001  both are true
    story = Story.submitted(world_size=1, max_fruitless=1).is_admitted()
    for _ in range(AGENT_FAILURES_LIMIT + 1):
        assert story.job.failure is None
        story.passes(60).plans()
        if connects:
            story.agent_connects().plans()
        story.agent_is_lost()
    story.plans()
    assert (story.job.status, story.job.reason) == (JobStatus.FAILED, Reason.AGENT_LOST)


def test_hosts_that_start_no_agent_are_waited_for() -> None:
    story = Story.submitted(hosts=("a", "b"), world_size=4).is_admitted()
    story.plans()
    for _ in range(2 * AGENT_FAILURES_LIMIT):
        for host in ("a", "b"):
            story.agent_is_lost(host=host, kind=AgentNotStarted)
        story.plans()
        story.passes(60).plans()
    assert (story.job.status, story.job.reason) == (JobStatus.STARTING, Reason.AGENT_LOST)
    assert story.job.message == "the agent is gone"
    story.agents_connect().plans()
    assert not any(rank.is_down for rank in story.job.ranks)


@pytest.mark.parametrize("agent_number", [0, 2, -1])
def test_observations_of_another_agent_are_ignored(agent_number: int) -> None:
    story = Story.running(world_size=1)
    before = story.job
    assert story.agent_disconnects(agent_number).job is before
    assert story.agent_connects(agent_number).job is before
    assert story.agent_is_lost(agent_number).job is before


def test_a_completed_job_dismisses_each_agent_once() -> None:
    story = Story.submitted(hosts=("a", "b"), world_size=3).is_admitted()
    story.plans()
    story.agents_connect().plans()
    for rank in range(3):
        story.says_hello(rank).exits(rank)
    done = story.plans()
    assert story.job.status is JobStatus.COMPLETED
    assert [it.host for it in done if isinstance(it, DismissAgent)] == ["a", "b"]
