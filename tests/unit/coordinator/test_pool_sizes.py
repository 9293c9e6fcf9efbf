"""How a pool grows and shrinks, and who leaves it, told as stories."""

from itertools import pairwise

import pytest
from stories import Story, layouts, starts, terminations
from unit.coordinator.pooled import ACTIVE, DRAINING, FAILED, LEFT, active_ranks, members, states

from coordinator.actions import Enlist, Start
from coordinator.plan import plan, wake_at
from coordinator.snapshot import AgentState
from muster.contracts.job import JobStatus

# Scaling


def test_growing_takes_the_lowest_free_ranks_and_shrinking_the_highest() -> None:
    story = Story.training(world_size=2, max_workers=4).is_scaled(4)
    done = story.settles(step=7)
    assert [action.rank for action in done if isinstance(action, Enlist)] == [2, 3]
    assert [members(layout) for layout in layouts(done)] == [{0: 0, 1: 1, 2: 2, 3: 3}]
    assert [member.joined_step for member in story.job.pool.members] == [0, 0, 7, 7]

    done = story.is_scaled(3).plans()
    assert [members(layout) for layout in layouts(done)] == [{0: 0, 1: 1, 2: 2}]
    assert states(story) == [ACTIVE, ACTIVE, ACTIVE, DRAINING]
    assert terminations(done) == [], "it leaves by itself, at a step boundary"
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, ACTIVE, LEFT]
    assert story.goes_on(60) == [], "its rank is not filled again"
    assert story.job.status is JobStatus.RUNNING


def test_a_rank_that_was_let_go_is_filled_again_by_a_new_worker() -> None:
    story = Story.training(world_size=3).is_scaled(2)
    story.settles()
    story.is_scaled(3)
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, LEFT, ACTIVE]
    assert active_ranks(story) == [0, 1, 2]


def test_whoever_is_on_its_way_out_is_not_called_back() -> None:
    """Its exit with code 0 would look like the end of the training."""
    story = Story.training(world_size=3).is_scaled(2)
    story.plans()
    assert not any(isinstance(action, Enlist) for action in story.is_scaled(3).plans())
    assert not story.rank(2).in_service
    story.exits(2).plans()
    assert not story.job.done
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, LEFT, ACTIVE]
    assert story.job.layout.workers == (0, 1, 3)


def test_who_is_not_wanted_any_more_before_it_ever_trained_is_asked_to_go() -> None:
    story = Story.training(world_size=2, max_workers=3).is_scaled(3)
    assert starts(story.plans()) == [2]
    assert terminations(story.is_scaled(2).plans()) == [2]
    story.exits(2).plans()
    assert states(story) == [ACTIVE, ACTIVE, FAILED]
    assert story.rank(2).restarts == 0
    assert story.job.status is JobStatus.RUNNING


def test_a_rank_that_waits_for_its_restart_is_not_started_when_nobody_wants_it_any_more() -> None:
    story = Story.training(world_size=3).dies(2)
    story.plans()
    story.is_scaled(2).plans()
    assert story.goes_on(60) == []
    assert story.job.status is JobStatus.RUNNING


def test_somebody_who_dies_on_the_way_out_has_left_and_costs_nothing() -> None:
    story = Story.training(world_size=3).is_scaled(2)
    story.plans()
    story.dies(2)
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, LEFT]
    assert story.rank(2).restarts == 0
    assert story.job.status is JobStatus.RUNNING


# Leaving


def test_a_named_worker_leaves_and_its_rank_stays_empty() -> None:
    story = Story.training(world_size=3).is_to_let_go(1).is_scaled(2)
    done = story.plans()
    assert [members(layout) for layout in layouts(done)] == [{0: 0, 2: 2}]
    assert states(story) == [ACTIVE, DRAINING, ACTIVE]
    story.settles()
    assert states(story) == [ACTIVE, LEFT, ACTIVE]
    assert story.goes_on(60) == []
    assert story.job.status is JobStatus.RUNNING


def test_after_somebody_left_from_the_middle_the_next_newcomer_takes_its_place() -> None:
    story = Story.training(world_size=3).is_to_let_go(1).is_scaled(2)
    story.settles()
    story.is_scaled(3)
    story.settles()
    assert active_ranks(story) == [0, 2, 1]


@pytest.mark.parametrize("worker_id", [3, 99, -1])
def test_who_was_never_there_cannot_leave(worker_id: int) -> None:
    story = Story.training(world_size=3)
    before = story.job
    assert story.is_to_let_go(worker_id).job == before


def test_whoever_is_asked_to_leave_and_dies_first_is_not_replaced() -> None:
    story = Story.training(world_size=3).dies(1)
    story.plans()
    story.is_to_let_go(1).is_scaled(2)
    story.settles()
    assert active_ranks(story) == [0, 2], "nobody else had to go instead"
    assert story.goes_on(60) == []


# Never


def test_there_are_never_more_starts_than_the_pool_has_room_for() -> None:
    story = Story.training(world_size=2, max_workers=2).is_scaled(5)
    for _ in range(3):
        story.plans()
        story.settles()
    assert story.job.pool.world_size == 2
    assert all(action != Start(rank=2) for action in plan(story.job, story.now))


def test_generations_only_go_up() -> None:
    story = Story.training(world_size=3, max_workers=4)
    told = []
    for change in (
        lambda: story.dies(0),
        lambda: story.is_scaled(4),
        story.is_paused,
        lambda: story.is_stranded(1),
        story.is_resumed,
        story.agent_is_lost,
        lambda: story.is_scaled(2),
    ):
        change()
        if story.job.agent is AgentState.ABSENT:
            story.plans()
            story.now = wake_at(story.job, story.now)
            story.plans()
            story.agent_joins()
        told += layouts(story.settles())
        told += layouts(story.goes_on(2))
    generations = [layout.generation for layout in told]
    assert len(generations) > 5
    assert all(before < after for before, after in pairwise(generations))
