"""How a job ends: by itself, stopped, or interrupted and taken up again, told as stories."""

from collections.abc import Callable

import pytest
from stories import Story, kills, layouts, starts, terminations
from unit.coordinator.pooled import LAST_STEP, members

from coordinator.actions import DismissAgent, Move, Start, Terminate
from coordinator.plan import plan, wake_at
from coordinator.snapshot import AgentState
from muster.contracts.job import JobStatus, Reason, StopRequest

# Ends


def test_exit_code_0_of_every_rank_completes_the_job() -> None:
    story = Story.running(world_size=2).exits(0)
    assert story.plans() == []
    assert story.job.status is JobStatus.RUNNING
    assert story.exits(1).plans() == [Move(status=JobStatus.COMPLETED), DismissAgent()]
    assert story.job.agent is AgentState.ABSENT
    assert story.passes(1e6).plans() == []


def test_a_rank_that_has_finished_is_never_started_again() -> None:
    story = Story.running(world_size=2).exits(0)
    story.dies(1).plans()
    assert story.wakes() == [Start(rank=1)]


def test_a_rank_asked_to_go_by_somebody_else_has_not_finished() -> None:
    story = Story.running(world_size=2)
    story.beats(0, step=4, stopping=True, last_checkpoint_step=4).exits(0)
    assert starts(story.plans()) == [], "a program that is always asked to go must not spin"
    assert starts(story.passes(0.5).plans()) == [0]
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message == (
        "rank 0 was asked to stop by somebody else and saved its work; "
        "it goes on from its last checkpoint"
    )
    assert story.rank(0).restarts == 0, "a preemption is no crash"
    assert story.rank(0).failures == 1


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (
            {"step": 4},
            "exited with code 0; it starts from the beginning, as no checkpoint of it is",
        ),
        (
            {"step": 4, "last_checkpoint_step": 3},
            "exited with code 0; it goes on from its last checkpoint",
        ),
        ({"step": 0}, "exited with code 0; it is started again"),
    ],
    ids=["never", "some steps before", "nothing done"],
)
def test_who_leaves_on_request_is_not_said_to_have_saved_what_it_has_not(
    said: dict[str, int], sentence: str
) -> None:
    story = Story.running(world_size=1).beats(0, stopping=True, **said).exits(0)
    story.plans()
    words = f"rank 0 was asked to stop by somebody else and {sentence}"
    assert story.job.message is not None
    assert story.job.message.startswith(words)


def test_a_process_that_has_not_said_where_it_is_has_not_saved_what_the_one_before_it_did() -> None:
    story = Story.running(world_size=1).beats(0, step=4, last_checkpoint_step=4).dies(0)
    story.comes_back(0).dies(0, signal=15).plans()
    assert story.job.message == (
        "rank 0 was ended by signal 15 (SIGTERM), which somebody else had sent; "
        "it goes on from its last checkpoint"
    )


def test_who_leaves_others_that_train_on_gets_its_state_from_them() -> None:
    story = Story.training(world_size=2)
    story.beats(1, step=4, stopping=True).exits(1).plans()
    assert story.job.message == (
        "rank 1 was asked to stop by somebody else and exited with code 0; "
        "it gets its state from the others"
    )


def test_a_refused_program_fails_the_job_at_once_and_the_others_are_asked_to_go() -> None:
    story = Story.running(world_size=3)
    story.refuses(1, Reason.INVALID_PROGRAM, "no such command").exits(1, code=127)
    assert terminations(story.plans()) == [0, 2]
    story.dies(0, signal=15).exits(2).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.INVALID_PROGRAM
    assert story.job.message == "rank 1: no such command"
    assert [rank.restarts for rank in story.job.ranks] == [0, 0, 0]


def test_the_first_verdict_stands() -> None:
    story = Story.running(world_size=2).refuses(0, Reason.INVALID_DATASET, "first")
    story.refuses(1, Reason.INVALID_PROGRAM, "second").is_condemned("third")
    assert story.job.verdict is not None
    assert story.job.verdict.message == "rank 0: first"


def test_who_is_left_of_a_job_that_fails_has_its_grace_and_never_longer() -> None:
    story = Story.running(world_size=2, max_restarts=0, stop_grace_seconds=7).exits(1, code=3)
    assert terminations(story.plans()) == [0]
    assert story.job.status is JobStatus.STOPPING
    assert story.job.reason is Reason.RESTART_LIMIT
    story.passes(3).is_interrupted()
    assert story.goes_on(3.9) == []
    assert story.patience_seconds < 0.2
    (cause,) = kills(story.wakes()).values()
    assert cause.reason is Reason.RESTART_LIMIT
    assert cause.message == "did not end within the grace period and was killed"
    assert DismissAgent() in story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


def is_interrupted(story: Story) -> Story:
    return story.is_interrupted()


def is_condemned(story: Story) -> Story:
    return story.is_condemned()


