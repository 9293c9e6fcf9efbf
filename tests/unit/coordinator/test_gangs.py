"""A gang runs as a whole or not at all."""

from collections.abc import Callable
from itertools import product

import pytest

from coordinator.decide.actions import LoopStalled, SetStatus
from coordinator.decide.state import AgentState
from coordinator.restore import snapshot_of, snapshot_with_agent
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import Executing
from muster.contracts.retry import RetryClass
from tests.support.stories import Story, kills, starts, terminations
from tests.unit.coordinator.successors import successor

COMMAND = ("python", "train.py")


def running(world_size: int = 3, **spec: object) -> Story:
    """A gang whose ranks all run, of a command without heartbeats."""
    asked = {"command": COMMAND, "restart_scope": "gang", "world_size": world_size, **spec}
    return live(Story.starting(**asked))


def live(story: Story) -> Story:
    for rank in story.job.ranks:
        if rank.is_alive:
            story.is_spawned(rank.rank).rank_says(rank.rank, Executing())
    story.plans()
    assert story.job.status is JobStatus.RUNNING
    return story


def attempts(story: Story) -> list[int]:
    return [rank.attempt for rank in story.job.ranks]


def test_a_gang_restarts_as_a_whole() -> None:
    story = running()
    assert terminations(story.dies(1).plans()) == [0, 2]
    assert story.dies(0, signal=15).plans() == [], "one is left"
    assert story.exits(2, code=0).plans() == [], "the backoff of the first is not over"
    assert starts(story.wakes()) == [0, 1, 2]
    assert attempts(live(story)) == [1, 1, 1]


def test_only_the_first_rank_to_end_is_charged() -> None:
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


def test_the_status_names_the_rank_that_died_first() -> None:
    story = running().dies(1)
    story.plans()
    story.dies(0, signal=15).dies(2, signal=15).plans()
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message == (
        "rank 1 was ended by signal 9 (SIGKILL); all ranks are started again, restart 1 of 50"
    )


def test_a_follow_up_failure_is_not_charged() -> None:
    story = running().dies(1).exits(0, code=1)
    assert terminations(story.plans()) == [2]
    assert story.rank(0).restarts == 0


def test_a_finished_rank_restarts_with_its_gang() -> None:
    story = running().exits(0, code=0)
    assert story.plans() == []
    assert story.job.status is JobStatus.RUNNING
    assert terminations(story.dies(1).plans()) == [2]
    story.dies(2, signal=15)
    assert starts(story.wakes()) == [0, 1, 2]
    assert not story.rank(0).finished


def test_a_gang_completes_when_all_its_ranks_do() -> None:
    story = running().exits(0).exits(1)
    assert story.plans() == []
    (*_, move) = [one for one in story.exits(2).plans() if isinstance(one, SetStatus)]
    assert move.status is JobStatus.COMPLETED


def test_a_gang_whose_last_rank_died_restarts() -> None:
    story = running(2).exits(0).dies(1)
    story.plans()
    assert starts(story.wakes()) == [0, 1]


def test_a_stubborn_rank_is_killed_after_the_grace() -> None:
    story = running(2, stop_grace_seconds=7).dies(0)
    story.plans()
    assert kills(story.passes(6.9).plans()) == {}
    (cause,) = kills(story.wakes()).values()
    assert cause.reason is Reason.GANG_RESTARTED
    assert starts(story.plans()) == []
    assert starts(story.dies(1).plans()) == [0, 1]
    assert story.rank(1).endings == {RetryClass.STOPPED: 1}


def test_the_budget_of_the_first_rank_to_end_decides() -> None:
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


def test_do_not_retry_fails_the_whole_job() -> None:
    story = running(2).exits(0, code=64)
    assert terminations(story.plans()) == [1]
    story.dies(1, signal=15).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.DO_NOT_RETRY


@pytest.mark.parametrize("request_", list(StopRequest))
def test_a_stop_during_a_restart_starts_nothing(request_: StopRequest) -> None:
    story = running().dies(1)
    story.plans()
    story.is_stopped(request_).plans()
    story.dies(0, signal=15).dies(2, signal=15)
    assert starts(story.plans()) == []
    assert story.job.status is JobStatus.STOPPED


