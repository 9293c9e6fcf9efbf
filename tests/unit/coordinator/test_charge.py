from dataclasses import replace
from datetime import UTC, datetime

import pytest
from stories import Story, beat, exited

from coordinator.actions import Move, Start, StartAgent
from coordinator.charge import Charge
from coordinator.moment import Moment
from coordinator.rows import Attachment, Haste
from muster.contracts.job import JobStatus
from muster.contracts.messages import RankSaid

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
NOW = Moment(monotonic=1000.0, wall=NOON)
LATER = Moment(monotonic=1001.0, wall=NOON)


def charge_of(story: Story) -> Charge:
    return Charge(snapshot=story.job, attachment=Attachment(started_at=None))


@pytest.fixture
def charge() -> Charge:
    """A running job, everything about it written down."""
    charge = charge_of(Story.running(world_size=2))
    charge.written(charge.draft(NOW))
    return charge


def test_what_was_never_written_is_urgent() -> None:
    draft = charge_of(Story.running(world_size=2)).draft(NOW)
    assert draft.haste is Haste.AT_ONCE
    assert [worker.rank for worker in draft.changed] == [0, 1]


def test_what_is_written_is_not_written_again(charge: Charge) -> None:
    draft = charge.draft(NOW)
    assert draft.haste is Haste.NONE
    assert draft.changed == []


def test_progress_waits_for_the_tick(charge: Charge) -> None:
    charge.learn(RankSaid(rank=1, incarnation=0, message=beat(step=9)), NOW)
    draft = charge.draft(NOW)
    assert draft.haste is Haste.PROGRESS
    assert [(worker.rank, worker.step) for worker in draft.changed] == [(1, 9)]


def test_a_death_does_not_wait(charge: Charge) -> None:
    charge.learn(exited(1, 0, code=1), NOW)
    draft = charge.draft(NOW)
    assert draft.haste is Haste.AT_ONCE
    assert [event.kind for event in draft.events] == ["rank_exited"]
    assert draft.events[0].at == NOON
    assert (draft.events[0].rank, draft.events[0].incarnation) == (1, 0)


def test_what_is_decided_is_known_at_once_and_kept_to_be_performed() -> None:
    charge = charge_of(Story.submitted(world_size=1))
    charge.decide([Move(status=JobStatus.STARTING), StartAgent()], NOW)
    assert charge.snapshot.status is JobStatus.STARTING
    assert charge.snapshot.generation == 1
    assert charge.decided == [Move(status=JobStatus.STARTING), StartAgent()]
    assert charge.draft(NOW).haste is Haste.AT_ONCE
    assert charge.draft(NOW).change.generation == 1


def test_a_job_has_started_when_it_is_first_let_in_and_not_when_it_comes_back() -> None:
    charge = charge_of(Story.submitted(world_size=1))
    charge.decide([Move(status=JobStatus.STARTING)], NOW)
    assert charge.attachment.started_at == NOON
    charge.decide([Move(status=JobStatus.QUEUED), Move(status=JobStatus.STARTING)], LATER)
    assert charge.attachment.started_at == NOON


def test_what_happens_while_a_draft_is_written_stays_unwritten(charge: Charge) -> None:
    charge.learn(exited(0, 0, code=1), NOW)
    draft = charge.draft(NOW)
    charge.learn(exited(1, 0, code=2), NOW)
    charge.written(draft)
    rest = charge.draft(NOW)
    assert [event.message for event in rest.events] == ["rank 1 exited with code 2"]
    assert [worker.rank for worker in rest.changed] == [1]
    assert rest.haste is Haste.AT_ONCE


def test_a_draft_that_could_not_be_written_comes_again_whole(charge: Charge) -> None:
    charge.learn(exited(0, 0, code=1), NOW)
    lost = charge.draft(NOW)
    charge.learn(exited(1, 0, code=2), NOW)
    again = charge.draft(NOW)
    assert again.events[: len(lost.events)] == lost.events
    assert [worker.rank for worker in again.changed] == [0, 1]


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
    charge = charge_of(Story(replace(Story.submitted().job, status=status)))
    assert (charge.is_admitted, charge.is_over) == (admitted, over)


def test_a_start_is_in_the_draft_before_it_is_performed() -> None:
    story = Story.submitted(world_size=1).is_admitted()
    story.plans()
    charge = charge_of(story.agent_joins())
    charge.written(charge.draft(NOW))
    charge.decide([Start(rank=0)], NOW)
    (worker,) = charge.draft(NOW).changed
    assert (worker.incarnation, worker.state) == (0, "spawned")


@pytest.mark.parametrize(
    ("scope", "decided", "is_to_meet"),
    [
        ("rank", StartAgent(), True),
        ("rank", Start(rank=0), False),
        ("gang", StartAgent(), False),
        ("gang", Start(rank=0), True),
    ],
)
def test_ranks_meet_anew_with_every_agent_but_those_of_a_gang_whenever_it_starts(
    scope: str,
    decided: StartAgent | Start,
    is_to_meet: bool,  # noqa: FBT001  what is expected
) -> None:
    charge = charge_of(Story.submitted(command=("true",), restart_scope=scope).is_admitted())
    assert not charge.is_to_meet
    charge.decide([decided], NOW)
    assert charge.is_to_meet is is_to_meet
