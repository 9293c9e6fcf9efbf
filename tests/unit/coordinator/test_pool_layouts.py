"""Who joins a pool and who fails in it, and the layouts that follow, told as stories."""

from dataclasses import replace

from stories import Story, kills, layouts, starts
from unit.coordinator.pooled import ACTIVE, FAILED, SYNCING, members, states

from coordinator.actions import Announce, Move
from coordinator.pool_plan import COMPANY_SECONDS
from coordinator.snapshot import LayoutSnapshot
from muster.contracts.job import JobStatus, Reason

# Joining


def test_two_ranks_that_start_together_get_one_layout() -> None:
    story = Story.gathering(world_size=2)
    assert states(story) == [SYNCING, SYNCING]
    assert layouts(story.is_ready(0, 1).plans()) == [
        LayoutSnapshot(generation=1, workers=(0, 1), ranks=(0, 1), incarnations=(0, 0))
    ]
    assert story.job.status is JobStatus.STARTING
    assert states(story) == [SYNCING, SYNCING], "nobody has the weights yet"
    story.takes_up(0)
    assert story.plans() == []
    assert story.job.pool.reconfigure
    assert story.takes_up(1).plans() == [Move(status=JobStatus.RUNNING)]
    assert states(story) == [ACTIVE, ACTIVE]
    assert not story.job.pool.reconfigure, "the layout is in force"


def test_who_is_ready_waits_a_moment_for_who_was_started_with_it() -> None:
    story = Story.gathering(world_size=2).is_ready(0)
    assert layouts(story.plans()) == []
    story.passes(COMPANY_SECONDS / 2).is_ready(1)
    assert [layout.workers for layout in layouts(story.plans())] == [(0, 1)]


def test_a_newcomer_that_comes_late_gets_a_layout_of_its_own() -> None:
    story = Story.gathering(world_size=2).is_ready(0)
    (alone,) = layouts(story.wakes())
    assert alone.workers == (0,)
    assert story.takes_up(0).is_ready(1).plans() == [
        Announce(
            layout=LayoutSnapshot(generation=2, workers=(0, 1), ranks=(0, 1), incarnations=(0, 0))
        )
    ]
    story.all_take_up()
    assert states(story) == [ACTIVE, ACTIVE]


def test_nobody_trains_before_there_are_enough() -> None:
    story = Story.gathering(world_size=3, min_workers=2).is_ready(0).passes(2)
    assert layouts(story.plans()) == []
    assert [layout.workers for layout in layouts(story.is_ready(2).plans())] == [(0, 2)]


def test_a_layout_of_the_past_that_is_taken_up_counts_for_nothing() -> None:
    story = Story.gathering(world_size=2).is_ready(0, 1)
    story.plans()
    before = story.job
    assert story.takes_up(0, generation=0).job == before


# Failing


def test_a_death_makes_a_layout_at_once_and_a_replacement_joins_as_a_new_worker() -> None:
    story = Story.training(world_size=3)
    done = story.dies(1).plans()
    assert [members(layout) for layout in layouts(done)] == [{0: 0, 2: 2}]
    assert states(story) == [ACTIVE, FAILED, ACTIVE]
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.reason is Reason.WORKER_EXITED
    assert starts(story.wakes()) == [1]
    assert states(story) == [ACTIVE, FAILED, ACTIVE, SYNCING]
    assert story.rank(1).worker_id == 3
    again = story.settles()
    assert [members(layout) for layout in layouts(again)] == [{0: 0, 2: 2, 3: 1}]
    assert story.job.layout.incarnations == (0, 0, 1)
    assert states(story) == [ACTIVE, FAILED, ACTIVE, ACTIVE]
    assert story.job.status is JobStatus.RUNNING
    assert story.rank(1).restarts == story.job.pool.restarts(1) == 1


def test_somebody_who_waits_in_the_middle_of_a_step_does_not_wait_for_company() -> None:
    story = Story.training(world_size=3).dies(1)
    story.plans()
    story.wakes()
    assert story.rank(1).is_alive
    assert [layout.workers for layout in layouts(story.dies(2).plans())] == [(0,)]


def test_two_at_once_cost_one_layout() -> None:
    story = Story.training(world_size=4).dies(1).dies(3)
    assert [layout.workers for layout in layouts(story.plans())] == [(0, 2)]


def test_who_hangs_is_left_out_from_the_moment_it_is_to_be_killed() -> None:
    story = Story.training(world_size=2, heartbeat_timeout=10).passes(9).beats(0)
    assert layouts(story.plans()) == []
    done = story.passes(1).plans()
    assert kills(done)[1].reason is Reason.HEARTBEAT_TIMEOUT
    assert [layout.workers for layout in layouts(done)] == [(0,)]
    assert states(story) == [ACTIVE, ACTIVE], "its process is still there"
    story.dies(1).plans()
    assert states(story) == [ACTIVE, FAILED]


def test_stranded_ranks_get_a_new_generation_of_the_same_members_once() -> None:
    story = Story.training(world_size=3)
    (layout,) = layouts(story.is_stranded(0, 2).plans())
    assert layout == replace(story.job.layout, generation=2)
    assert members(layout) == {0: 0, 1: 1, 2: 2}
    assert story.plans() == []
    story.rank_says(1, story.rank(1).ready)
    assert story.all_take_up().plans() == []


def test_a_worker_that_differs_is_killed_and_replaced() -> None:
    story = Story.training(world_size=3)
    done = story.disputes(0, 1).disputes(2, 1).plans()
    (cause,) = kills(done).values()
    assert (list(kills(done)), cause.reason) == ([1], Reason.DIFFERENT_BITS)
    assert [layout.workers for layout in layouts(done)] == [(0, 2)]
    story.dies(1).plans()
    assert (story.job.status, story.job.reason) == (JobStatus.RECOVERING, Reason.DIFFERENT_BITS)
    story.wakes()
    story.settles()
    assert states(story) == [ACTIVE, FAILED, ACTIVE, ACTIVE]
    assert story.job.status is JobStatus.RUNNING


def test_a_worker_that_differs_and_is_gone_before_it_is_killed_is_told_as_one() -> None:
    story = Story.training(world_size=3).disputes(1, 1).exits(1, code=1)
    assert kills(story.plans()) == {}
    assert story.job.reason is Reason.DIFFERENT_BITS


def test_a_rank_that_fails_too_often_fails_the_job() -> None:
    story = Story.training(world_size=2, max_restarts=1).dies(1)
    story.wakes()
    story.settles()
    story.dies(1).plans()
    assert story.job.verdict.reason is Reason.RESTART_LIMIT
    story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


def test_workers_of_one_rank_fail_at_that_ranks_expense() -> None:
    story = Story.training(world_size=3, max_restarts=2)
    for victim in (0, 1, 2, 0, 1, 2):
        story.dies(victim).plans()
        story.passes(31)
        story.all_beat()
        story.settles()
    assert [rank.restarts for rank in story.job.ranks] == [2, 2, 2]
    assert story.job.status is JobStatus.RUNNING
    assert story.job.pool.world_size == 3
