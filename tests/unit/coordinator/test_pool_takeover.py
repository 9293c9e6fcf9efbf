"""How a pool outlives its agent and its coordinator."""

from coordinator.decide.state import AgentState
from coordinator.restore import snapshot_with_agent
from muster.contracts.job import JobStatus, Reason
from tests.support.stories import Story, groups, kills, starts
from tests.unit.coordinator.pool_states import ACTIVE, FAILED, LAST_STEP, active_ranks, states
from tests.unit.coordinator.successors import successor


def test_a_lost_agent_means_new_workers_and_a_later_round() -> None:
    story = Story.training(world_size=2).agent_is_lost()
    assert states(story) == [FAILED, FAILED]
    assert story.job.group.workers == ()
    story.plans()
    story.wakes()
    story.agent_connects().plans()
    story.settles()
    assert states(story) == [FAILED, FAILED, ACTIVE, ACTIVE]
    assert story.job.group.round == 2
    assert story.job.pool.restarts(0) == 1
    assert story.rank(0).restarts == 0, "it was not the fault of the rank"


def test_without_an_agent_no_round_is_published() -> None:
    story = Story.training(world_size=2).agent_disconnects().dies(1)
    assert groups(story.plans()) == []
    assert story.job.agent is AgentState.UNREACHABLE
    assert [group.workers for group in groups(story.agent_connects().plans())] == [(0,)]


def test_a_takeover_keeps_the_living_workers() -> None:
    left = Story.training(world_size=3)
    left.is_asked_to_leave(1).is_scaled(2)
    left.settles()
    story = successor(left, snapshot_with_agent)
    assert [rank.rank for rank in story.job.in_service] == [0, 2]
    assert [story.rank(rank).worker_id for rank in (0, 2)] == [0, 2]
    assert starts(story.agent_connects().plans()) == []
    story.is_ready(0, 2)
    (group,) = groups(story.plans())
    assert group.workers == (0, 2)
    assert group.round == left.job.group.round + 1


def test_training_may_finish_without_a_coordinator() -> None:
    left = Story.training(world_size=2)
    story = successor(left, snapshot_with_agent).agent_connects()
    story.is_ready(0, 1)
    for rank in (0, 1):
        story.joins_group(rank, generation=left.job.group.round)
        story.beats(rank, step=LAST_STEP).exits(rank)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED
    assert [story.rank(rank).restarts for rank in (0, 1)] == [0, 0]


def test_survivors_of_a_lost_agent_keep_their_worker_ids() -> None:
    story = Story.training(world_size=3)
    before = story.job.group.round
    story.agent_is_lost(living=[0, 2]).plans()
    assert states(story) == [ACTIVE, FAILED, ACTIVE]
    story.wakes()
    story.agent_connects().plans()
    assert groups(story.is_ready(0, 2).plans()) == [], "the third is about to be ready"
    (group,) = groups(story.is_ready(1).plans())
    assert group.workers == (0, 2, 3)
    assert group.round == before + 1


def comes_back(story: Story) -> Story:
    story.plans()
    story.agent_connects().plans()
    story.settles()
    return story


def test_a_takeover_of_a_dead_pool_starts_new_workers() -> None:
    left = Story.training(world_size=2, max_workers=4).is_scaled(3)
    left.settles()
    story = comes_back(successor(left))
    assert story.job.status is JobStatus.RUNNING
    assert states(story) == [FAILED] * 3 + [ACTIVE] * 3
    assert active_ranks(story) == [0, 1, 2]
    assert story.job.group.round > left.job.group.round


def test_a_takeover_keeps_a_pause() -> None:
    left = Story.training(world_size=2).is_paused()
    left.settles()
    story = comes_back(successor(left))
    assert (story.job.status, story.job.reason) == (JobStatus.PAUSED, Reason.PAUSED_BY_USER)
    story.is_resumed()
    story.settles()
    assert story.job.status is JobStatus.RUNNING


def test_a_takeover_completes_a_finished_job() -> None:
    left = Story.training(world_size=2).all_beat(LAST_STEP).exits(0)
    story = successor(left)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED


def test_a_takeover_lets_finished_ranks_exit() -> None:
    left = Story.training(world_size=2).all_beat(LAST_STEP).exits(1)
    left.plans()
    story = successor(left, snapshot_with_agent).agent_connects().is_ready(0)
    assert kills(story.plans()) == {}
    story.exits(0).plans()
    assert story.job.status is JobStatus.COMPLETED


def test_a_takeover_does_not_mistake_a_leave_for_the_end() -> None:
    left = Story.training(world_size=3).is_scaled(2)
    left.settles()
    story = comes_back(successor(left))
    assert story.job.status is JobStatus.RUNNING
    assert active_ranks(story) == [0, 1]
