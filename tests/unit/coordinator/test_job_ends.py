"""How a job ends: by itself, stopped, or interrupted and resumed."""

from collections.abc import Callable

import pytest

from coordinator.decide.actions import DismissAgent, SetStatus, Start, Terminate
from coordinator.decide.plan import plan, wake_at
from coordinator.decide.state import AgentState
from muster.contracts.job import JobStatus, Reason, StopRequest
from tests.support.stories import Story, groups, kills, starts, terminations
from tests.unit.coordinator.pool_states import LAST_STEP, members

# Ends


def test_exit_code_0_of_every_rank_completes_the_job() -> None:
    story = Story.running(world_size=2).exits(0)
    assert story.plans() == []
    assert story.job.status is JobStatus.RUNNING
    assert story.exits(1).plans() == [SetStatus(status=JobStatus.COMPLETED), DismissAgent()]
    assert story.job.agent is AgentState.ABSENT
    assert story.passes(1e6).plans() == []


def test_a_finished_rank_is_never_restarted() -> None:
    story = Story.running(world_size=2).exits(0)
    story.dies(1).plans()
    assert story.wakes() == [Start(rank=1)]


def test_a_rank_stopped_from_outside_has_not_finished() -> None:
    story = Story.running(world_size=2)
    story.beats(0, step=4, stopping=True, last_checkpoint_step=4).exits(0)
    assert starts(story.plans()) == [], "repeated preemptions must not spin"
    assert starts(story.passes(0.5).plans()) == [0]
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.message == (
        "rank 0 was asked to stop by another process and saved its work; "
        "it resumes from its last checkpoint"
    )
    assert story.rank(0).restarts == 0, "a preemption is not a crash"
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
            "exited with code 0; it resumes from its last checkpoint",
        ),
        ({"step": 0}, "exited with code 0; it is started again"),
    ],
    ids=["never", "some steps before", "nothing done"],
)
def test_unsaved_work_is_not_reported_as_saved(said: dict[str, int], sentence: str) -> None:
    story = Story.running(world_size=1).beats(0, stopping=True, **said).exits(0)
    story.plans()
    words = f"rank 0 was asked to stop by another process and {sentence}"
    assert story.job.message is not None
    assert story.job.message.startswith(words)


def test_an_attempt_without_a_step_has_saved_nothing() -> None:
    story = Story.running(world_size=1).beats(0, step=4, last_checkpoint_step=4).dies(0)
    story.comes_back(0).dies(0, signal=15).plans()
    assert story.job.message == (
        "rank 0 was ended by signal 15 (SIGTERM) sent by another process; "
        "it resumes from its last checkpoint"
    )


def test_a_returning_member_gets_its_state_from_the_others() -> None:
    story = Story.training(world_size=2)
    story.beats(1, step=4, stopping=True).exits(1).plans()
    assert story.job.message == (
        "rank 1 was asked to stop by another process and exited with code 0; "
        "it gets its state from the others"
    )


def test_a_permanent_error_fails_the_job_at_once() -> None:
    story = Story.running(world_size=3)
    story.refuses(1, Reason.INVALID_PROGRAM, "no such command").exits(1, code=127)
    assert terminations(story.plans()) == [0, 2]
    story.dies(0, signal=15).exits(2).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.INVALID_PROGRAM
    assert story.job.message == "rank 1: no such command"
    assert [rank.restarts for rank in story.job.ranks] == [0, 0, 0]


def test_the_first_failure_stands() -> None:
    story = Story.running(world_size=2).refuses(0, Reason.INVALID_DATASET, "first")
    story.refuses(1, Reason.INVALID_PROGRAM, "second").fails_without_data("third")
    assert story.job.failure is not None
    assert story.job.failure.message == "rank 0: first"


def test_ranks_of_a_failed_job_get_exactly_the_grace() -> None:
    story = Story.running(world_size=2, max_restarts=0, stop_grace_seconds=7).exits(1, code=3)
    assert terminations(story.plans()) == [0]
    assert story.job.status is JobStatus.STOPPING
    assert story.job.reason is Reason.RESTART_LIMIT
    story.passes(3).is_interrupted()
    assert story.runs_for(3.9) == []
    assert story.wait_seconds < 0.2
    (cause,) = kills(story.wakes()).values()
    assert cause.reason is Reason.RESTART_LIMIT
    assert cause.message == "did not end within the grace period and was killed"
    assert DismissAgent() in story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


def is_interrupted(story: Story) -> Story:
    return story.is_interrupted()


def fails_without_data(story: Story) -> Story:
    return story.fails_without_data()


def is_done(story: Story) -> Story:
    return story.all_beat(LAST_STEP).exits(1)


@pytest.mark.parametrize("begins_to_end", [is_interrupted, fails_without_data, is_done])
def test_a_stop_may_only_shorten_a_running_grace(
    begins_to_end: Callable[[Story], Story],
) -> None:
    def ending() -> Story:
        story = begins_to_end(Story.training(world_size=2, stop_grace_seconds=30))
        story.plans()
        return story.passes(10)

    story = ending().is_stopped(grace=30)
    assert kills(story.runs_for(19.9)) == {}
    assert 0 in kills(story.runs_for(0.2))
    story = ending().is_stopped(grace=5)
    assert kills(story.runs_for(4.9)) == {}
    assert 0 in kills(story.runs_for(0.2))


