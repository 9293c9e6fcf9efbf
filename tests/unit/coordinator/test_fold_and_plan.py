"""How a job is looked after, told as stories: happenings are folded in, plans are carried out."""

from itertools import pairwise

import pytest
from stories import Story, exited, kills, queued_job, starts, terminations

from coordinator.actions import DismissAgent, KillAgent, Move, Start, StartAgent, Suspect, Terminate
from coordinator.plan import plan, wake_at
from coordinator.silence import AGENT_GRACE_SECONDS
from coordinator.snapshot import AgentState
from muster.contracts.job import JobStatus, Reason, StopRequest
from muster.contracts.messages import Executing, Hello, RankSaid, RankSpawned, Warned
from muster.contracts.rank import ProcessState

EXITED = ProcessState.EXITED


# Starting


def test_a_job_in_the_queue_is_left_alone() -> None:
    assert plan(queued_job(), 0.0) == []


def test_a_job_that_is_let_in_gets_an_agent_and_then_its_ranks() -> None:
    story = Story.submitted(world_size=3).is_admitted()
    assert story.plans() == [StartAgent()]
    assert story.plans() == []
    assert story.agent_joins().plans() == [Start(rank=0), Start(rank=1), Start(rank=2)]
    assert story.job.status is JobStatus.STARTING
    story.says_hello(0, 1).plans()
    assert story.job.status is JobStatus.STARTING, "one has not said anything yet"
    assert story.says_hello(2).plans() == [Move(status=JobStatus.RUNNING)]
    assert [rank.incarnation for rank in story.job.ranks] == [0, 0, 0]


def test_a_program_that_does_not_speak_to_us_runs_as_soon_as_it_is_there() -> None:
    story = Story.starting(world_size=1).rank_says(0, Executing())
    story.plans()
    assert story.job.status is JobStatus.RUNNING
    assert story.passes(1e6).plans() == [], "its silence means nothing"


def test_startup_grace_is_apart_from_the_heartbeat_timeout() -> None:
    story = Story.starting(world_size=1, start_grace_seconds=120, heartbeat_timeout=10)
    assert story.passes(119.9).plans() == []
    (cause,) = kills(story.passes(0.1).plans()).values()
    assert cause.reason is Reason.START_TIMEOUT
    assert cause.message == "gave no sign of life within 120 s and was killed"
    story.dies(0).plans()
    assert story.job.reason is Reason.START_TIMEOUT
    assert story.rank(0).restarts == 1


def test_an_early_death_does_not_hurry_a_rank_that_is_slow_to_start() -> None:
    story = Story.starting(world_size=2).exits(0, code=1)
    story.plans()
    assert story.job.status is JobStatus.RECOVERING
    story.wakes()
    story.says_hello(0)
    assert story.plans() == [], "rank 1 has not said anything yet"
    assert story.job.status is JobStatus.RECOVERING
    story.says_hello(1).plans()
    assert story.job.status is JobStatus.RUNNING


# Failure and recovery


def test_a_rank_killed_in_the_middle_is_replaced_after_the_backoff_and_nobody_else_is_touched() -> (
    None
):
    story = Story.running(world_size=3)
    story.all_beat(step=7)
    others = (story.rank(0), story.rank(2))
    assert story.dies(1).plans() == [
        Move(
            status=JobStatus.RECOVERING,
            reason=Reason.WORKER_EXITED,
            message="rank 1 was ended by signal 9 (SIGKILL); restart 1 of 50",
        )
    ]
    wait = story.patience_seconds
    assert 0.375 <= wait <= 0.5, "the first backoff, with its jitter"
    assert story.wakes() == [Start(rank=1)]
    assert (story.rank(0), story.rank(2)) == others
    assert story.rank(1).incarnation == 1
    assert story.rank(1).step == 7, "where it was is known until it says something else"
    assert story.job.status is JobStatus.RECOVERING
    assert story.says_hello(1).plans() == [Move(status=JobStatus.RUNNING)]


