"""How a pool ends, by its last step or from outside."""

from coordinator.decide.plan import EXIT_SECONDS
from muster.contracts.job import JobStatus, StopRequest
from tests.support.stories import Story, groups, kills, terminations
from tests.unit.coordinator.pool_states import ACTIVE, DRAINING, LAST_STEP, LEFT, members, states

# The last step


def test_a_rank_that_exits_after_the_last_step_ends_the_job() -> None:
    story = Story.training(world_size=3).all_beat(LAST_STEP).exits(1)
    assert story.job.done
    assert story.plans() == [], "the others only have to exit"
    story.exits(0).exits(2).plans()
    assert story.job.status is JobStatus.COMPLETED
    assert states(story) == [LEFT, LEFT, LEFT]


def test_a_rank_that_hangs_after_the_last_step_is_killed() -> None:
    story = Story.training(world_size=2, stop_grace_seconds=30).all_beat(LAST_STEP).exits(1)
    assert terminations(story.passes(EXIT_SECONDS).plans()) == [0]
    assert story.runs_for(27) == []
    assert set(kills(story.runs_for(1))) == {0}
    story.dies(0).plans()
    assert story.job.status is JobStatus.COMPLETED


def test_a_rank_that_dies_after_the_last_step_is_not_replaced() -> None:
    story = Story.training(world_size=2).all_beat(LAST_STEP).exits(1).dies(0)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED
    assert story.rank(0).restarts == 0


def test_the_end_of_a_job_does_not_pause_it() -> None:
    story = Story.training(world_size=2, min_workers=2).all_beat(LAST_STEP).exits(1)
    assert story.plans() == []
    assert story.job.status is JobStatus.RUNNING
    story.exits(0).plans()
    assert story.job.status is JobStatus.COMPLETED


def test_a_job_that_lost_a_worker_after_the_last_step_still_ends() -> None:
    story = Story.training(world_size=2, min_workers=2).all_beat(LAST_STEP).dies(1)
    story.plans()
    assert story.job.status is JobStatus.PAUSED
    story.exits(0).plans()
    assert story.job.status is JobStatus.COMPLETED


def test_code_0_before_the_last_step_is_a_failure() -> None:
    story = Story.training(world_size=2).all_beat(LAST_STEP - 1).exits(1)
    story.plans()
    assert not story.job.done
    assert story.job.message == (
        "rank 1 exited with code 0 before its training was over; it is started again "
        "(failure 1 of 5 in a row without a new checkpoint)"
    )


def test_code_0_without_training_is_a_failure() -> None:
    story = Story.gathering(world_size=1).says_hello(0).exits(0)
    story.plans()
    assert story.rank(0).restarts == 1
    assert "rank 0 exited with code 0 before its training was over" in story.job.message
    assert "0 of at least 1 workers are active" in story.job.message


# Ends from outside


def test_on_a_stop_the_saver_exits_first() -> None:
    story = Story.training(world_size=3).is_stopped()
    assert terminations(story.plans()) == [0]
    assert story.plans() == []
    assert terminations(story.exits(0).plans()) == [1, 2]
    assert states(story) == [LEFT, DRAINING, DRAINING]
    assert story.exits(1).exits(2).plans()
    assert story.job.status is JobStatus.STOPPED
    assert states(story) == [LEFT, LEFT, LEFT]


def test_a_stop_replaces_a_dying_saver() -> None:
    story = Story.training(world_size=3).is_stopped()
    story.plans()
    (last,) = groups(story.dies(0).plans())
    assert members(last) == {1: 1, 2: 2}
    assert last.paused
    assert story.plans() == [], "no rank exits before one can save"
    assert terminations(story.all_join_group(step=7).plans()) == [1]
    assert terminations(story.exits(1).plans()) == [2]
    story.exits(2).plans()
    assert story.job.status is JobStatus.STOPPED


def test_a_stop_replaces_a_dead_saver() -> None:
    story = Story.training(world_size=2, min_workers=2).dies(0).is_stopped()
    (last,) = groups(story.plans())
    assert members(last) == {1: 1}
    assert terminations(story.all_join_group(step=7).plans()) == [1]


def test_a_stop_with_nothing_to_save_ends_all_at_once() -> None:
    story = Story.gathering(world_size=2).is_ready(0, 1).is_stopped()
    assert terminations(story.plans()) == [0, 1]


def test_a_stop_replaces_a_round_with_a_dead_member() -> None:
    story = Story.training(world_size=3).dies(2)
    story.plans()
    story.dies(1).is_stopped()
    (last,) = groups(story.plans())
    assert members(last) == {0: 0}
    assert terminations(story.all_join_group(step=7).plans()) == [0]


def test_a_paused_job_can_be_stopped() -> None:
    story = Story.training(world_size=2).is_paused()
    story.settles()
    story.is_stopped()
    story.settles()
    assert story.job.status is JobStatus.STOPPED


def test_a_member_that_outstays_the_grace_is_killed() -> None:
    story = Story.training(world_size=2).is_stopped(StopRequest.GRACEFUL, 5)
    story.plans()
    story.exits(0)
    assert set(kills(story.passes(5).plans())) == {1}
    story.dies(1).plans()
    assert story.job.status is JobStatus.STOPPED


def test_an_interrupted_pool_resumes_with_new_workers() -> None:
    story = Story.training(world_size=2).is_interrupted()
    story.settles()
    assert story.job.status is JobStatus.QUEUED
    assert states(story) == [LEFT, LEFT]
    before = story.job.group.round
    story.is_admitted().plans()
    story.agent_connects().plans()
    story.settles()
    assert story.job.status is JobStatus.RUNNING
    assert story.job.group.workers == (2, 3)
    assert story.job.group.round > before


def test_a_preempted_worker_costs_no_restart() -> None:
    story = Story.training(world_size=2).beats(1, 5, stopping=True)
    assert [group.workers for group in groups(story.plans())] == [(0,)]
    story.exits(1).plans()
    assert states(story) == [ACTIVE, LEFT]
    assert story.rank(1).restarts == 0
    story.wakes()
    story.settles()
    assert states(story) == [ACTIVE, LEFT, ACTIVE]