@pytest.mark.parametrize("begins_to_end", [fails_without_data, is_done])
def test_an_interrupt_does_not_extend_a_running_grace(
    begins_to_end: Callable[[Story], Story],
) -> None:
    story = begins_to_end(Story.training(world_size=2, stop_grace_seconds=30))
    story.plans()
    story.passes(25).is_interrupted()
    assert kills(story.runs_for(4.9)) == {}
    assert 0 in kills(story.runs_for(0.2))


def test_a_failing_job_can_be_killed_at_once() -> None:
    story = Story.running(world_size=2, max_restarts=0).exits(1, code=3)
    story.plans()
    assert list(kills(story.is_stopped(StopRequest.FORCED).plans())) == [0]
    story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED


def test_a_failing_pool_saves_first() -> None:
    story = Story.training(world_size=3, max_restarts=0).exits(1, code=3)
    assert terminations(story.plans()) == [0], "it is the saver"
    assert terminations(story.exits(0).plans()) == [2]
    story.exits(2).plans()
    assert story.job.status is JobStatus.FAILED


def test_a_failing_pool_replaces_a_dead_saver() -> None:
    story = Story.training(world_size=3, max_restarts=0).exits(1, code=3)
    story.plans()
    (last,) = groups(story.dies(0).plans())
    assert members(last) == {2: 2}
    assert last.paused
    assert story.plans() == [], "no rank exits before one can save"
    assert terminations(story.all_join_group(step=7).plans()) == [2]
    story.exits(2).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.RESTART_LIMIT


def test_a_job_without_data_fails_before_its_first_rank() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    assert story.fails_without_data("there is no data").plans() == [DismissAgent()]
    assert story.agent_is_lost().plans() == [
        SetStatus(
            status=JobStatus.FAILED, reason=Reason.INVALID_DATASET, message="there is no data"
        ),
    ]


def test_a_job_ends_after_its_unconnected_agent() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    planned = story.is_stopped(StopRequest.FORCED).plans()
    assert planned[-1] == DismissAgent()
    assert story.job.status is JobStatus.STOPPING, "the agent may be creating the job's files"
    assert story.agent_connects().agent_disconnects().passes(1e6).plans() == [], "too late"
    assert [type(action) for action in story.agent_is_lost().plans()] == [SetStatus]
    assert story.job.status is JobStatus.STOPPED
    assert story.job.agent_failures == 0


def test_an_unreachable_agent_ends_before_its_job() -> None:
    story = Story.running(world_size=1).agent_disconnects().exits(0)
    assert story.plans() == [DismissAgent()]
    assert story.job.status is JobStatus.RUNNING
    assert story.agent_is_lost().plans() == [SetStatus(status=JobStatus.COMPLETED)]


# Stopping


def test_a_stop_terminates_then_kills() -> None:
    story = Story.running(world_size=2).is_stopped(grace=30)
    assert terminations(story.plans()) == [0, 1]
    assert story.job.status is JobStatus.STOPPING
    assert story.job.reason is Reason.STOPPED_BY_USER
    assert story.runs_for(29.9) == []
    story.beats(0, stopping=True).exits(0)
    planned = story.runs_for(0.2)
    assert list(kills(planned)) == [1]
    assert story.job.status is JobStatus.STOPPING
    assert story.dies(1).plans() == [
        SetStatus(
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


def test_a_stopping_job_starts_no_rank() -> None:
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


def test_a_forced_stop_replaces_a_graceful_one_only() -> None:
    story = Story.running(world_size=1).is_stopped(grace=30)
    story.plans()
    story.passes(1).is_stopped(StopRequest.FORCED, grace=0)
    forced = story.job
    assert list(kills(story.plans())) == [0]
    story = Story(forced, story.now).is_stopped(StopRequest.GRACEFUL, grace=99)
    assert story.job is forced


def test_a_repeated_stop_does_not_extend_the_grace() -> None:
    story = Story.running(world_size=1).is_stopped(grace=30)
    story.plans()
    story.passes(20).is_stopped(grace=30).beats(0).plans()
    assert wake_at(story.job, story.now) <= 1000.0 + 30


def test_a_job_stopped_in_the_queue_never_runs() -> None:
    story = Story.submitted().is_stopped()
    story.plans()
    assert story.job.status is JobStatus.STOPPED
    assert story.job.generation == 0


def test_a_late_stop_finds_the_job_completed() -> None:
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


def test_a_silent_rank_of_a_stopping_job_is_killed_once() -> None:
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


def test_an_interrupt_requeues_the_job_with_its_steps() -> None:
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
    assert [rank.progress.step for rank in story.job.ranks] == [8, 9]
    assert not any(rank.finished for rank in story.job.ranks)
    assert story.plans() == []
    story.is_admitted().plans()
    assert starts(story.agent_connects().plans()) == [0, 1]
    story.says_hello(0, 1).plans()
    assert story.job.status is JobStatus.RUNNING


def test_an_interrupted_job_with_a_dead_rank_resumes() -> None:
    story = Story.running(world_size=2).dies(0)
    story.plans()
    story.is_interrupted().plans()
    story.exits(1).plans()
    assert story.job.status is JobStatus.QUEUED
    story.is_admitted().plans()
    story.agent_connects().plans()
    story.passes(1).plans()
    story.says_hello(0).plans()
    story.says_hello(1).plans()
    assert story.job.status is JobStatus.RUNNING


def test_a_job_without_an_agent_can_be_interrupted() -> None:
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
