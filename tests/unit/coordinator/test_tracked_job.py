from dataclasses import replace
from datetime import UTC, datetime

import pytest

from coordinator.decide.actions import SetStatus, Start, StartAgent
from coordinator.persistence import Attachment, Moment, Urgency
from coordinator.tracked_job import TrackedJob
from muster.contracts.agent import LOCAL_HOST
from muster.contracts.job.status import JobStatus
from muster.contracts.messages.agent import RankSaid
from muster.contracts.series import THROUGHPUT, Window, aggregate
from tests.support.stories import Story, beat, exited

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NOW = Moment(monotonic=1000.0, wall=NOON)
LATER = Moment(monotonic=1001.0, wall=NOON)


def tracked(story: Story) -> TrackedJob:
    return TrackedJob(snapshot=story.job, attachment=Attachment(started_at=None))


@pytest.fixture
def job() -> TrackedJob:
    """A running job, everything about it written down."""
    job = tracked(Story.running(world_size=2))
    job.mark_written(job.draft(NOW))
    return job


def test_an_unwritten_job_is_urgent() -> None:
    draft = tracked(Story.running(world_size=2)).draft(NOW)
    assert draft.urgency is Urgency.NOW
    assert [worker.rank for worker in draft.write.ranks] == [0, 1]


def test_a_written_job_is_not_written_again(job: TrackedJob) -> None:
    draft = job.draft(NOW)
    assert draft.urgency is Urgency.NONE
    assert draft.write.ranks == []


def test_progress_is_written_later(job: TrackedJob) -> None:
    job.observe(RankSaid(rank=1, attempt=0, message=beat(step=9)), NOW)
    draft = job.draft(NOW)
    assert draft.urgency is Urgency.PROGRESS
    assert [(worker.rank, worker.progress.step) for worker in draft.write.ranks] == [(1, 9)]


def test_values_of_the_lowest_rank_and_its_speed_are_written(job: TrackedJob) -> None:
    for rank in (1, 0):
        for step in range(1, 4):
            window = Window(step - 1, step, step == 1, {"loss": aggregate([float(rank)])})
            at = Moment(monotonic=1000.0 + 2 * step, wall=NOON)
            job.observe(RankSaid(rank=rank, attempt=0, message=beat(step, window=window)), at)
    draft = job.draft(NOW)
    losses = [point.last for point in draft.write.series if point.name == "loss"]
    assert losses == [0.0] * 3
    speeds = [point.last for point in draft.write.series if point.name == THROUGHPUT]
    assert speeds[-1] == draft.ranks[0].throughput_steps_per_sec == pytest.approx(0.5)
    job.mark_written(draft)
    assert job.draft(NOW).write.series == ()


def test_values_of_unknown_ranks_and_attempts_are_left_out(job: TrackedJob) -> None:
    window = Window(0, 1, is_back=True, values={"loss": aggregate([1.0])})
    for rank, attempt in ((99, 0), (-1, 0), (0, 7)):
        job.observe(RankSaid(rank=rank, attempt=attempt, message=beat(1, window=window)), NOW)
    assert job.draft(NOW).write.series == ()


def test_a_death_is_urgent(job: TrackedJob) -> None:
    job.observe(exited(1, 0, code=1), NOW)
    draft = job.draft(NOW)
    assert draft.urgency is Urgency.NOW
    assert [event.kind for event in draft.write.events] == ["rank_exited"]
    assert draft.write.events[0].at == NOON
    assert (draft.write.events[0].rank, draft.write.events[0].attempt) == (1, 0)


def test_a_decision_is_folded_in_and_kept_for_later() -> None:
    job = tracked(Story.submitted(world_size=1))
    job.decide([SetStatus(status=JobStatus.STARTING), StartAgent(host=LOCAL_HOST)], NOW)
    assert job.snapshot.status is JobStatus.STARTING
    assert job.snapshot.agents[LOCAL_HOST].agent_number == 1
    assert job.decided == [SetStatus(status=JobStatus.STARTING), StartAgent(host=LOCAL_HOST)]
    assert job.draft(NOW).urgency is Urgency.NOW
    assert [it.agent_number for it in job.draft(NOW).write.agents] == [1]


def test_a_job_starts_when_it_is_first_admitted() -> None:
    job = tracked(Story.submitted(world_size=1))
    job.decide([SetStatus(status=JobStatus.STARTING)], NOW)
    assert job.attachment.started_at == NOON
    job.decide([SetStatus(status=JobStatus.QUEUED), SetStatus(status=JobStatus.STARTING)], LATER)
    assert job.attachment.started_at == NOON


def test_changes_during_a_commit_stay_unwritten(job: TrackedJob) -> None:
    job.observe(exited(0, 0, code=1), NOW)
    draft = job.draft(NOW)
    job.observe(exited(1, 0, code=2), NOW)
    job.mark_written(draft)
    rest = job.draft(NOW)
    assert [event.message for event in rest.write.events] == ["rank 1 exited with code 2"]
    assert [worker.rank for worker in rest.write.ranks] == [1]
    assert rest.urgency is Urgency.NOW


def test_a_failed_draft_is_repeated_whole(job: TrackedJob) -> None:
    job.observe(exited(0, 0, code=1), NOW)
    lost = job.draft(NOW)
    job.observe(exited(1, 0, code=2), NOW)
    again = job.draft(NOW)
    assert again.write.events[: len(lost.write.events)] == lost.write.events
    assert [worker.rank for worker in again.write.ranks] == [0, 1]


@pytest.mark.parametrize(
    ("status", "admitted", "over"),
    [
        (JobStatus.QUEUED, False, False),
        (JobStatus.STARTING, True, False),
        (JobStatus.STOPPING, True, False),
        (JobStatus.COMPLETED, False, True),
        (JobStatus.FAILED, False, True),
        (JobStatus.STOPPED, False, True),
    ],
)
def test_a_job_holds_slots_between_the_queue_and_its_end(
    status: JobStatus, *, admitted: bool, over: bool
) -> None:
    job = tracked(Story(replace(Story.submitted().job, status=status)))
    assert (job.is_admitted, job.is_over) == (admitted, over)


def test_a_start_is_in_the_draft_before_it_is_performed() -> None:
    story = Story.submitted(world_size=1).is_admitted()
    story.plans()
    job = tracked(story.agent_connects())
    job.mark_written(job.draft(NOW))
    job.decide([Start(rank=0)], NOW)
    (worker,) = job.draft(NOW).write.ranks
    assert (worker.attempt, worker.state) == (0, "spawned")


@pytest.mark.parametrize(
    ("scope", "decided", "needs_new_port"),
    [
        ("rank", StartAgent(host=LOCAL_HOST), True),
        ("rank", Start(rank=0), False),
        ("gang", StartAgent(host=LOCAL_HOST), False),
        ("gang", Start(rank=0), True),
    ],
)
def test_a_new_port_is_needed_when_ranks_meet_anew(
    scope: str,
    decided: StartAgent | Start,
    needs_new_port: bool,  # noqa: FBT001  what is expected
) -> None:
    job = tracked(Story.submitted(command=("true",), restart_scope=scope).is_admitted())
    assert not job.needs_new_port
    job.decide([decided], NOW)
    assert job.needs_new_port is needs_new_port


def test_ranks_that_run_keep_their_port_when_an_agent_is_replaced(job: TrackedJob) -> None:
    job.decided = [StartAgent(host=LOCAL_HOST)]
    assert not job.needs_new_port
