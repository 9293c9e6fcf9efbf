"""How a job starts, and how it recovers."""

from itertools import pairwise

from coordinator.decide.actions import DismissAgent, SetStatus, Start, StartAgent
from coordinator.decide.plan import plan
from muster.contracts.job import JobStatus, Reason
from muster.contracts.messages import Executing
from tests.support.stories import Story, kills, queued_job, starts, terminations

# Starting


def test_a_queued_job_gets_no_actions() -> None:
    assert plan(queued_job(), 0.0) == []


def test_an_admitted_job_gets_an_agent_then_ranks() -> None:
    story = Story.submitted(world_size=3).is_admitted()
    assert story.plans() == [StartAgent()]
    assert story.plans() == []
    assert story.agent_connects().plans() == [Start(rank=0), Start(rank=1), Start(rank=2)]
    assert story.job.status is JobStatus.STARTING
    story.says_hello(0, 1).plans()
    assert story.job.status is JobStatus.STARTING, "one has not said hello yet"
    assert story.says_hello(2).plans() == [SetStatus(status=JobStatus.RUNNING)]
    assert [rank.attempt for rank in story.job.ranks] == [0, 0, 0]


def test_a_command_runs_without_heartbeats() -> None:
    story = Story.starting(world_size=1).rank_says(0, Executing())
    story.plans()
    assert story.job.status is JobStatus.RUNNING
    assert story.passes(1e6).plans() == [], "its silence does not count"


def test_the_start_grace_is_not_the_heartbeat_timeout() -> None:
    story = Story.starting(world_size=1, start_grace_seconds=120, heartbeat_timeout=10)
    assert story.passes(119.9).plans() == []
    (cause,) = kills(story.passes(0.1).plans()).values()
    assert cause.reason is Reason.START_TIMEOUT
    assert cause.message == "gave no sign of life within 120 s and was killed"
    story.dies(0).plans()
    assert story.job.reason is Reason.START_TIMEOUT
    assert story.rank(0).restarts == 1


def test_a_slow_start_outlives_the_death_of_another_rank() -> None:
    story = Story.starting(world_size=2).exits(0, code=1)
    story.plans()
    assert story.job.status is JobStatus.RECOVERING
    story.wakes()
    story.says_hello(0)
    assert story.plans() == [], "rank 1 has not said hello yet"
    assert story.job.status is JobStatus.RECOVERING
    story.says_hello(1).plans()
    assert story.job.status is JobStatus.RUNNING


# Failure and recovery


def test_a_killed_rank_is_replaced_alone() -> None:
    story = Story.running(world_size=3)
    story.all_beat(step=7)
    others = (story.rank(0), story.rank(2))
    assert story.dies(1).plans() == [
        SetStatus(
            status=JobStatus.RECOVERING,
            reason=Reason.WORKER_EXITED,
            message="rank 1 was ended by signal 9 (SIGKILL); restart 1 of 50",
        )
    ]
    wait = story.wait_seconds
    assert 0.375 <= wait <= 0.5, "the first backoff, with its jitter"
    assert story.wakes() == [Start(rank=1)]
    assert (story.rank(0), story.rank(2)) == others
    assert story.rank(1).attempt == 1
    assert story.rank(1).progress.step == 7, "its last step stays known"
    assert story.job.status is JobStatus.RECOVERING
    assert story.says_hello(1).plans() == [SetStatus(status=JobStatus.RUNNING)]


def test_the_backoff_doubles_up_to_its_cap() -> None:
    story = Story.running(world_size=1, max_restarts=9, max_fruitless=99)
    waits = []
    for _ in range(9):
        story.exits(0, code=1).plans()
        waits.append(story.wait_seconds)
        story.wakes()
        story.says_hello(0)
    assert all(before < after for before, after in pairwise(waits[:6]))
    for wait, scheduled in zip(waits, [0.5, 1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.75 * scheduled <= wait <= scheduled


def test_a_minute_of_health_resets_the_backoff() -> None:
    story = Story.running(world_size=1)
    for _ in range(3):
        story.exits(0, code=1).plans()
        story.wakes()
        story.says_hello(0).plans()
    assert story.rank(0).failures == 3
    story.runs_for(59)
    assert story.rank(0).failures == 3
    story.runs_for(2)
    assert story.rank(0).failures == 0
    story.exits(0, code=1)
    assert story.rank(0).failures == 1
    assert story.rank(0).restarts == 4, "restarts are never reset"


def test_health_without_heartbeats_resets_the_backoff() -> None:
    story = Story.starting(world_size=1).rank_says(0, Executing()).exits(0, code=1)
    story.wakes()
    story.rank_says(0, Executing()).passes(60).exits(0, code=1)
    assert story.rank(0).failures == 1


def test_the_51st_failure_fails_the_job_with_its_log() -> None:
    story = Story.running(world_size=2)
    for number in range(50):
        story.dies(1, lines=["not these"])
        assert story.rank(1).restarts == number + 1
        story.plans()
        assert starts(story.runs_for(31)) == [1]
        story.says_hello(1)
    planned = story.dies(1, signal=11, lines=["Traceback:", "it broke"]).plans()
    assert story.rank(1).restarts == 50
    assert terminations(planned) == [0], "the other rank is ended with the job"
    assert story.job.status is JobStatus.STOPPING, "as long as a process is left"
    assert DismissAgent() in story.dies(0, signal=15).plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.reason is Reason.RESTART_LIMIT
    assert story.job.message == (
        "rank 1 was ended by signal 11 (SIGSEGV) and has used its 50 restarts; "
        "the last lines of its log:\n  Traceback:\n  it broke"
    )
    assert story.job.failure is not None
    assert story.job.failure.exit_code == 139


def test_a_job_may_forbid_restarts() -> None:
    story = Story.running(world_size=1, max_restarts=0).exits(0, code=3)
    story.plans()
    assert story.job.status is JobStatus.FAILED
    assert story.job.message == (
        "rank 0 exited with code 3 and may not be restarted; its log is empty"
    )
    assert story.job.failure is not None
    assert story.job.failure.exit_code == 3
