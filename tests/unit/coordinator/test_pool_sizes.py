"""How a pool grows and shrinks, and how workers leave it."""

from itertools import pairwise

import pytest

from coordinator.decide.actions import AddRank, Start
from coordinator.decide.plan import plan, wake_at
from coordinator.decide.state import AgentState
from muster.contracts.job import JobStatus
from tests.support.stories import Story, groups, starts, terminations
from tests.unit.coordinator.pool_states import (
    ACTIVE,
    DRAINING,
    FAILED,
    LEFT,
    active_ranks,
    members,
    states,
)

# Scaling


def test_a_pool_grows_low_and_shrinks_high() -> None:
    story = Story.training(world_size=2, max_workers=4).is_scaled(4)
    done = story.settles(step=7)
    assert [action.rank for action in done if isinstance(action, AddRank)] == [2, 3]
    assert [members(group) for group in groups(done)] == [{0: 0, 1: 1, 2: 2, 3: 3}]
    assert [member.joined_step for member in story.job.pool.members] == [0, 0, 7, 7]

    done = story.is_scaled(3).plans()
    assert [members(group) for group in groups(done)] == [{0: 0, 1: 1, 2: 2}]
    assert states(story) == [ACTIVE, ACTIVE, ACTIVE, DRAINING]
    assert terminations(done) == [], "it leaves by itself, at a step boundary"
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, ACTIVE, LEFT]
    assert story.runs_for(60) == [], "its rank is not filled again"
    assert story.job.status is JobStatus.RUNNING


def test_a_removed_rank_returns_as_a_new_worker() -> None:
    story = Story.training(world_size=3).is_scaled(2)
    story.settles()
    story.is_scaled(3)
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, LEFT, ACTIVE]
    assert active_ranks(story) == [0, 1, 2]


def test_a_leaving_worker_is_not_called_back() -> None:
    """Its exit with code 0 would look like the end of the training."""
    story = Story.training(world_size=3).is_scaled(2)
    story.plans()
    assert not any(isinstance(action, AddRank) for action in story.is_scaled(3).plans())
    assert not story.rank(2).in_service
    story.exits(2).plans()
    assert not story.job.done
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, LEFT, ACTIVE]
    assert story.job.group.workers == (0, 1, 3)


def test_a_newcomer_that_is_not_wanted_is_terminated() -> None:
    story = Story.training(world_size=2, max_workers=3).is_scaled(3)
    assert starts(story.plans()) == [2]
    assert terminations(story.is_scaled(2).plans()) == [2]
    story.exits(2).plans()
    assert states(story) == [ACTIVE, ACTIVE, FAILED]
    assert story.rank(2).restarts == 0
    assert story.job.status is JobStatus.RUNNING


def test_a_removed_rank_is_not_restarted() -> None:
    story = Story.training(world_size=3).dies(2)
    story.plans()
    story.is_scaled(2).plans()
    assert story.runs_for(60) == []
    assert story.job.status is JobStatus.RUNNING


def test_a_leaving_worker_that_dies_costs_nothing() -> None:
    story = Story.training(world_size=3).is_scaled(2)
    story.plans()
    story.dies(2)
    story.settles()
    assert states(story) == [ACTIVE, ACTIVE, LEFT]
    assert story.rank(2).restarts == 0
    assert story.job.status is JobStatus.RUNNING


# Leaving


def test_a_named_worker_leaves_and_its_rank_stays_empty() -> None:
    story = Story.training(world_size=3).is_asked_to_leave(1).is_scaled(2)
    done = story.plans()
    assert [members(group) for group in groups(done)] == [{0: 0, 2: 2}]
    assert states(story) == [ACTIVE, DRAINING, ACTIVE]
    story.settles()
    assert states(story) == [ACTIVE, LEFT, ACTIVE]
    assert story.runs_for(60) == []
    assert story.job.status is JobStatus.RUNNING


def test_a_newcomer_takes_the_gap_of_a_left_worker() -> None:
    story = Story.training(world_size=3).is_asked_to_leave(1).is_scaled(2)
    story.settles()
    story.is_scaled(3)
    story.settles()
    assert active_ranks(story) == [0, 2, 1]


@pytest.mark.parametrize("worker_id", [3, 99, -1])
def test_an_unknown_worker_cannot_leave(worker_id: int) -> None:
    story = Story.training(world_size=3)
    before = story.job
    assert story.is_asked_to_leave(worker_id).job == before


def test_a_worker_that_dies_before_leaving_is_not_replaced() -> None:
    story = Story.training(world_size=3).dies(1)
    story.plans()
    story.is_asked_to_leave(1).is_scaled(2)
    story.settles()
    assert active_ranks(story) == [0, 2], "no other worker was removed instead"
    assert story.runs_for(60) == []


# Never


def test_starts_never_exceed_the_room_of_the_pool() -> None:
    story = Story.training(world_size=2, max_workers=2).is_scaled(5)
    for _ in range(3):
        story.plans()
        story.settles()
    assert story.job.pool.world_size == 2
    assert all(action != Start(rank=2) for action in plan(story.job, story.now))


def test_rounds_only_rise() -> None:
    story = Story.training(world_size=3, max_workers=4)
    told = []
    for change in (
        lambda: story.dies(0),
        lambda: story.is_scaled(4),
        story.is_paused,
        lambda: story.loses_peer(1),
        story.is_resumed,
        story.agent_is_lost,
        lambda: story.is_scaled(2),
    ):
        change()
        if story.job.agent is AgentState.ABSENT:
            story.plans()
            story.now = wake_at(story.job, story.now)
            story.plans()
            story.agent_connects()
        told += groups(story.settles())
        told += groups(story.runs_for(2))
    generations = [group.round for group in told]
    assert len(generations) > 5
    assert all(before < after for before, after in pairwise(generations))
