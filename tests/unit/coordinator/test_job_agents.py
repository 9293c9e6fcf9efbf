"""How a job fares when its agent is late, lost or out of reach, told as stories."""

from itertools import pairwise

import pytest
from stories import Story, starts

from coordinator.actions import KillAgent, Move, StartAgent
from coordinator.silence import AGENT_GRACE_SECONDS
from coordinator.snapshot import AgentState
from muster.contracts.job import JobStatus, Reason
from muster.contracts.messages import Executing, Hello


def test_an_agent_lost_restarts_ranks_without_counting() -> None:
    story = Story.running(world_size=2).agent_is_lost()
    assert not story.job.any_alive
    planned = story.plans()
    assert [type(action) for action in planned] == [Move, StartAgent], "at once"
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.reason is Reason.AGENT_LOST
    assert story.job.generation == 2
    assert starts(story.agent_joins().plans()) == [0, 1]
    story.says_hello(0, 1).plans()
    assert story.job.status is JobStatus.RUNNING
    assert [(rank.restarts, rank.failures) for rank in story.job.ranks] == [(0, 0)] * 2


@pytest.mark.parametrize("sign_of_life", [Hello(), Executing()])
def test_agents_that_die_young_come_back_later_and_later_until_one_works(
    sign_of_life: Hello | Executing,
) -> None:
    story = Story.submitted(world_size=1).is_admitted()
    story.plans()
    assert StartAgent() in story.agent_is_lost().plans(), "the first one that is lost: at once"
    waits = []
    for _ in range(4):
        story.agent_is_lost().plans()
        waits.append(story.patience_seconds)
        assert story.wakes() == [StartAgent()]
    assert all(before < after for before, after in pairwise(waits))
    story.agent_joins().plans()
    assert StartAgent() in story.rank_says(0, sign_of_life).agent_is_lost().plans()


def test_an_agent_that_never_says_hello_is_killed_and_once_only_for_each_grace() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    assert story.passes(AGENT_GRACE_SECONDS - 0.1).plans() == []
    assert story.passes(0.1).plans() == [KillAgent()]
    assert story.plans() == []
    assert story.passes(AGENT_GRACE_SECONDS).plans() == [KillAgent()], "should the first miss"
    assert StartAgent() in story.agent_is_lost().plans()


def test_an_agent_whose_connection_broke_keeps_its_ranks() -> None:
    story = Story.running(world_size=1).agent_drops()
    assert story.job.agent is AgentState.UNREACHABLE
    assert story.passes(1).plans() == []
    story.agent_joins()
    assert story.job.agent is AgentState.CONNECTED
    assert story.rank(0).is_alive


def test_nothing_is_started_through_an_agent_that_is_not_there() -> None:
    story = Story.running(world_size=1).agent_drops().exits(0, code=1)
    assert starts(story.passes(60).plans()) == []
    assert starts(story.agent_joins().plans()) == [0]


@pytest.mark.parametrize("generation", [0, 2, -1])
def test_an_agent_of_another_generation_cannot_speak(generation: int) -> None:
    story = Story.running(world_size=1)
    before = story.job
    assert story.agent_drops(generation).job is before
    assert story.agent_joins(generation).job is before
    assert story.agent_is_lost(generation).job is before


def test_the_end_of_an_agent_that_was_sent_away_is_no_loss() -> None:
    story = Story.running(world_size=1).exits(0)
    story.plans()
    before = story.job
    assert story.agent_is_lost().job is before