def test_a_stop_before_the_next_start_starts_nothing() -> None:
    story = running(2).dies(1)
    story.plans()
    story.dies(0, signal=15).is_stopped()
    assert starts(story.plans()) == []
    assert story.job.status is JobStatus.STOPPED


def test_a_lost_agent_with_living_ranks_restarts_none() -> None:
    story = running().agent_is_lost(living=(0, 1, 2))
    story.plans()
    assert story.agent_connects().plans() == []
    assert attempts(live(story)) == [0, 0, 0]


def test_a_gang_restart_after_a_lost_agent_is_free() -> None:
    story = running().agent_is_lost(living=(0, 2))
    story.plans()
    assert terminations(story.agent_connects().plans()) == [0, 2]
    story.dies(0, signal=15).dies(2, signal=15)
    assert starts(story.plans()) == [0, 1, 2]
    assert [rank.restarts for rank in story.job.ranks] == [0, 0, 0]


def test_without_an_agent_no_rank_is_terminated() -> None:
    story = running().agent_disconnects().dies(1)
    assert terminations(story.plans()) == []
    assert story.job.agent is AgentState.UNREACHABLE
    assert terminations(story.agent_connects().plans()) == [0, 2]


def test_two_deaths_in_any_order_are_one_restart() -> None:
    for first, second in product(range(3), repeat=2):
        if first == second:
            continue
        story = running().dies(first).dies(second)
        (last,) = terminations(story.plans())
        story.dies(last, signal=15)
        story.wakes()
        assert attempts(story) == [1, 1, 1]
        assert sum(rank.restarts for rank in story.job.ranks) == 1


def test_ranks_outside_a_gang_restart_alone() -> None:
    story = live(Story.starting(command=COMMAND, world_size=3)).dies(1)
    assert terminations(story.plans()) == []
    assert starts(story.wakes()) == [1]


def test_a_stall_of_the_loop_extends_the_grace() -> None:
    story = running(2, stop_grace_seconds=7).dies(0)
    story.plans()
    story.passes(100).observes(LoopStalled(seconds=100))
    assert kills(story.plans()) == {}
    assert list(kills(story.wakes())) == [1]


def test_a_finished_rank_of_a_gang_keeps_its_slot() -> None:
    assert running().exits(0).job.slots == 3
    assert live(Story.starting(command=COMMAND, world_size=3)).exits(0).job.slots == 2


# A coordinator that dies in the middle

MOMENTS: dict[str, Callable[[Story], object]] = {
    "one died": lambda story: story.dies(1),
    "the others were asked to go": lambda story: story.dies(1).plans(),
    "one has gone": lambda story: (story.dies(1).plans(), story.dies(0, signal=15)),
    "one was done before": lambda story: story.exits(0).dies(1).plans(),
    "none is left": lambda story: is_idle(story.dies(1)),
    "all were started": lambda story: (is_idle(story.dies(1)), story.passes(60).plans()),
}


def is_idle(story: Story) -> None:
    story.plans()
    for rank in story.job.ranks:
        if rank.is_alive and rank.terminated:
            story.dies(rank.rank, signal=15)
    story.plans()


@pytest.mark.parametrize("inherit", [snapshot_with_agent, snapshot_of])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_takeover_during_a_restart_completes_it(
    moment: str, inherit: Callable[..., object]
) -> None:
    left = running()
    MOMENTS[moment](left)
    left.plans()
    story = successor(left, inherit)
    story.plans()
    story.agent_connects()
    is_idle(story)
    live_again = live(story) if story.job.any_alive else live(wait(story))
    (attempt,) = set(attempts(live_again))
    assert attempt >= 1
    assert sum(rank.restarts for rank in story.job.ranks) == 1
    for rank in story.job.ranks:
        story.exits(rank.rank)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED


def wait(story: Story) -> Story:
    """Let the backoff pass; then all ranks start."""
    assert starts(story.passes(60).plans()) == [0, 1, 2]
    return story


def test_a_takeover_keeps_the_message_of_the_restart() -> None:
    left = running().dies(2)
    is_idle(left)
    story = successor(left, snapshot_with_agent)
    story.plans()
    assert story.job.message == left.job.message
    assert story.job.message.startswith("rank 2 was ended by signal 9 (SIGKILL); all ranks are")
