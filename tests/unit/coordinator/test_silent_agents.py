"""An agent that is alive and does nothing must not hold its job for ever."""

from stories import Story, starts

from coordinator.actions import KillAgent, KillProcess, StartAgent
from coordinator.happenings import Overslept
from coordinator.plan import AGENT_GRACE_SECONDS, KILL_GRACE_SECONDS
from coordinator.snapshot import AGENT_FAILURES_LIMIT, AgentState
from muster.contracts.job import JobStatus, Reason


def kills(actions: list[object]) -> list[int]:
    return [action.rank for action in actions if isinstance(action, KillProcess)]


def test_silence_while_the_connection_is_down_is_not_the_ranks_fault() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.agent_drops()
    assert story.passes(20.0).plans() == []
    story.agent_joins()
    assert story.plans() == []
    assert kills(story.passes(11.0).plans()) == [0, 1]


def test_an_agent_that_does_not_come_back_is_given_up() -> None:
    story = Story.running(world_size=2)
    story.agent_drops()
    assert story.passes(AGENT_GRACE_SECONDS - 1).plans() == []
    assert KillAgent() in story.passes(2.0).plans()


def test_an_agent_that_does_not_end_a_rank_it_was_told_to_is_given_up() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    assert kills(story.passes(11.0).plans()) == [0, 1]
    assert story.passes(KILL_GRACE_SECONDS - 2).plans() == []
    assert KillAgent() in story.passes(3.0).plans()
    story.agent_is_lost()
    assert story.job.agent is AgentState.ABSENT
    assert not story.job.any_alive
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


def test_an_agent_that_ends_it_in_time_is_not() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.passes(6.0).beats(1)
    assert kills(story.passes(5.0).plans()) == [0]
    story.dies(0)
    assert KillAgent() not in story.beats(1).passes(KILL_GRACE_SECONDS - 1).plans()


def test_a_coordinator_that_stood_still_blames_nobody_else() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=3.0)
    story.passes(60.0).hears(Overslept(seconds=60.0))
    assert kills(story.plans()) == []
    assert kills(story.passes(3.0).plans()) == [0, 1]


def test_ranks_that_have_lost_their_agent_wait_for_the_next_one() -> None:
    story = Story.running(world_size=2)
    assert story.agent_is_lost(living=[0, 1]).job.agent is AgentState.ABSENT
    assert [rank.is_alive for rank in story.job.ranks] == [True, True]
    assert StartAgent() in story.plans()
    assert starts(story.agent_joins().says_hello(0, 1).plans()) == []
    assert story.job.status is JobStatus.RUNNING
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


def test_a_rank_that_died_with_its_agent_is_started_by_the_next_one() -> None:
    story = Story.running(world_size=2)
    story.agent_is_lost(living=[0]).plans()
    assert starts(story.agent_joins().plans()) == [1]
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


def test_nobody_is_blamed_for_silence_while_there_is_no_agent() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=3.0)
    story.agent_is_lost(living=[0, 1]).passes(60.0)
    assert kills(story.plans()) == []
    assert kills(story.agent_joins().plans()) == []


def test_a_stopped_job_gets_an_agent_to_end_the_ranks_that_live() -> None:
    story = Story.running(world_size=1)
    story.is_stopped().plans()
    assert StartAgent() in story.agent_is_lost(living=[0]).plans()
    story.agent_joins().exits(0)
    story.plans()
    assert story.job.status is JobStatus.STOPPED


def test_agents_that_never_bring_up_a_rank_fail_the_job() -> None:
    story = Story.submitted(world_size=1).is_admitted()
    for _ in range(AGENT_FAILURES_LIMIT):
        story.passes(60.0).plans()
        story.agent_is_lost()
        assert story.job.verdict is None
    story.passes(60.0).plans()
    story.agent_is_lost()
    story.plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.AGENT_LOST