def test_the_backoff_doubles_up_to_its_cap() -> None:
    story = Story.running(world_size=1, max_restarts=9, max_fruitless=99)
    waits = []
    for _ in range(9):
        story.exits(0, code=1).plans()
        waits.append(story.patience_seconds)
        story.wakes()
        story.says_hello(0)
    assert all(before < after for before, after in pairwise(waits[:6]))
    for wait, scheduled in zip(waits, [0.5, 1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.75 * scheduled <= wait <= scheduled


def test_a_minute_of_health_forgives() -> None:
    story = Story.running(world_size=1)
    for _ in range(3):
        story.exits(0, code=1).plans()
        story.wakes()
        story.says_hello(0).plans()
    assert story.rank(0).failures == 3
    story.goes_on(59)
    assert story.rank(0).failures == 3
    story.goes_on(2)
    assert story.rank(0).failures == 0
    story.exits(0, code=1)
    assert story.rank(0).failures == 1
    assert story.rank(0).restarts == 4, "restarts are counted for ever"


def test_a_minute_of_health_forgives_a_program_that_does_not_beat() -> None:
    story = Story.starting(world_size=1).rank_says(0, Executing()).exits(0, code=1)
    story.wakes()
    story.rank_says(0, Executing()).passes(60).exits(0, code=1)
    assert story.rank(0).failures == 1


def test_the_51st_failure_fails_the_job_and_names_rank_signal_and_last_lines() -> None:
    story = Story.running(world_size=2)
    for number in range(50):
        story.dies(1, lines=["not these"])
        assert story.rank(1).restarts == number + 1
        story.plans()
        assert starts(story.goes_on(31)) == [1]
        story.says_hello(1)
    planned = story.dies(1, signal=11, lines=["Traceback:", "it broke"]).plans()
    assert story.rank(1).restarts == 50
    assert list(kills(planned)) == [0], "its sibling is ended with the job"
    assert story.job.status is JobStatus.RUNNING, "as long as a process is left"
    assert DismissAgent() in story.dies(0).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.RESTART_LIMIT
    assert story.job.message == (
        "rank 1 was ended by signal 11 (SIGSEGV) and has used its 50 restarts; "
        "the last lines of its log:\n  Traceback:\n  it broke"
    )
    assert story.job.verdict is not None
    assert story.job.verdict.exit_code == 139


def test_no_restart_at_all_can_be_asked_for() -> None:
    story = Story.running(world_size=1, max_restarts=0).exits(0, code=3)
    story.plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.message == (
        "rank 0 exited with code 3 and may not be restarted; its log is empty"
    )
    assert story.job.verdict is not None
    assert story.job.verdict.exit_code == 3


# Silence


def test_a_late_heartbeat_makes_a_suspect_and_a_beat_makes_it_live_again() -> None:
    story = Story.running(world_size=2)
    story.passes(5).beats(0)
    assert story.plans() == [Suspect(rank=1)]
    assert story.rank(1).process is ProcessState.SUSPECT
    assert story.job.status is JobStatus.RUNNING, "a suspect is no corpse"
    assert story.plans() == []
    story.beats(1)
    assert story.rank(1).process is ProcessState.LIVE
    assert story.plans() == []


def test_silence_beyond_the_timeout_kills_and_the_reason_is_heartbeat_timeout() -> None:
    story = Story.running(world_size=2, heartbeat_timeout=10)
    story.passes(5).beats(0).plans()
    story.passes(4.9).beats(0)
    assert story.plans() == []
    planned = story.passes(0.1).plans()
    (cause,) = kills(planned).values()
    assert list(kills(planned)) == [1]
    assert cause.reason is Reason.HEARTBEAT_TIMEOUT
    assert cause.message == "sent no heartbeat for 10 s and was killed"
    assert story.passes(3).beats(0).plans() == [], "it is killed once"
    story.dies(1).plans()
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.reason is Reason.HEARTBEAT_TIMEOUT
    assert story.job.message == (
        "rank 1 sent no heartbeat for 10 s and was killed; it is started again "
        "(failure 1 of 5 in a row without a new checkpoint)"
    )


@pytest.mark.parametrize("limit", [None, 30.0])
def test_a_beating_rank_without_progress_is_replaced_only_if_asked_for(limit: float | None) -> None:
    story = Story.running(world_size=2, progress_timeout_seconds=limit)
    killed = kills(story.goes_on(40))
    if limit is None:
        assert killed == {}
    else:
        assert {rank: cause.reason for rank, cause in killed.items()} == {
            0: Reason.NO_PROGRESS,
            1: Reason.NO_PROGRESS,
        }


def test_a_step_now_and_then_is_progress() -> None:
    story = Story.running(world_size=1, progress_timeout_seconds=30)
    for step in range(1, 5):
        assert kills(story.goes_on(28)) == {}
        story.beats(0, step=step)


def test_the_time_it_takes_to_start_is_no_lack_of_progress() -> None:
    story = Story.starting(world_size=1, progress_timeout_seconds=30, start_grace_seconds=120)
    story.passes(20).rank_says(0, Executing()).passes(40).says_hello(0)
    assert kills(story.plans()) == {}
    assert kills(story.goes_on(29)) == {}
    assert kills(story.goes_on(2))[0].reason is Reason.NO_PROGRESS


def test_a_greeting_that_is_told_again_is_no_progress() -> None:
    story = Story.running(world_size=1, progress_timeout_seconds=30)
    story.goes_on(20)
    story.says_hello(0)
    assert kills(story.goes_on(11))[0].reason is Reason.NO_PROGRESS


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


def test_a_refused_program_fails_the_job_at_once_and_kills_the_others() -> None:
    story = Story.running(world_size=3)
    story.refuses(1, Reason.INVALID_PROGRAM, "no such command").exits(1, code=127)
    assert sorted(kills(story.plans())) == [0, 2]
    story.dies(0).dies(2).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.INVALID_PROGRAM
    assert story.job.message == "rank 1: no such command"
    assert [rank.restarts for rank in story.job.ranks] == [0, 0, 0]


def test_the_first_verdict_stands() -> None:
    story = Story.running(world_size=2).refuses(0, Reason.INVALID_DATASET, "first")
    story.refuses(1, Reason.INVALID_PROGRAM, "second").is_condemned("third")
    assert story.job.verdict is not None
    assert story.job.verdict.message == "rank 0: first"


def test_what_makes_a_job_impossible_before_its_first_rank_fails_it() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    assert story.is_condemned("there is no data").plans() == [
        Move(status=JobStatus.FAILED, reason=Reason.INVALID_DATASET, message="there is no data"),
        DismissAgent(),
    ]


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
            message="stopped on request; its checkpoints are kept",
        ),
        DismissAgent(),
    ]
    assert [rank.restarts for rank in story.job.ranks] == [0, 0]


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