def is_done(story: Story) -> Story:
    return story.all_beat(LAST_STEP).exits(1)


@pytest.mark.parametrize("begins_to_end", [is_interrupted, is_condemned, is_done])
def test_a_stop_asked_of_a_job_that_ends_already_may_shorten_its_grace_and_not_prolong_it(
    begins_to_end: Callable[[Story], Story],
) -> None:
    def ending() -> Story:
        story = begins_to_end(Story.training(world_size=2, stop_grace_seconds=30))
        story.plans()
        return story.passes(10)

    story = ending().is_stopped(grace=30)
    assert kills(story.goes_on(19.9)) == {}
    assert 0 in kills(story.goes_on(0.2))
    story = ending().is_stopped(grace=5)
    assert kills(story.goes_on(4.9)) == {}
    assert 0 in kills(story.goes_on(0.2))


@pytest.mark.parametrize("begins_to_end", [is_condemned, is_done])
def test_an_interrupt_prolongs_no_grace_that_runs_already(
    begins_to_end: Callable[[Story], Story],
) -> None:
    story = begins_to_end(Story.training(world_size=2, stop_grace_seconds=30))
    story.plans()
    story.passes(25).is_interrupted()
    assert kills(story.goes_on(4.9)) == {}
    assert 0 in kills(story.goes_on(0.2))


def test_a_job_that_fails_can_be_ended_at_once() -> None:
    story = Story.running(world_size=2, max_restarts=0).exits(1, code=3)
    story.plans()
    assert list(kills(story.is_stopped(StopRequest.FORCED).plans())) == [0]
    story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


def test_a_pool_that_fails_saves_what_it_has_before_it_ends() -> None:
    story = Story.training(world_size=3, max_restarts=0).exits(1, code=3)
    assert terminations(story.plans()) == [0], "it saves for all"
    assert terminations(story.exits(0).plans()) == [2]
    story.exits(2).plans()
    assert story.job.status is JobStatus.FAILED


def test_a_pool_that_fails_loses_no_work_when_the_one_that_saves_dies() -> None:
    story = Story.training(world_size=3, max_restarts=0).exits(1, code=3)
    story.plans()
    (last,) = layouts(story.dies(0).plans())
    assert members(last) == {2: 2}
    assert last.paused
    assert story.plans() == [], "nobody goes before somebody can save"
    assert terminations(story.all_take_up(step=7).plans()) == [2]
    story.exits(2).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.RESTART_LIMIT


def test_what_makes_a_job_impossible_before_its_first_rank_fails_it() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    assert story.is_condemned("there is no data").plans() == [DismissAgent()]
    assert story.agent_is_lost().plans() == [
        Move(status=JobStatus.FAILED, reason=Reason.INVALID_DATASET, message="there is no data"),
    ]


def test_a_job_is_over_only_when_the_agent_that_was_never_heard_is_gone() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    planned = story.is_stopped(StopRequest.FORCED).plans()
    assert planned[-1] == DismissAgent()
    assert story.job.status is JobStatus.STOPPING, "it may be making the job's files just now"
    assert story.agent_joins().agent_drops().passes(1e6).plans() == [], "too late, and too late"
    assert [type(action) for action in story.agent_is_lost().plans()] == [Move]
    assert story.job.status is JobStatus.STOPPED
    assert story.job.agent_failures == 0


def test_an_agent_that_a_new_coordinator_has_not_heard_goes_before_its_job_is_over() -> None:
    story = Story.running(world_size=1).agent_drops().exits(0)
    assert story.plans() == [DismissAgent()]
    assert story.job.status is JobStatus.RUNNING
    assert story.agent_is_lost().plans() == [Move(status=JobStatus.COMPLETED)]


# Stopping


def test_stop_terminates_once_kills_after_the_grace_and_then_it_is_stopped() -> None:
    story = Story.running(world_size=2).is_stopped(grace=30)
    assert terminations(story.plans()) == [0, 1]
    assert story.job.status is JobStatus.STOPPING
    assert story.job.reason is Reason.STOPPED_BY_USER
    assert story.goes_on(29.9) == []
    story.beats(0, stopping=True).exits(0)
    planned = story.goes_on(0.2)
    assert list(kills(planned)) == [1]
    assert story.job.status is JobStatus.STOPPING
    assert story.dies(1).plans() == [
        Move(
            status=JobStatus.STOPPED,
            reason=Reason.STOPPED_BY_USER,
            message="stopped on request; no checkpoint of it is known",
        ),
        DismissAgent(),
    ]
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


def test_a_stopped_job_keeps_the_checkpoints_of_any_rank() -> None:
    story = Story.running(world_size=2).beats(1, step=4, last_checkpoint_step=3)
    story.is_stopped().plans()
    story.exits(0).exits(1).plans()
    assert story.job.message == "stopped on request; its checkpoints are kept"


