"""An agent that is alive and does nothing must not hold its job for ever."""

import pytest
from stories import Story, starts

from coordinator.actions import KillAgent, KillProcess, StartAgent
from coordinator.happenings import AgentLost, Overslept
from coordinator.silence import (
    AGENT_GRACE_SECONDS,
    AGENT_SILENCE_SECONDS,
    HURRY_SECONDS,
    KILL_GRACE_SECONDS,
)
from coordinator.snapshot import AGENT_FAILURES_LIMIT, AgentState
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import Executing, Hello, Pulse


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


def test_ranks_that_are_to_be_ended_at_once_do_not_wait_for_an_agent_that_is_not_heard() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.agent_freezes().is_stopped(StopRequest.FORCED).plans()
    assert KillAgent() in story.passes(HURRY_SECONDS + 1).plans()
    story = Story.running(world_size=2)
    story.agent_drops().is_stopped(StopRequest.FORCED).plans()
    assert KillAgent() in story.passes(HURRY_SECONDS).plans()


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


def test_ranks_of_an_agent_that_is_silent_itself_are_not_judged() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=20.0)
    story.agent_freezes()
    assert story.passes(19.9).plans() == [], "they are not even suspects"


def test_an_agent_that_is_silent_for_too_long_is_replaced_and_its_ranks_live_on() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=20.0)
    story.agent_freezes().passes(20.0)
    assert story.plans() == [KillAgent()]
    story.agent_is_lost(living=[0, 1]).plans()
    story.wakes()
    story.agent_joins().says_hello(0, 1)
    assert kills(story.goes_on(60)) == []
    assert [rank.incarnation for rank in story.job.ranks] == [0, 0]


def test_an_impatient_job_gives_its_agent_time_for_the_templates_imports() -> None:
    story = Story.running(world_size=1, heartbeat_timeout=1.0).agent_freezes()
    assert story.passes(AGENT_SILENCE_SECONDS - 0.1).plans() == []
    assert KillAgent() in story.passes(0.1).plans()


def test_should_the_kill_of_a_silent_agent_miss_it_is_repeated() -> None:
    story = Story.running(world_size=1).agent_freezes()
    assert story.passes(10).plans() == [KillAgent()]
    assert story.passes(9).plans() == []
    assert story.passes(1).plans() == [KillAgent()]


@pytest.mark.parametrize("seconds", [1.0, 5.0, 9.9])
def test_after_an_agent_is_heard_again_its_ranks_have_time_to_be_heard(seconds: float) -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10.0)
    story.passes(3).agent_freezes().passes(seconds).agent_thaws()
    assert kills(story.plans()) == []
    story.passes(1).beats(0)
    assert kills(story.plans()) == []
    assert kills(story.passes(9).plans()) == [1], "whoever stays silent then is"


def test_a_rank_that_freezes_with_its_agent_is_replaced_once_that_is_heard_again() -> None:
    story = Story.running(world_size=1, heartbeat_timeout=10.0)
    story.agent_freezes().passes(9).agent_thaws()
    assert kills(story.passes(7.4).plans()) == []
    assert kills(story.passes(0.1).plans()) == [0]


def test_agents_that_stutter_do_not_keep_a_frozen_rank_for_ever() -> None:
    story = Story.running(world_size=1, heartbeat_timeout=10.0)
    for _ in range(4):
        story.agent_freezes().passes(8).agent_thaws()
    assert kills(story.plans()) == [0]


def test_a_start_that_nobody_could_see_does_not_count() -> None:
    story = Story.starting(world_size=1, start_grace_seconds=4.0, heartbeat_timeout=4.0)
    story.agent_freezes().passes(9)
    assert story.plans() == []
    assert kills(story.agent_thaws().plans()) == []
    assert kills(story.passes(3).plans()) == [0]


def test_a_rank_that_stood_still_in_a_coordinators_sleep_is_no_agents_fault() -> None:
    story = Story.running(world_size=1).agent_freezes()
    story.passes(60.0).hears(Overslept(seconds=60.0))
    assert story.plans() == []
    assert KillAgent() in story.passes(10).plans()


# A program that has never beaten


def joining() -> Story:
    """A command whose ranks run, and have not joined."""
    story = Story.starting(world_size=2, heartbeat_timeout=10.0)
    for rank in (0, 1):
        story.is_spawned(rank).rank_says(rank, Executing())
    story.plans()
    return story


def test_a_program_that_has_not_joined_and_stands_still_is_replaced() -> None:
    story = joining()
    story.stopped = {1}
    story.pulses()
    assert story.passes(9.9).plans() == []
    planned = story.passes(0.1).plans()
    assert kills(planned) == [1]
    assert [action.cause.message for action in planned] == ["stood still for 10 s and was killed"]
    story.dies(1).plans()
    assert story.job.reason is Reason.HEARTBEAT_TIMEOUT


def test_a_program_that_goes_on_in_time_is_not() -> None:
    story = joining()
    story.stopped = {0, 1}
    story.pulses().passes(9)
    story.stopped = {1}
    story.pulses().rank_says(1, Hello())
    assert story.passes(5).beats(1).plans() == []
    assert story.passes(1e6).beats(1).plans() == [], "rank 0 may be silent for ever"


def test_nobody_stands_still_for_a_predecessor() -> None:
    story = joining()
    story.dies(0).plans()
    story.wakes()
    story.hears(Pulse(stopped=((0, 0),)))
    assert story.rank(0).incarnation == 1
    assert story.rank(0).stopped_at is None


def test_an_agent_that_found_a_higher_number_is_followed_by_one_that_is_higher_still() -> None:
    story = Story.running(world_size=1)
    lost = AgentLost(generation=story.job.generation, message="it left", newest=9999)
    assert StartAgent() in story.hears(lost).plans()
    assert story.job.generation == 10_000
    before = story.agent_joins().job.generation
    older = AgentLost(generation=before, message="it died", newest=3)
    assert StartAgent() in story.hears(older).passes(2).plans()
    assert story.job.generation == before + 1
