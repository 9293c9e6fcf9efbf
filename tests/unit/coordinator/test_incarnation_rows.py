"""The record of every process: when it began, how it ended, and that nothing gets lost between."""

from datetime import UTC, datetime, timedelta

import pytest
from stories import Story, beat, exited

from coordinator.actions import Start
from coordinator.charge import Charge
from coordinator.happenings import AgentLost, Taken
from coordinator.incarnation_rows import ended_meanwhile
from coordinator.moment import Moment
from coordinator.rows import Attachment, Haste
from muster.contracts.endings import RetryClass
from muster.contracts.job import Reason
from muster.contracts.messages import RankSaid, RankSpawned, TookUp
from store.records import Incarnation, ProcessRecord, Worker

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
START = Taken(action=Start(rank=0))
SPAWNED = RankSpawned(rank=0, incarnation=0, pid=4711, start_ticks=1, boot_id="b", node="n")
PROCESS = ProcessRecord(pid=4711, start_ticks=1, boot_id="b", node="n")
RUNNING = Incarnation(rank=0, incarnation=0, pid=4711, started_at=NOON, step_at_start=0)


def after(seconds: float) -> Moment:
    return Moment(monotonic=1000.0 + seconds, wall=NOON + timedelta(seconds=seconds))


def charge_of(story: Story) -> Charge:
    return Charge(snapshot=story.job, attachment=Attachment(started_at=None))


@pytest.fixture
def charge() -> Charge:
    """A job of one rank that is about to be started."""
    story = Story.submitted(world_size=1).is_admitted()
    story.plans()
    return charge_of(story.agent_joins())


def rows(charge: Charge) -> list[Incarnation]:
    """Return what the next draft writes, and have it written."""
    draft = charge.draft(after(0))
    charge.written(draft)
    return list(draft.write.incarnations)


def test_a_process_is_on_record_from_the_decision_to_start_it(charge: Charge) -> None:
    charge.learn(START, after(0))
    assert rows(charge) == [
        Incarnation(rank=0, incarnation=0, pid=None, started_at=NOON, step_at_start=0)
    ]
    charge.learn(SPAWNED, after(0.5))
    assert rows(charge) == [RUNNING]
    assert rows(charge) == [], "what is written is not written again"


def test_its_end_says_how_and_why_and_where(charge: Charge) -> None:
    for happening in (START, SPAWNED, RankSaid(rank=0, incarnation=0, message=beat(7))):
        charge.learn(happening, after(0))
    rows(charge)
    charge.learn(exited(0, 0, code=1, lines=["NameError: x"]), after(9))
    assert charge.draft(after(9)).haste is Haste.AT_ONCE
    assert rows(charge) == [
        Incarnation(
            rank=0,
            incarnation=0,
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


def test_no_end_is_lost_while_the_database_is_away(charge: Charge) -> None:
    for happening in (START, SPAWNED, exited(0, 0, signal=9), START):
        charge.learn(happening, after(0))
    first, second = rows(charge)
    assert (first.incarnation, first.exit_signal, first.pid) == (0, 9, 4711)
    assert (second.incarnation, second.pid, second.ended_at) == (1, None, None)


def test_what_changed_during_a_commit_is_written_with_the_next(charge: Charge) -> None:
    charge.learn(START, after(0))
    draft = charge.draft(after(0))
    charge.learn(SPAWNED, after(1))
    charge.written(draft)
    assert rows(charge) == [RUNNING]


def test_a_stale_message_writes_nothing(charge: Charge) -> None:
    charge.learn(START, after(0))
    rows(charge)
    charge.learn(exited(0, 5, code=1), after(1))
    charge.learn(exited(9, 0, code=1), after(1))
    assert rows(charge) == []


def test_a_lost_agent_ends_all_its_processes() -> None:
    charge = charge_of(Story.running(world_size=2).exits(0))
    charge.learn(AgentLost(generation=1, message="gone"), after(3))
    (row,) = rows(charge)
    assert (row.rank, row.retry_class, row.reason) == (1, "infrastructure", "agent_lost")


def test_a_rank_that_trains_with_others_began_where_they_were() -> None:
    story = Story.gathering(world_size=1).is_ready(0).passes(2)
    story.plans()
    charge = charge_of(story)
    for step in (12, 14):
        taken_up = TookUp(generation=1, step=step)
        charge.learn(RankSaid(rank=0, incarnation=0, message=taken_up), after(2))
    (row,) = rows(charge)
    assert row.step_at_start == 12


@pytest.mark.parametrize(
    ("resume_from", "saved", "step"), [(None, None, 0), ("other", None, None), ("other", 20, 20)]
)
def test_a_rank_of_its_own_begins_at_its_checkpoint(
    resume_from: str | None, saved: int | None, step: int | None
) -> None:
    story = Story.running(world_size=1, resume_from=resume_from)
    story.beats(0, 23, last_checkpoint_step=saved).dies(0)
    assert story.comes_back(0).rank(0).step_at_start == step


def test_what_ran_under_a_predecessor_is_brought_to_its_end() -> None:
    alive = Worker(rank=0, incarnation=3, state="live", process=PROCESS, step=8)
    gone = Worker(rank=1, incarnation=2, state="exited", process=None)
    job = Story.running(world_size=2).agent_is_lost().job
    (row,) = ended_meanwhile(job, [alive, gone], after(4))
    assert (row.rank, row.pid, row.ended_at) == (0, 4711, NOON + timedelta(seconds=4))
