"""A job whose agent is late, lost or disconnected."""

from itertools import pairwise

import pytest

from coordinator.decide.actions import KillAgent, SetStatus, StartAgent
from coordinator.decide.liveness import AGENT_CONNECT_SECONDS
from coordinator.decide.state import AgentState
from muster.contracts.job import JobStatus, Reason
from muster.contracts.messages import Executing, Hello
from tests.support.stories import Story, starts


def test_a_lost_agent_restarts_its_ranks_for_free() -> None:
    story = Story.running(world_size=2).agent_is_lost()
    assert not story.job.any_alive
    planned = story.plans()
    assert [type(action) for action in planned] == [SetStatus, StartAgent], "at once"
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.reason is Reason.AGENT_LOST
    assert story.job.generation == 2
    assert starts(story.agent_connects().plans()) == [0, 1]
    story.says_hello(0, 1).plans()
    assert story.job.status is JobStatus.RUNNING
    assert [(rank.restarts, rank.failures) for rank in story.job.ranks] == [(0, 0)] * 2


@pytest.mark.parametrize("sign_of_life", [Hello(), Executing()])
def test_agents_that_die_early_restart_with_backoff(
    sign_of_life: Hello | Executing,
) -> None:
    story = Story.submitted(world_size=1).is_admitted()
    story.plans()
    assert StartAgent() in story.agent_is_lost().plans(), "the first one that is lost: at once"
    waits = []
    for _ in range(4):
        story.agent_is_lost().plans()
        waits.append(story.wait_seconds)
        assert story.wakes() == [StartAgent()]
    assert all(before < after for before, after in pairwise(waits))
    story.agent_connects().plans()
    assert StartAgent() in story.rank_says(0, sign_of_life).agent_is_lost().plans()


def test_an_agent_that_never_connects_is_killed() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    assert story.passes(AGENT_CONNECT_SECONDS - 0.1).plans() == []
    assert story.passes(0.1).plans() == [KillAgent()]
    assert story.plans() == []
    assert story.passes(AGENT_CONNECT_SECONDS).plans() == [KillAgent()], "should the first miss"
    assert StartAgent() in story.agent_is_lost().plans()


def test_a_disconnected_agent_keeps_its_ranks() -> None:
    story = Story.running(world_size=1).agent_disconnects()
    assert story.job.agent is AgentState.UNREACHABLE
    assert story.passes(1).plans() == []
    story.agent_connects()
    assert story.job.agent is AgentState.CONNECTED
    assert story.rank(0).is_alive


def test_nothing_starts_while_the_agent_is_away() -> None:
    story = Story.running(world_size=1).agent_disconnects().exits(0, code=1)
    assert starts(story.passes(60).plans()) == []
    assert starts(story.agent_connects().plans()) == [0]


@pytest.mark.parametrize("generation", [0, 2, -1])
def test_observations_of_another_agent_are_ignored(generation: int) -> None:
    story = Story.running(world_size=1)
    before = story.job
    assert story.agent_disconnects(generation).job is before
    assert story.agent_connects(generation).job is before
    assert story.agent_is_lost(generation).job is before


def test_the_end_of_a_dismissed_agent_is_no_loss() -> None:
    story = Story.running(world_size=1).exits(0)
    story.plans()
    before = story.job
    assert story.agent_is_lost().job is before
