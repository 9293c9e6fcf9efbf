"""Joins and failures in a pool, and the group rounds that follow."""

from dataclasses import replace

from coordinator.decide.actions import PublishGroup, SetStatus
from coordinator.decide.plan_pool import GATHER_SECONDS
from coordinator.decide.state import GroupSnapshot
from muster.contracts.job import JobStatus, Reason
from tests.support.stories import Story, groups, kills, starts
from tests.unit.coordinator.pool_states import ACTIVE, FAILED, SYNCING, members, states

# Joining


def test_two_ranks_that_start_together_get_one_round() -> None:
    story = Story.gathering(world_size=2)
    assert states(story) == [SYNCING, SYNCING]
    assert groups(story.is_ready(0, 1).plans()) == [
        GroupSnapshot(round=1, workers=(0, 1), ranks=(0, 1), attempts=(0, 0))
    ]
    assert story.job.status is JobStatus.STARTING
    assert states(story) == [SYNCING, SYNCING], "no rank has the weights yet"
    story.joins_group(0)
    assert story.plans() == []
    assert story.job.pool.reconfigure
    assert story.joins_group(1).plans() == [SetStatus(status=JobStatus.RUNNING)]
    assert states(story) == [ACTIVE, ACTIVE]
    assert not story.job.pool.reconfigure, "all members have joined"


def test_a_ready_rank_waits_briefly_for_its_siblings() -> None:
    story = Story.gathering(world_size=2).is_ready(0)
    assert groups(story.plans()) == []
    story.passes(GATHER_SECONDS / 2).is_ready(1)
    assert [group.workers for group in groups(story.plans())] == [(0, 1)]


def test_a_late_rank_gets_its_own_round() -> None:
    story = Story.gathering(world_size=2).is_ready(0)
    (alone,) = groups(story.wakes())
    assert alone.workers == (0,)
    assert story.joins_group(0).is_ready(1).plans() == [
        PublishGroup(group=GroupSnapshot(round=2, workers=(0, 1), ranks=(0, 1), attempts=(0, 0)))
    ]
    story.all_join_group()
    assert states(story) == [ACTIVE, ACTIVE]


def test_training_waits_for_the_minimum_of_workers() -> None:
    story = Story.gathering(world_size=3, min_workers=2).is_ready(0).passes(2)
    assert groups(story.plans()) == []
    assert [group.workers for group in groups(story.is_ready(2).plans())] == [(0, 2)]


def test_joining_an_earlier_round_is_ignored() -> None:
    story = Story.gathering(world_size=2).is_ready(0, 1)
    story.plans()
    before = story.job
    assert story.joins_group(0, generation=0).job == before


# Failing


def test_a_death_makes_a_round_and_a_new_worker() -> None:
    story = Story.training(world_size=3)
    done = story.dies(1).plans()
    assert [members(group) for group in groups(done)] == [{0: 0, 2: 2}]
    assert states(story) == [ACTIVE, FAILED, ACTIVE]
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.reason is Reason.WORKER_EXITED
    assert starts(story.wakes()) == [1]
    assert states(story) == [ACTIVE, FAILED, ACTIVE, SYNCING]
    assert story.rank(1).worker_id == 3
    again = story.settles()
    assert [members(group) for group in groups(again)] == [{0: 0, 2: 2, 3: 1}]
    assert story.job.group.attempts == (0, 0, 1)
    assert states(story) == [ACTIVE, FAILED, ACTIVE, ACTIVE]
    assert story.job.status is JobStatus.RUNNING
    assert story.rank(1).restarts == story.job.pool.restarts(1) == 1


def test_members_within_a_step_wait_for_no_newcomer() -> None:
    story = Story.training(world_size=3).dies(1)
    story.plans()
    story.wakes()
    assert story.rank(1).is_alive
    assert [group.workers for group in groups(story.dies(2).plans())] == [(0,)]


def test_two_deaths_at_once_cost_one_round() -> None:
    story = Story.training(world_size=4).dies(1).dies(3)
    assert [group.workers for group in groups(story.plans())] == [(0, 2)]


def test_a_hung_worker_leaves_the_group_at_once() -> None:
    story = Story.training(world_size=2, heartbeat_timeout=10).passes(9).beats(0)
    assert groups(story.plans()) == []
    done = story.passes(1).plans()
    assert kills(done)[1].reason is Reason.HEARTBEAT_TIMEOUT
    assert [group.workers for group in groups(done)] == [(0,)]
    assert states(story) == [ACTIVE, ACTIVE], "its process is still there"
    story.dies(1).plans()
    assert states(story) == [ACTIVE, FAILED]


def test_a_lost_peer_repeats_the_round_once() -> None:
    story = Story.training(world_size=3)
    (group,) = groups(story.loses_peer(0, 2).plans())
    assert group == replace(story.job.group, round=2)
    assert members(group) == {0: 0, 1: 1, 2: 2}
    assert story.plans() == []
    story.rank_says(1, story.rank(1).ready)
    assert story.all_join_group().plans() == []


def test_a_divergent_worker_is_killed_and_replaced() -> None:
    story = Story.training(world_size=3)
    done = story.reports_mismatch(0, 1).reports_mismatch(2, 1).plans()
    (cause,) = kills(done).values()
    assert (list(kills(done)), cause.reason) == ([1], Reason.DIFFERENT_BITS)
    assert [group.workers for group in groups(done)] == [(0, 2)]
    story.dies(1).plans()
    assert (story.job.status, story.job.reason) == (JobStatus.RECOVERING, Reason.DIFFERENT_BITS)
    story.wakes()
    story.settles()
    assert states(story) == [ACTIVE, FAILED, ACTIVE, ACTIVE]
    assert story.job.status is JobStatus.RUNNING


def test_a_divergent_worker_that_exits_first_is_reported() -> None:
    story = Story.training(world_size=3).reports_mismatch(1, 1).exits(1, code=1)
    assert kills(story.plans()) == {}
    assert story.job.reason is Reason.DIFFERENT_BITS


def test_a_rank_that_fails_too_often_fails_the_job() -> None:
    story = Story.training(world_size=2, max_restarts=1).dies(1)
    story.wakes()
    story.settles()
    story.dies(1).plans()
    assert story.job.failure.reason is Reason.RESTART_LIMIT
    story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


def test_restarts_are_charged_to_the_rank() -> None:
    story = Story.training(world_size=3, max_restarts=2)
    for victim in (0, 1, 2, 0, 1, 2):
        story.dies(victim).plans()
        story.passes(31)
        story.all_beat()
        story.settles()
    assert [rank.restarts for rank in story.job.ranks] == [2, 2, 2]
    assert story.job.status is JobStatus.RUNNING
    assert story.job.pool.world_size == 3
