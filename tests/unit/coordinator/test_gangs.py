"""A gang runs whole or not at all, told as stories."""

from collections.abc import Callable
from itertools import product

import pytest
from stories import Story, kills, starts, terminations
from unit.coordinator.heirs import successor

from coordinator.actions import Move
from coordinator.happenings import Overslept
from coordinator.rows import inherited_with_agent, snapshot_of
from coordinator.snapshot import AgentState
from muster.contracts.endings import RetryClass
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import Executing

COMMAND = ("python", "train.py")


def running(world_size: int = 3, **spec: object) -> Story:
    """A gang whose ranks all run, of a program that does not speak to us."""
    asked = {"command": COMMAND, "restart_scope": "gang", "world_size": world_size, **spec}
    return live(Story.starting(**asked))


def live(story: Story) -> Story:
    for rank in story.job.ranks:
        if rank.is_alive:
            story.is_spawned(rank.rank).rank_says(rank.rank, Executing())
    story.plans()
    assert story.job.status is JobStatus.RUNNING
    return story


def incarnations(story: Story) -> list[int]:
    return [rank.incarnation for rank in story.job.ranks]


def test_when_a_rank_dies_the_others_are_ended_and_then_all_are_started_together() -> None:
    story = running()
    assert terminations(story.dies(1).plans()) == [0, 2]
    assert story.dies(0, signal=15).plans() == [], "one is left"
    assert story.exits(2, code=0).plans() == [], "the backoff of the first is not over"
    assert starts(story.wakes()) == [0, 1, 2]
    assert incarnations(live(story)) == [1, 1, 1]


def test_only_the_rank_that_was_first_to_end_is_counted() -> None:
    story = running().dies(1)
    story.plans()
    story.exits(0, code=1, lines=["ConnectionResetError: peer"]).dies(2, signal=15)
    assert [rank.restarts for rank in story.job.ranks] == [0, 1, 0]
    assert story.rank(1).endings == {RetryClass.CRASH: 1}
    for rank in (0, 2):
        assert story.rank(rank).endings == {RetryClass.STOPPED: 1}
        assert story.rank(rank).fruitless == 0
        assert story.rank(rank).ending.reason is Reason.GANG_RESTARTED
    words = [story.rank(rank).ending.message for rank in (0, 2)]
    assert words == [
        "exited with code 1, as rank 1 was lost (ConnectionResetError: peer)",
        "was ended by signal 15 (SIGTERM), as rank 1 was lost",
    ]


def test_the_status_says_who_died_first_and_that_all_are_started_again() -> None:
    story = running().dies(1)
    story.plans()
    story.dies(0, signal=15).dies(2, signal=15).plans()
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message == (
        "rank 1 was ended by signal 9 (SIGKILL); all ranks are started again, restart 1 of 50"
    )


def test_a_rank_that_fails_because_another_one_did_is_no_failure_before_it_is_asked_to_go() -> None:
    story = running().dies(1).exits(0, code=1)
    assert terminations(story.plans()) == [2]
    assert story.rank(0).restarts == 0


def test_a_rank_that_is_done_is_started_again_with_the_others() -> None:
    story = running().exits(0, code=0)
    assert story.plans() == []
    assert story.job.status is JobStatus.RUNNING
    assert terminations(story.dies(1).plans()) == [2]
    story.dies(2, signal=15)
    assert starts(story.wakes()) == [0, 1, 2]
    assert not story.rank(0).finished


def test_a_gang_is_done_when_all_its_ranks_are() -> None:
    story = running().exits(0).exits(1)
    assert story.plans() == []
    (*_, move) = [one for one in story.exits(2).plans() if isinstance(one, Move)]
    assert move.status is JobStatus.COMPLETED


def test_a_gang_that_has_lost_its_last_rank_begins_again_although_the_others_were_done() -> None:
    story = running(2).exits(0).dies(1)
    story.plans()
    assert starts(story.wakes()) == [0, 1]


def test_who_does_not_go_within_the_grace_is_killed_and_never_before() -> None:
    story = running(2, stop_grace_seconds=7).dies(0)
    story.plans()
    assert kills(story.passes(6.9).plans()) == {}
    (cause,) = kills(story.wakes()).values()
    assert cause.reason is Reason.GANG_RESTARTED
    assert starts(story.plans()) == []
    assert starts(story.dies(1).plans()) == [0, 1]
    assert story.rank(1).endings == {RetryClass.STOPPED: 1}


def test_the_budget_of_the_rank_that_was_to_blame_decides() -> None:
    story = running(2, max_restarts=1, max_fruitless=100)
    for blamed in (0, 1):
        story.dies(blamed).plans()
        story.dies(1 - blamed, signal=15)
        story.wakes()
        live(story)
    assert [rank.restarts for rank in story.job.ranks] == [1, 1]
    assert terminations(story.dies(0).plans()) == [1]
    story.dies(1, signal=15).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.RESTART_LIMIT


