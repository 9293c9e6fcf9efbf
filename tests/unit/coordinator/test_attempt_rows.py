"""The row of every attempt: when it began and how it ended."""

from datetime import UTC, datetime, timedelta

import pytest

from coordinator.decide.actions import ActionTaken, AgentLost, LoseHost, Start
from coordinator.persistence import Attachment, Moment, Urgency, ended_attempt_rows
from coordinator.tracked_job import TrackedJob
from database.records import Attempt, ProcessRecord, RankRecord
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.retry import RetryClass
from muster.contracts.job.status import Reason
from muster.contracts.messages.agent import RankSaid, RankSpawned
from muster.contracts.messages.rank import Heartbeat, JoinedGroup
from tests.support.stories import Story, beat, exited

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
START = ActionTaken(action=Start(rank=0))
SPAWNED = RankSpawned(
    rank=0, attempt=0, pid=4711, start_ticks=1, boot_id="b", node="n", pid_namespace=1
)
PROCESS = ProcessRecord(pid=4711, start_ticks=1, boot_id="b", node="n", pid_namespace=1)
RUNNING = Attempt(rank=0, attempt=0, pid=4711, started_at=NOON)


def after(seconds: float) -> Moment:
    return Moment(monotonic=1000.0 + seconds, wall=NOON + timedelta(seconds=seconds))


def tracked(story: Story) -> TrackedJob:
    return TrackedJob(snapshot=story.job, attachment=Attachment(started_at=None))


@pytest.fixture
def job() -> TrackedJob:
    """A job of one rank that is about to be started."""
    story = Story.submitted(world_size=1).is_admitted()
    story.plans()
    return tracked(story.agent_connects())


def rows(job: TrackedJob) -> list[Attempt]:
    """Return what the next draft writes, and have it written."""
    draft = job.draft(after(0))
    job.mark_written(draft)
    return list(draft.write.attempts)


def test_an_attempt_has_a_row_once_its_start_is_decided(job: TrackedJob) -> None:
    job.observe(START, after(0))
    assert rows(job) == [Attempt(rank=0, attempt=0, pid=None, started_at=NOON)]
    job.observe(SPAWNED, after(0.5))
    assert rows(job) == [RUNNING]
    assert rows(job) == [], "what is written is not written again"


def test_the_row_of_an_ended_attempt_is_complete(job: TrackedJob) -> None:
    for observation in (START, SPAWNED, RankSaid(rank=0, attempt=0, message=beat(7))):
        job.observe(observation, after(0))
    rows(job)
    job.observe(exited(0, 0, code=1, lines=["NameError: x"]), after(9))
    assert job.draft(after(9)).urgency is Urgency.NOW
    assert rows(job) == [
        Attempt(
            rank=0,
            attempt=0,
            pid=4711,
            started_at=NOON,
            ended_at=NOON + timedelta(seconds=9),
            exit_code=1,
            retry_class=RetryClass.CRASH,
            reason=Reason.WORKER_EXITED,
            message="exited with code 1 (NameError: x)",
            step_at_start=0,
            step_at_end=7,
        )
    ]


def test_no_end_is_lost_while_the_database_is_away(job: TrackedJob) -> None:
    for observation in (START, SPAWNED, exited(0, 0, signal=9), START):
        job.observe(observation, after(0))
    first, second = rows(job)
    assert (first.attempt, first.exit_signal, first.pid) == (0, 9, 4711)
    assert (second.attempt, second.pid, second.ended_at) == (1, None, None)


def test_changes_during_a_commit_are_written_next(job: TrackedJob) -> None:
    job.observe(START, after(0))
    draft = job.draft(after(0))
    job.observe(SPAWNED, after(1))
    job.mark_written(draft)
    assert rows(job) == [RUNNING]


def test_a_stale_message_writes_nothing(job: TrackedJob) -> None:
    job.observe(START, after(0))
    rows(job)
    job.observe(exited(0, 5, code=1), after(1))
    job.observe(exited(9, 0, code=1), after(1))
    assert rows(job) == []


