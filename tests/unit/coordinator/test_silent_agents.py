"""An agent that is alive and silent must not block its job."""

import pytest

from coordinator.decide.actions import AgentLost, KillAgent, KillProcess, LoopStalled, StartAgent
from coordinator.decide.liveness import (
    AGENT_CONNECT_SECONDS,
    AGENT_SILENCE_SECONDS,
    FORCED_STOP_SECONDS,
    KILL_GRACE_SECONDS,
)
from coordinator.decide.state import AGENT_FAILURES_LIMIT, AgentState
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import AgentHeartbeat, Executing, Hello
from tests.support.stories import Story, starts


def kills(actions: list[object]) -> list[int]:
    return [action.rank for action in actions if isinstance(action, KillProcess)]


def test_silence_without_a_connection_is_not_the_ranks() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.agent_disconnects()
    assert story.passes(20.0).plans() == []
    story.agent_connects()
    assert story.plans() == []
    assert kills(story.passes(11.0).plans()) == [0, 1]


def test_an_agent_that_stays_away_is_killed() -> None:
    story = Story.running(world_size=2)
    story.agent_disconnects()
    assert story.passes(AGENT_CONNECT_SECONDS - 1).plans() == []
    assert KillAgent() in story.passes(2.0).plans()


def test_an_agent_that_does_not_kill_a_rank_is_killed() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    assert kills(story.passes(11.0).plans()) == [0, 1]
    assert story.passes(KILL_GRACE_SECONDS - 2).plans() == []
    assert KillAgent() in story.passes(3.0).plans()
    story.agent_is_lost()
    assert story.job.agent is AgentState.ABSENT
    assert not story.job.any_alive
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


def test_a_forced_stop_does_not_wait_for_a_silent_agent() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.agent_freezes().is_stopped(StopRequest.FORCED).plans()
    assert KillAgent() in story.passes(FORCED_STOP_SECONDS + 1).plans()
    story = Story.running(world_size=2)
    story.agent_disconnects().is_stopped(StopRequest.FORCED).plans()
    assert KillAgent() in story.passes(FORCED_STOP_SECONDS).plans()


def test_an_agent_that_kills_in_time_is_kept() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.passes(6.0).beats(1)
    assert kills(story.passes(5.0).plans()) == [0]
    story.dies(0)
    assert KillAgent() not in story.beats(1).passes(KILL_GRACE_SECONDS - 1).plans()


def test_a_stall_of_the_loop_shifts_all_deadlines() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=3.0)
    story.passes(60.0).observes(LoopStalled(seconds=60.0))
    assert kills(story.plans()) == []
    assert kills(story.passes(3.0).plans()) == [0, 1]


def test_orphaned_ranks_wait_for_the_next_agent() -> None:
    story = Story.running(world_size=2)
    assert story.agent_is_lost(living=[0, 1]).job.agent is AgentState.ABSENT
    assert [rank.is_alive for rank in story.job.ranks] == [True, True]
    assert StartAgent() in story.plans()
    assert starts(story.agent_connects().says_hello(0, 1).plans()) == []
    assert story.job.status is JobStatus.RUNNING
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


def test_a_rank_that_died_with_its_agent_restarts() -> None:
    story = Story.running(world_size=2)
    story.agent_is_lost(living=[0]).plans()
    assert starts(story.agent_connects().plans()) == [1]
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


def test_silence_without_an_agent_does_not_count() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=3.0)
    story.agent_is_lost(living=[0, 1]).passes(60.0)
    assert kills(story.plans()) == []
    assert kills(story.agent_connects().plans()) == []


def test_a_stopped_job_gets_an_agent_to_end_its_ranks() -> None:
    story = Story.running(world_size=1)
    story.is_stopped().plans()
    assert StartAgent() in story.agent_is_lost(living=[0]).plans()
    story.agent_connects().exits(0)
    story.plans()
    assert story.job.status is JobStatus.STOPPED


def test_agents_that_never_start_a_rank_fail_the_job() -> None:
    story = Story.submitted(world_size=1).is_admitted()
    for _ in range(AGENT_FAILURES_LIMIT):
        story.passes(60.0).plans()
        story.agent_is_lost()
        assert story.job.failure is None
    story.passes(60.0).plans()
    story.agent_is_lost()
    story.plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.AGENT_LOST


def test_ranks_of_a_silent_agent_are_not_judged() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=20.0)
    story.agent_freezes()
    assert story.passes(19.9).plans() == [], "not even suspects"