# Agents


def test_an_agent_lost_restarts_ranks_without_counting() -> None:
    story = Story.running(world_size=2).agent_is_lost()
    assert not story.job.any_alive
    planned = story.plans()
    assert [type(action) for action in planned] == [Move, StartAgent], "at once"
    assert story.job.status is JobStatus.RECOVERING
    assert story.job.reason is Reason.AGENT_LOST
    assert story.job.generation == 2
    assert starts(story.agent_joins().plans()) == [0, 1]
    story.says_hello(0, 1).plans()
    assert story.job.status is JobStatus.RUNNING
    assert [(rank.restarts, rank.failures) for rank in story.job.ranks] == [(0, 0)] * 2


@pytest.mark.parametrize("sign_of_life", [Hello(), Executing()])
def test_agents_that_die_young_come_back_later_and_later_until_one_works(
    sign_of_life: Hello | Executing,
) -> None:
    story = Story.submitted(world_size=1).is_admitted()
    story.plans()
    assert StartAgent() in story.agent_is_lost().plans(), "the first one that is lost: at once"
    waits = []
    for _ in range(4):
        story.agent_is_lost().plans()
        waits.append(story.patience_seconds)
        assert story.wakes() == [StartAgent()]
    assert all(before < after for before, after in pairwise(waits))
    story.agent_joins().plans()
    assert StartAgent() in story.rank_says(0, sign_of_life).agent_is_lost().plans()


def test_an_agent_that_never_says_hello_is_killed_and_once_only_for_each_grace() -> None:
    story = Story.submitted().is_admitted()
    story.plans()
    assert story.passes(AGENT_GRACE_SECONDS - 0.1).plans() == []
    assert story.passes(0.1).plans() == [KillAgent()]
    assert story.plans() == []
    assert story.passes(AGENT_GRACE_SECONDS).plans() == [KillAgent()], "should the first miss"
    assert StartAgent() in story.agent_is_lost().plans()


def test_an_agent_whose_connection_broke_keeps_its_ranks() -> None:
    story = Story.running(world_size=1).agent_drops()
    assert story.job.agent is AgentState.UNREACHABLE
    assert story.passes(1).plans() == []
    story.agent_joins()
    assert story.job.agent is AgentState.CONNECTED
    assert story.rank(0).is_alive