def test_a_lost_agent_ends_all_its_attempts() -> None:
    job = tracked(Story.running(world_size=2).exits(0))
    job.observe(AgentLost(host=LOCAL_HOST, agent_number=1, message="gone"), after(3))
    (row,) = rows(job)
    assert (row.rank, row.retry_class, row.reason) == (1, "infrastructure", "agent_lost")


def test_a_lost_host_ends_its_attempts() -> None:
    job = tracked(Story.running(world_size=1))
    job.observe(ActionTaken(action=LoseHost(host=LOCAL_HOST, why="it is silent")), after(3))
    (row,) = rows(job)
    assert (row.retry_class, row.reason) == ("infrastructure", "host_lost")
    assert row.ended_at == NOON + timedelta(seconds=3)


def test_a_group_member_begins_at_the_groups_step() -> None:
    story = Story.gathering(world_size=1).is_ready(0).passes(2)
    story.plans()
    job = tracked(story)
    for step in (12, 14):
        taken_up = JoinedGroup(round=1, step=step)
        job.observe(RankSaid(rank=0, attempt=0, message=taken_up), after(2))
    job.observe(exited(0, 0, code=1), after(3))
    (row,) = rows(job)
    assert (row.step_at_start, row.step_at_end) == (12, 14)


@pytest.mark.parametrize(
    ("said", "step"),
    [
        pytest.param([beat(0), beat(3)], 0, id="from nothing"),
        pytest.param([beat(20, last_checkpoint_step=20)], 20, id="from its checkpoint"),
        pytest.param([beat(0), beat(21, last_checkpoint_step=20)], 20, id="after a long reading"),
        pytest.param([beat(9), beat(30, last_checkpoint_step=20)], 0, id="never twice"),
        pytest.param(
            [beat(40, last_checkpoint_step=40, checkpoints_saved=2)], 40, id="reported late"
        ),
        pytest.param([beat(0)], None, id="still reading"),
    ],
)
def test_an_independent_rank_reports_where_it_began(
    said: list[Heartbeat], step: int | None
) -> None:
    story = Story.running(world_size=1).beats(0, 23, last_checkpoint_step=23).dies(0)
    story.comes_back(0)
    for message in said:
        story.rank_says(0, message)
    assert story.rank(0).attempt.step_at_start == step


def test_the_first_step_is_written_once(job: TrackedJob) -> None:
    for observation in (START, SPAWNED):
        job.observe(observation, after(0))
    rows(job)
    job.observe(RankSaid(rank=0, attempt=0, message=beat(7)), after(1))
    assert [row.step_at_start for row in rows(job)] == [0]
    job.observe(RankSaid(rank=0, attempt=0, message=beat(8)), after(2))
    assert rows(job) == [], "heartbeats alone write no row"


@pytest.mark.parametrize(("said", "steps"), [((), (None, None)), ((beat(0),), (0, 0))])
def test_an_attempt_does_not_inherit_steps(
    said: tuple[Heartbeat, ...], steps: tuple[int | None, int | None]
) -> None:
    story = Story.running(world_size=1).beats(0, 23, last_checkpoint_step=20).dies(0)
    job = tracked(story.comes_back(0))
    for message in said:
        job.observe(RankSaid(rank=0, attempt=1, message=message), after(1))
    job.observe(exited(0, 1, code=1), after(2))
    (row,) = rows(job)
    assert (row.step_at_start, row.step_at_end) == steps


def test_a_worker_that_never_joined_has_no_steps() -> None:
    story = Story.training(world_size=1).beats(0, 12).dies(0)
    job = tracked(story.comes_back(0).beats(0, 0))
    job.observe(exited(0, 1, code=1), after(2))
    (row,) = rows(job)
    assert (row.step_at_start, row.step_at_end) == (None, None)


def test_attempts_of_a_dead_coordinator_are_ended() -> None:
    alive = RankRecord(rank=0, attempt=3, state="live", process=PROCESS)
    gone = RankRecord(rank=1, attempt=2, state="exited", process=None)
    job = Story.running(world_size=2).agent_is_lost().job
    (row,) = ended_attempt_rows(job, [alive, gone], after(4))
    assert (row.rank, row.pid, row.ended_at) == (0, 4711, NOON + timedelta(seconds=4))
    assert row.step_at_end is None, "none has reported a step"