def test_an_end_that_is_not_to_be_tried_again_ends_the_job_and_not_only_the_gang() -> None:
    story = running(2).exits(0, code=64)
    assert terminations(story.plans()) == [1]
    story.dies(1, signal=15).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.DO_NOT_RETRY


@pytest.mark.parametrize("request_", list(StopRequest))
def test_a_stop_in_the_middle_of_a_restart_starts_nothing(request_: StopRequest) -> None:
    story = running().dies(1)
    story.plans()
    story.is_stopped(request_).plans()
    story.dies(0, signal=15).dies(2, signal=15)
    assert starts(story.plans()) == []
    assert story.job.status is JobStatus.STOPPED


def test_a_stop_between_the_end_and_the_next_start_starts_nothing() -> None:
    story = running(2).dies(1)
    story.plans()
    story.dies(0, signal=15).is_stopped()
    assert starts(story.plans()) == []
    assert story.job.status is JobStatus.STOPPED


def test_the_loss_of_an_agent_whose_ranks_live_restarts_nobody() -> None:
    story = running().agent_is_lost(living=(0, 1, 2))
    story.plans()
    assert story.agent_joins().plans() == []
    assert incarnations(live(story)) == [0, 0, 0]


def test_a_rank_that_went_with_its_agent_takes_the_gang_along_and_no_restart_is_counted() -> None:
    story = running().agent_is_lost(living=(0, 2))
    story.plans()
    assert terminations(story.agent_joins().plans()) == [0, 2]
    story.dies(0, signal=15).dies(2, signal=15)
    assert starts(story.plans()) == [0, 1, 2]
    assert [rank.restarts for rank in story.job.ranks] == [0, 0, 0]


def test_nobody_is_asked_to_go_while_there_is_no_agent_to_ask() -> None:
    story = running().agent_drops().dies(1)
    assert terminations(story.plans()) == []
    assert story.job.agent is AgentState.UNREACHABLE
    assert terminations(story.agent_joins().plans()) == [0, 2]


def test_ranks_of_which_one_died_in_either_order_end_the_same() -> None:
    for first, second in product(range(3), repeat=2):
        if first == second:
            continue
        story = running().dies(first).dies(second)
        (last,) = terminations(story.plans())
        story.dies(last, signal=15)
        story.wakes()
        assert incarnations(story) == [1, 1, 1]
        assert sum(rank.restarts for rank in story.job.ranks) == 1


def test_ranks_of_a_job_that_is_no_gang_are_left_alone() -> None:
    story = live(Story.starting(command=COMMAND, world_size=3)).dies(1)
    assert terminations(story.plans()) == []
    assert starts(story.wakes()) == [1]


def test_a_coordinator_that_stood_still_does_not_hold_it_against_those_who_are_to_go() -> None:
    story = running(2, stop_grace_seconds=7).dies(0)
    story.plans()
    story.passes(100).hears(Overslept(seconds=100))
    assert kills(story.plans()) == {}
    assert list(kills(story.wakes())) == [1]


def test_who_is_done_keeps_its_slot_as_it_may_have_to_start_again() -> None:
    assert running().exits(0).job.slots == 3
    assert live(Story.starting(command=COMMAND, world_size=3)).exits(0).job.slots == 2


# A coordinator that dies in the middle

MOMENTS: dict[str, Callable[[Story], object]] = {
    "one died": lambda story: story.dies(1),
    "the others were asked to go": lambda story: story.dies(1).plans(),
    "one has gone": lambda story: (story.dies(1).plans(), story.dies(0, signal=15)),
    "one was done before": lambda story: story.exits(0).dies(1).plans(),
    "none is left": lambda story: are_gone(story.dies(1)),
    "all were started": lambda story: (are_gone(story.dies(1)), story.passes(60).plans()),
}


def are_gone(story: Story) -> None:
    story.plans()
    for rank in story.job.ranks:
        if rank.is_alive and rank.terminated:
            story.dies(rank.rank, signal=15)
    story.plans()


@pytest.mark.parametrize("inherit", [inherited_with_agent, snapshot_of])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_whoever_takes_over_in_the_middle_of_a_restart_makes_the_gang_whole(
    moment: str, inherit: Callable[..., object]
) -> None:
    left = running()
    MOMENTS[moment](left)
    left.plans()
    story = successor(left, inherit)
    story.plans()
    story.agent_joins()
    are_gone(story)
    live_again = live(story) if story.job.any_alive else live(wait(story))
    (incarnation,) = set(incarnations(live_again))
    assert incarnation >= 1
    assert sum(rank.restarts for rank in story.job.ranks) == 1
    for rank in story.job.ranks:
        story.exits(rank.rank)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED


def wait(story: Story) -> Story:
    """Let the backoff be over; then all of them start, or none."""
    assert starts(story.passes(60).plans()) == [0, 1, 2]
    return story


def test_whoever_takes_over_says_what_was_said_of_who_died_first() -> None:
    left = running().dies(2)
    are_gone(left)
    story = successor(left, inherited_with_agent)
    story.plans()
    assert story.job.message == left.job.message
    assert story.job.message.startswith("rank 2 was ended by signal 9 (SIGKILL); all ranks are")