def test_a_silent_agent_is_replaced_and_its_ranks_live() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=20.0)
    story.agent_freezes().passes(20.0)
    assert story.plans() == [KillAgent()]
    story.agent_is_lost(living=[0, 1]).plans()
    story.wakes()
    story.agent_connects().says_hello(0, 1)
    assert kills(story.runs_for(60)) == []
    assert [rank.attempt for rank in story.job.ranks] == [0, 0]


def test_a_short_timeout_leaves_an_agent_time_to_import() -> None:
    story = Story.running(world_size=1, heartbeat_timeout=1.0).agent_freezes()
    assert story.passes(AGENT_SILENCE_SECONDS - 0.1).plans() == []
    assert KillAgent() in story.passes(0.1).plans()


def test_the_kill_of_a_silent_agent_is_repeated() -> None:
    story = Story.running(world_size=1).agent_freezes()
    assert story.passes(10).plans() == [KillAgent()]
    assert story.passes(9).plans() == []
    assert story.passes(1).plans() == [KillAgent()]


@pytest.mark.parametrize("seconds", [1.0, 5.0, 9.9])
def test_ranks_get_their_time_after_a_silent_agent(seconds: float) -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.passes(3).agent_freezes().passes(seconds).agent_thaws()
    assert kills(story.plans()) == []
    story.passes(1).beats(0)
    assert kills(story.plans()) == []
    assert kills(story.passes(9).plans()) == [1], "rank 1 was silent since"


def test_a_rank_frozen_with_its_agent_is_replaced() -> None:
    story = Story.running(world_size=1, heartbeat_timeout=10.0)
    story.agent_freezes().passes(9).agent_thaws()
    assert kills(story.passes(7.4).plans()) == []
    assert kills(story.passes(0.1).plans()) == [0]


def test_a_stuttering_agent_does_not_save_a_frozen_rank() -> None:
    story = Story.running(world_size=1, heartbeat_timeout=10.0)
    for _ in range(4):
        story.agent_freezes().passes(8).agent_thaws()
    assert kills(story.plans()) == [0]


def test_a_start_during_silence_does_not_count() -> None:
    story = Story.starting(world_size=1, start_grace_seconds=4.0, heartbeat_timeout=4.0)
    story.agent_freezes().passes(9)
    assert story.plans() == []
    assert kills(story.agent_thaws().plans()) == []
    assert kills(story.passes(3).plans()) == [0]


def test_a_stall_does_not_blame_the_agent() -> None:
    story = Story.running(world_size=1).agent_freezes()
    story.passes(60.0).observes(LoopStalled(seconds=60.0))
    assert story.plans() == []
    assert KillAgent() in story.passes(10).plans()


# A command that has never sent a heartbeat


def joining() -> Story:
    """A command whose ranks run without heartbeats."""
    story = Story.starting(world_size=2, heartbeat_timeout=10.0)
    for rank in (0, 1):
        story.is_spawned(rank).rank_says(rank, Executing())
    story.plans()
    return story


def test_a_stopped_command_is_replaced() -> None:
    story = joining()
    story.stopped = {1}
    story.pulses()
    assert story.passes(9.9).plans() == []
    planned = story.passes(0.1).plans()
    assert kills(planned) == [1]
    assert [action.cause.message for action in planned] == [
        "was stopped (SIGSTOP) for 10 s and was killed"
    ]
    story.dies(1).plans()
    assert story.job.reason is Reason.HEARTBEAT_TIMEOUT


def test_a_command_that_continues_in_time_is_kept() -> None:
    story = joining()
    story.stopped = {0, 1}
    story.pulses().passes(9)
    story.stopped = {1}
    story.pulses().rank_says(1, Hello())
    assert story.passes(5).beats(1).plans() == []
    assert story.passes(1e6).beats(1).plans() == [], "rank 0 never sends heartbeats"


def test_a_stop_of_the_last_attempt_does_not_count() -> None:
    story = joining()
    story.dies(0).plans()
    story.wakes()
    story.observes(AgentHeartbeat(stopped=((0, 0),)))
    assert story.rank(0).attempt == 1
    assert story.rank(0).stopped_at is None


def test_the_next_agent_number_is_the_highest() -> None:
    story = Story.running(world_size=1)
    lost = AgentLost(generation=story.job.generation, message="it left", newest=9999)
    assert StartAgent() in story.observes(lost).plans()
    assert story.job.generation == 10_000
    before = story.agent_connects().job.generation
    older = AgentLost(generation=before, message="it died", newest=3)
    assert StartAgent() in story.observes(older).passes(2).plans()
    assert story.job.generation == before + 1
