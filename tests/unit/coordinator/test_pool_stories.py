"""How the pool of a synchronous job is looked after, told as stories."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from stories import Story, kills, layouts, starts, terminations

from coordinator.actions import Announce, Enlist, Move, Start
from coordinator.moment import Moment
from coordinator.plan import PARTING_SECONDS, plan, wake_at
from coordinator.pool_plan import COMPANY_SECONDS
from coordinator.pool_rows import members_of
from coordinator.rows import Attachment, change_of, inherited_with_agent, snapshot_of, workers_of
from coordinator.snapshot import AgentState, JobSnapshot, LayoutSnapshot
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.pool import WorkerState
from store.records import Job

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)

LAST_STEP = 100
"""Of the jobs in these stories: what `stories.beat` says."""

SYNCING, ACTIVE, DRAINING, FAILED, LEFT = WorkerState


def states(story: Story) -> list[WorkerState]:
    """Return the state of every worker there ever was, by its id."""
    return [member.state for member in story.job.pool.members]


def members(layout: LayoutSnapshot) -> dict[int, int]:
    """Return which worker has which rank."""
    return dict(zip(layout.workers, layout.ranks, strict=True))


def active_ranks(story: Story) -> list[int]:
    return [member.rank for member in story.job.pool.active]


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


# Pausing


def test_a_pause_is_a_layout_in_which_nobody_steps_and_resuming_is_the_next() -> None:
    story = Story.training(world_size=2)
    (pause,) = layouts(story.is_paused().plans())
    assert (pause.workers, pause.paused, pause.generation) == ((0, 1), True, 2)
    assert story.job.status is JobStatus.RUNNING, "until all of them have come to it"
    assert story.takes_up(0).plans() == []
    (move,) = story.takes_up(1).plans()
    assert (move.status, move.reason) == (JobStatus.PAUSED, Reason.PAUSED_BY_USER)
    assert layouts(story.goes_on(60)) == []
    (goes_on,) = layouts(story.is_resumed().plans())
    assert (goes_on.workers, goes_on.paused, goes_on.generation) == ((0, 1), False, 3)
    assert story.job.status is JobStatus.RUNNING


def test_a_pool_that_is_paused_is_looked_after_and_stays_paused() -> None:
    story = Story.training(world_size=2).is_paused()
    story.settles()
    (layout,) = layouts(story.dies(1).plans())
    assert layout.paused
    assert story.job.status is JobStatus.RECOVERING
    story.wakes()
    story.settles()
    assert story.job.status is JobStatus.PAUSED
    assert story.job.layout.workers == (0, 2)


def test_who_is_paused_is_not_blamed_for_taking_no_step() -> None:
    story = Story.training(world_size=2, progress_timeout_seconds=20).is_paused()
    story.settles()
    assert kills(story.goes_on(100)) == {}
    story.is_resumed().plans()
    assert kills(story.goes_on(19)) == {}, "its time begins anew"
    assert set(kills(story.goes_on(2))) == {0, 1}


def test_a_newcomer_that_waits_for_others_is_not_blamed_for_taking_no_step() -> None:
    story = Story.gathering(world_size=2, min_workers=2, progress_timeout_seconds=20).is_ready(0)
    assert kills(story.goes_on(60)) == {}


def test_a_program_that_hangs_before_it_is_ready_is_replaced_after_the_start_grace() -> None:
    story = Story.gathering(
        world_size=2, min_workers=2, progress_timeout_seconds=20, start_grace_seconds=50
    )
    story.is_ready(0).says_hello(1)
    assert kills(story.goes_on(49)) == {}
    (killed,) = kills(story.goes_on(2)).items()
    assert killed[0] == 1
    assert killed[1].message == "beat but was not ready to train for 50 s and was killed"


def test_without_a_limit_a_program_may_take_its_time_to_begin() -> None:
    story = Story.gathering(world_size=1, start_grace_seconds=50).says_hello(0)
    assert kills(story.goes_on(1000)) == {}


def test_who_waits_for_a_rank_that_hangs_is_not_blamed_with_it() -> None:
    story = Story.training(world_size=3, progress_timeout_seconds=20)
    killed = {}
    for _ in range(15):
        story.passes(2).beats(0, waiting=True).beats(1).beats(2, waiting=True)
        killed |= kills(story.plans())
    assert {rank: cause.reason for rank, cause in killed.items()} == {1: Reason.NO_PROGRESS}
    story.settles()
    assert [rank.restarts for rank in story.job.ranks] == [0, 1, 0]


def test_a_rank_whose_last_word_is_old_is_not_blamed_before_it_has_beaten() -> None:
    story = Story.training(world_size=1, progress_timeout_seconds=1).beats(0, step=1)
    assert kills(story.passes(2).plans()) == {}
    assert kills(story.beats(0, step=1, waiting=True).plans()) == {}
    assert kills(story.passes(2).beats(0, step=1).plans()) == {}, "its time begins anew"
    assert set(kills(story.passes(2).beats(0, step=1).plans())) == {0}


def test_with_too_few_workers_training_pauses_and_goes_on_by_itself() -> None:
    story = Story.training(world_size=2, min_workers=2).dies(1)
    assert layouts(story.plans()) == [], "who is left waits where it is"
    assert (story.job.status, story.job.reason) == (JobStatus.PAUSED, Reason.TOO_FEW_WORKERS)
    assert "1 of at least 2 workers are active" in story.job.message
    assert starts(story.wakes()) == [1]
    story.settles()
    assert story.job.status is JobStatus.RUNNING
    assert story.job.layout.workers == (0, 2)


# The last step


def test_a_rank_that_exits_after_the_last_step_ends_the_job() -> None:
    story = Story.training(world_size=3).all_beat(LAST_STEP).exits(1)
    assert story.job.done
    assert story.plans() == [], "the others have only to exit"
    story.exits(0).exits(2).plans()
    assert story.job.status is JobStatus.COMPLETED
    assert states(story) == [LEFT, LEFT, LEFT]


def test_who_hangs_after_the_last_step_is_told_and_then_killed() -> None:
    story = Story.training(world_size=2, stop_grace_seconds=30).all_beat(LAST_STEP).exits(1)
    assert terminations(story.passes(PARTING_SECONDS).plans()) == [0]
    assert story.goes_on(27) == []
    assert set(kills(story.goes_on(1))) == {0}
    story.dies(0).plans()
    assert story.job.status is JobStatus.COMPLETED


def test_a_rank_that_dies_after_the_last_step_is_not_replaced() -> None:
    story = Story.training(world_size=2).all_beat(LAST_STEP).exits(1).dies(0)
    story.plans()
    assert story.job.status is JobStatus.COMPLETED
    assert story.rank(0).restarts == 0


def test_the_end_of_a_job_is_no_shortage_of_workers() -> None:
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


def test_code_0_in_the_middle_of_the_training_is_a_failure() -> None:
    story = Story.training(world_size=2).all_beat(LAST_STEP - 1).exits(1)
    story.plans()
    assert not story.job.done
    assert story.job.message == (
        "rank 1 exited with code 0 before its training was over; it is started again "
        "(failure 1 of 5 in a row without a new checkpoint)"
    )


def test_code_0_of_a_program_that_never_trained_is_a_failure() -> None:
    story = Story.gathering(world_size=1).says_hello(0).exits(0)
    story.plans()
    assert story.rank(0).restarts == 1
    assert "rank 0 exited with code 0 before its training was over" in story.job.message
    assert "0 of at least 1 workers are active" in story.job.message


# Ends from outside


def test_at_a_stop_the_one_that_saves_goes_first() -> None:
    story = Story.training(world_size=3).is_stopped()
    assert terminations(story.plans()) == [0]
    assert story.plans() == []
    assert terminations(story.exits(0).plans()) == [1, 2]
    assert states(story) == [LEFT, DRAINING, DRAINING]
    assert story.exits(1).exits(2).plans()
    assert story.job.status is JobStatus.STOPPED
    assert states(story) == [LEFT, LEFT, LEFT]


def test_a_stop_loses_no_work_when_the_one_that_saves_dies() -> None:
    story = Story.training(world_size=3).is_stopped()
    story.plans()
    (last,) = layouts(story.dies(0).plans())
    assert members(last) == {1: 1, 2: 2}
    assert last.paused
    assert story.plans() == [], "nobody goes before somebody can save"
    assert terminations(story.all_take_up(step=7).plans()) == [1]
    assert terminations(story.exits(1).plans()) == [2]
    story.exits(2).plans()
    assert story.job.status is JobStatus.STOPPED


def test_a_stop_loses_no_work_when_the_one_that_saves_has_just_died() -> None:
    story = Story.training(world_size=2, min_workers=2).dies(0).is_stopped()
    (last,) = layouts(story.plans())
    assert members(last) == {1: 1}
    assert terminations(story.all_take_up(step=7).plans()) == [1]


def test_a_stop_waits_for_nobody_where_there_is_nothing_to_save() -> None:
    story = Story.gathering(world_size=2).is_ready(0, 1).is_stopped()
    assert terminations(story.plans()) == [0, 1]


def test_a_stop_before_a_layout_is_in_force_replaces_one_with_a_dead_member() -> None:
    story = Story.training(world_size=3).dies(2)
    story.plans()
    story.dies(1).is_stopped()
    (last,) = layouts(story.plans())
    assert members(last) == {0: 0}
    assert terminations(story.all_take_up(step=7).plans()) == [0]


def test_a_paused_job_can_be_stopped() -> None:
    story = Story.training(world_size=2).is_paused()
    story.settles()
    story.is_stopped()
    story.settles()
    assert story.job.status is JobStatus.STOPPED


def test_who_does_not_go_within_the_grace_is_killed() -> None:
    story = Story.training(world_size=2).is_stopped(StopRequest.GRACEFUL, 5)
    story.plans()
    story.exits(0)
    assert set(kills(story.passes(5).plans())) == {1}
    story.dies(1).plans()
    assert story.job.status is JobStatus.STOPPED


def test_an_interrupted_job_goes_back_to_the_queue_and_on_with_new_workers() -> None:
    story = Story.training(world_size=2).is_interrupted()
    story.settles()
    assert story.job.status is JobStatus.QUEUED
    assert states(story) == [LEFT, LEFT]
    before = story.job.layout.generation
    story.is_admitted().plans()
    story.agent_joins().plans()
    story.settles()
    assert story.job.status is JobStatus.RUNNING
    assert story.job.layout.workers == (2, 3)
    assert story.job.layout.generation > before


def test_somebody_elses_request_to_go_costs_nothing() -> None:
    story = Story.training(world_size=2).beats(1, 5, stopping=True)
    assert [layout.workers for layout in layouts(story.plans())] == [(0,)]
    story.exits(1).plans()
    assert states(story) == [ACTIVE, LEFT]
    assert story.rank(1).restarts == 0
    story.wakes()
    story.settles()
    assert states(story) == [ACTIVE, LEFT, ACTIVE]


# Agents and coordinators


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


def successor(story: Story, take_up: Callable[..., JobSnapshot] = snapshot_of) -> Story:
    """Return the story as the next coordinator takes it up; by default every process was ended."""
    moment = Moment(monotonic=story.now, wall=NOON)
    change = change_of(story.job, Attachment(started_at=None), moment)
    row = Job(
        job_id=change.job_id,
        uid=change.uid,
        spec=story.job.spec,
        status=change.status,
        reason=change.reason,
        message=change.message,
        created_at=NOON,
        updated_at=NOON,
        started_at=None,
        finished_at=None,
        exit_code=None,
        stop_request=None,
        stop_grace_seconds=None,
        generation=change.generation,
        agent=None,
        agent_token_sha256=None,
        version=1,
        wanted_world_size=story.job.wanted_world_size,
        layout_generation=change.layout_generation,
        pause_request=story.job.pause_asked,
    )
    workers, pool = workers_of(story.job, moment), members_of(story.job, moment)
    later = Moment(monotonic=5.0, wall=NOON)
    return Story(take_up(row, workers, pool, later), now=5.0)


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


def test_a_new_coordinator_does_not_take_a_departure_for_the_end() -> None:
    left = Story.training(world_size=3).is_scaled(2)
    left.settles()
    story = comes_back(successor(left))
    assert story.job.status is JobStatus.RUNNING
    assert active_ranks(story) == [0, 1]


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