def test_nothing_is_started_through_an_agent_that_is_not_there() -> None:
    story = Story.running(world_size=1).agent_drops().exits(0, code=1)
    assert starts(story.passes(60).plans()) == []
    assert starts(story.agent_joins().plans()) == [0]


@pytest.mark.parametrize("generation", [0, 2, -1])
def test_an_agent_of_another_generation_cannot_speak(generation: int) -> None:
    story = Story.running(world_size=1)
    before = story.job
    assert story.agent_drops(generation).job is before
    assert story.agent_joins(generation).job is before
    assert story.agent_is_lost(generation).job is before


def test_the_end_of_an_agent_that_was_sent_away_is_no_loss() -> None:
    story = Story.running(world_size=1).exits(0)
    story.plans()
    before = story.job
    assert story.agent_is_lost().job is before


# Messages that are not to be believed


@pytest.mark.parametrize("incarnation", [-1, 0, 2])
def test_a_stale_incarnations_message_changes_nothing(incarnation: int) -> None:
    story = Story.running(world_size=2).dies(1)
    story.plans()
    story.wakes()
    assert story.rank(1).incarnation == 1
    before = story.job
    story.rank_says(1, Hello(), incarnation).rank_says(1, Executing(), incarnation)
    story.rank_says(1, Warned(message="late"), incarnation)
    story.hears(exited(1, incarnation, code=0)).hears(exited(1, incarnation, signal=9))
    story.hears(
        RankSpawned(rank=1, incarnation=incarnation, pid=1, start_ticks=1, boot_id="b", node="n")
    )
    assert story.job is before


@pytest.mark.parametrize("rank", [-1, 2, 4096])
def test_a_rank_that_does_not_exist_cannot_speak(rank: int) -> None:
    story = Story.running(world_size=2)
    before = story.job
    story.hears(RankSaid(rank=rank, incarnation=0, message=Hello()))
    story.hears(exited(rank, 0, code=0))
    assert story.job is before


def test_a_death_that_is_told_twice_is_counted_once() -> None:
    story = Story.running(world_size=1).dies(0)
    before = story.job
    assert story.dies(0).job is before


# Figures


def test_a_beat_says_where_the_rank_is() -> None:
    story = Story.running(world_size=1)
    story.beats(
        0,
        step=12,
        epoch=1,
        shard_idx=2,
        line_idx=3,
        loss=0.25,
        metrics={"accuracy": 0.5},
        checkpoints_saved=2,
        last_checkpoint_step=10,
    )
    rank = story.rank(0)
    assert (rank.step, rank.total_steps, rank.epoch) == (12, 100, 1)
    assert (rank.shard_idx, rank.line_idx, rank.loss) == (2, 3, 0.25)
    assert rank.metrics == {"accuracy": 0.5}
    assert (rank.checkpoints_saved, rank.last_checkpoint_step) == (2, 10)


def test_checkpoints_are_counted_over_all_incarnations() -> None:
    story = Story.running(world_size=1).beats(0, step=10, checkpoints_saved=2).dies(0)
    story.plans()
    story.wakes()
    story.says_hello(0).beats(0, step=15, checkpoints_saved=1)
    assert story.rank(0).checkpoints_before + story.rank(0).checkpoints_saved == 3


def test_throughput_is_steps_over_time_and_nothing_for_a_rank_that_is_gone() -> None:
    story = Story.running(world_size=1)
    for step in range(0, 100, 10):
        story.beats(0, step=step).passes(1)
    assert story.rank(0).throughput_steps_per_sec == pytest.approx(10)
    story.dies(0)
    assert story.rank(0).throughput_steps_per_sec == 0


def test_steps_that_come_again_after_a_recovery_are_no_negative_throughput() -> None:
    story = Story.running(world_size=1).beats(0, step=100).passes(2).beats(0, step=3)
    assert story.rank(0).throughput_steps_per_sec == 0


def test_terminate_is_not_repeated_while_the_rank_saves() -> None:
    story = Story.running(world_size=1).is_stopped()
    assert Terminate(rank=0) in story.plans()
    story.passes(1).beats(0, stopping=True)
    assert story.plans() == []