def test_a_rank_that_is_down_is_not_started_for_a_job_that_stops() -> None:
    story = Story.running(world_size=2).dies(0)
    story.plans()
    story.is_stopped().plans()
    assert story.passes(5).beats(1).plans() == []
    story.exits(1).plans()
    assert story.job.status is JobStatus.STOPPED


def test_a_forced_stop_kills_at_once() -> None:
    story = Story.running(world_size=2).is_stopped(StopRequest.FORCED)
    planned = story.plans()
    assert sorted(kills(planned)) == [0, 1]
    assert terminations(planned) == []


def test_forced_follows_graceful_and_graceful_never_weakens_forced() -> None:
    story = Story.running(world_size=1).is_stopped(grace=30)
    story.plans()
    story.passes(1).is_stopped(StopRequest.FORCED, grace=0)
    forced = story.job
    assert list(kills(story.plans())) == [0]
    story = Story(forced, story.now).is_stopped(StopRequest.GRACEFUL, grace=99)
    assert story.job is forced


def test_asking_again_does_not_prolong_the_grace() -> None:
    story = Story.running(world_size=1).is_stopped(grace=30)
    story.plans()
    story.passes(20).is_stopped(grace=30).beats(0).plans()
    assert wake_at(story.job, story.now) <= 1000.0 + 30


def test_a_job_stopped_in_the_queue_never_runs() -> None:
    story = Story.submitted().is_stopped()
    story.plans()
    assert story.job.status is JobStatus.STOPPED
    assert story.job.generation == 0


def test_a_stop_that_comes_too_late_finds_the_job_completed() -> None:
    story = Story.running(world_size=2).exits(0).is_stopped(StopRequest.FORCED)
    story.plans()
    assert story.job.status is JobStatus.STOPPING
    story.exits(1).plans()
    assert story.job.status is JobStatus.COMPLETED


def test_failures_while_stopping_are_not_counted() -> None:
    story = Story.running(world_size=1).is_stopped()
    story.plans()
    story.exits(0, code=1).plans()
    assert story.job.status is JobStatus.STOPPED
    assert story.rank(0).restarts == 0


def test_a_silent_rank_of_a_stopping_job_is_killed_once_for_one_reason() -> None:
    story = Story.running(world_size=1, heartbeat_timeout=10).is_stopped(grace=10)
    story.takes(*plan(story.job, story.now))
    story.passes(10)
    planned = plan(story.job, story.now)
    assert len(planned) == 1
    assert kills(planned)[0].reason is Reason.STOPPED_BY_USER


def test_terminate_is_not_repeated_while_the_rank_saves() -> None:
    story = Story.running(world_size=1).is_stopped()
    assert Terminate(rank=0) in story.plans()
    story.passes(1).beats(0, stopping=True)
    assert story.plans() == []


# Interruption: the service shuts down


def test_an_interrupt_returns_the_job_to_the_queue_with_its_positions() -> None:
    story = Story.running(world_size=2)
    story.all_beat(step=7).is_interrupted()
    assert terminations(story.plans()) == [0, 1]
    assert story.job.status is JobStatus.STOPPING
    assert story.job.reason is Reason.INTERRUPTED
    story.beats(0, step=8, stopping=True).exits(0)
    story.beats(1, step=9, stopping=True).exits(1)
    assert DismissAgent() in story.plans()
    assert story.job.status is JobStatus.QUEUED
    assert story.job.reason is Reason.INTERRUPTED
    assert not story.job.interrupting
    assert [rank.step for rank in story.job.ranks] == [8, 9]
    assert not any(rank.finished for rank in story.job.ranks)
    assert story.plans() == []
    story.is_admitted().plans()
    assert starts(story.agent_joins().plans()) == [0, 1]
    story.says_hello(0, 1).plans()
    assert story.job.status is JobStatus.RUNNING


def test_an_interrupted_job_comes_back_even_if_a_rank_was_down() -> None:
    story = Story.running(world_size=2).dies(0)
    story.plans()
    story.is_interrupted().plans()
    story.exits(1).plans()
    assert story.job.status is JobStatus.QUEUED
    story.is_admitted().plans()
    story.agent_joins().plans()
    story.passes(1).plans()
    story.says_hello(0).plans()
    story.says_hello(1).plans()
    assert story.job.status is JobStatus.RUNNING


def test_a_job_is_interrupted_before_its_agent_has_come() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    story.is_interrupted().plans()
    assert story.job.status is JobStatus.STOPPING
    story.agent_is_lost().plans()
    assert story.job.status is JobStatus.QUEUED
    assert story.job.agent is AgentState.ABSENT


def test_a_stop_during_an_interrupt_is_a_stop() -> None:
    story = Story.running(world_size=1).is_interrupted()
    story.plans()
    story.is_stopped().exits(0)
    story.plans()
    assert story.job.status is JobStatus.STOPPED


def test_an_interrupt_during_a_stop_changes_nothing() -> None:
    story = Story.running(world_size=1).is_stopped()
    story.plans()
    before = story.job
    assert story.is_interrupted().job is before
