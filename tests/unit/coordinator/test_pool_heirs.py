"""How a pool outlives its agent and its coordinator, told as stories."""

from stories import Story, kills, layouts, starts
from unit.coordinator.heirs import successor
from unit.coordinator.pooled import ACTIVE, FAILED, LAST_STEP, active_ranks, states

from coordinator.rows import inherited_with_agent
from coordinator.snapshot import AgentState
from muster.contracts.job import JobStatus, Reason


def test_generations_go_up_after_a_lost_agent_and_all_workers_are_new() -> None:
    story = Story.training(world_size=2).agent_is_lost()
    assert states(story) == [FAILED, FAILED]
    assert story.job.layout.workers == ()
    story.plans()
    story.wakes()
    story.agent_joins().plans()
    story.settles()
    assert states(story) == [FAILED, FAILED, ACTIVE, ACTIVE]
    assert story.job.layout.generation == 2
    assert story.job.pool.restarts(0) == 1
    assert story.rank(0).restarts == 0, "that was no fault of the rank"


def test_while_the_agent_cannot_be_told_no_layout_is_made() -> None:
    story = Story.training(world_size=2).agent_drops().dies(1)
    assert layouts(story.plans()) == []
    assert story.job.agent is AgentState.UNREACHABLE
    assert [layout.workers for layout in layouts(story.agent_joins().plans())] == [(0,)]


def test_a_coordinator_that_inherits_a_living_pool_goes_on_with_the_same_workers() -> None:
    left = Story.training(world_size=3)
    left.is_to_let_go(1).is_scaled(2)
    left.settles()
    story = successor(left, inherited_with_agent)
    assert [rank.rank for rank in story.job.in_service] == [0, 2]
    assert [story.rank(rank).worker_id for rank in (0, 2)] == [0, 2]
    assert starts(story.agent_joins().plans()) == []
    story.is_ready(0, 2)
    (layout,) = layouts(story.plans())
    assert layout.workers == (0, 2)
    assert layout.generation == left.job.layout.generation + 1


def test_a_training_that_was_over_while_nobody_coordinated_is_over() -> None:
    left = Story.training(world_size=2)
    story = successor(left, inherited_with_agent).agent_joins()
    story.is_ready(0, 1)
    for rank in (0, 1):
        story.takes_up(rank, generation=left.job.layout.generation)
        story.beats(rank, step=LAST_STEP).exits(rank)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED
    assert [story.rank(rank).restarts for rank in (0, 1)] == [0, 0]


def test_after_an_agents_death_its_pool_meets_again_with_the_same_workers() -> None:
    story = Story.training(world_size=3)
    before = story.job.layout.generation
    story.agent_is_lost(living=[0, 2]).plans()
    assert states(story) == [ACTIVE, FAILED, ACTIVE]
    story.wakes()
    story.agent_joins().plans()
    assert layouts(story.is_ready(0, 2).plans()) == [], "the third is about to be ready, too"
    (layout,) = layouts(story.is_ready(1).plans())
    assert layout.workers == (0, 2, 3)
    assert layout.generation == before + 1


def comes_back(story: Story) -> Story:
    story.plans()
    story.agent_joins().plans()
    story.settles()
    return story


def test_a_new_coordinator_goes_on_with_new_workers_and_later_generations() -> None:
    left = Story.training(world_size=2, max_workers=4).is_scaled(3)
    left.settles()
    story = comes_back(successor(left))
    assert story.job.status is JobStatus.RUNNING
    assert states(story) == [FAILED] * 3 + [ACTIVE] * 3
    assert active_ranks(story) == [0, 1, 2]
    assert story.job.layout.generation > left.job.layout.generation


def test_a_new_coordinator_keeps_a_pause() -> None:
    left = Story.training(world_size=2).is_paused()
    left.settles()
    story = comes_back(successor(left))
    assert (story.job.status, story.job.reason) == (JobStatus.PAUSED, Reason.PAUSED_BY_USER)
    story.is_resumed()
    story.settles()
    assert story.job.status is JobStatus.RUNNING


def test_a_new_coordinator_ends_a_job_that_was_done() -> None:
    left = Story.training(world_size=2).all_beat(LAST_STEP).exits(0)
    story = successor(left)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED


def test_who_has_only_to_exit_after_the_last_step_may_do_so_under_a_new_coordinator() -> None:
    left = Story.training(world_size=2).all_beat(LAST_STEP).exits(1)
    left.plans()
    story = successor(left, inherited_with_agent).agent_joins().is_ready(0)
    assert kills(story.plans()) == {}
    story.exits(0).plans()
    assert story.job.status is JobStatus.COMPLETED


def test_a_new_coordinator_does_not_take_a_departure_for_the_end() -> None:
    left = Story.training(world_size=3).is_scaled(2)
    left.settles()
    story = comes_back(successor(left))
    assert story.job.status is JobStatus.RUNNING
    assert active_ranks(story) == [0, 1]
