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
from muster.contracts.messages import Beat, RankSaid, RankSpawned, TookUp
from store.records import Incarnation, ProcessRecord, Worker

NOON = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
START = Taken(action=Start(rank=0))
SPAWNED = RankSpawned(rank=0, incarnation=0, pid=4711, start_ticks=1, boot_id="b", node="n")
PROCESS = ProcessRecord(pid=4711, start_ticks=1, boot_id="b", node="n")
RUNNING = Incarnation(rank=0, incarnation=0, pid=4711, started_at=NOON)


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
    assert rows(charge) == [Incarnation(rank=0, incarnation=0, pid=None, started_at=NOON)]
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
    ("said", "step"),
    [
        pytest.param([beat(0), beat(3)], 0, id="from nothing"),
        pytest.param([beat(20, last_checkpoint_step=20)], 20, id="from its checkpoint"),
        pytest.param([beat(0), beat(21, last_checkpoint_step=20)], 20, id="after a long reading"),
        pytest.param([beat(9), beat(30, last_checkpoint_step=20)], 0, id="never twice"),
        pytest.param(
            [beat(40, last_checkpoint_step=40, checkpoints_saved=2)], 40, id="heard of late"
        ),
        pytest.param([beat(0)], None, id="still reading"),
    ],
)
def test_a_rank_of_its_own_says_itself_where_it_began(said: list[Beat], step: int | None) -> None:
    story = Story.running(world_size=1).beats(0, 23, last_checkpoint_step=23).dies(0)
    story.comes_back(0)
    for message in said:
        story.rank_says(0, message)
    assert story.rank(0).step_at_start == step


def test_a_start_is_on_record_as_soon_as_it_is_told(charge: Charge) -> None:
    for happening in (START, SPAWNED):
        charge.learn(happening, after(0))
    rows(charge)
    charge.learn(RankSaid(rank=0, incarnation=0, message=beat(7)), after(1))
    assert [row.step_at_start for row in rows(charge)] == [0]
    charge.learn(RankSaid(rank=0, incarnation=0, message=beat(8)), after(2))
    assert rows(charge) == [], "beats alone are no rows"


@pytest.mark.parametrize(("said", "steps"), [((), (None, None)), ((beat(0),), (0, 0))])
def test_nothing_of_a_predecessor_is_put_down_to_a_process(
    said: tuple[Beat, ...], steps: tuple[int | None, int | None]
) -> None:
    story = Story.running(world_size=1).beats(0, 23, last_checkpoint_step=20).dies(0)
    charge = charge_of(story.comes_back(0))
    for message in said:
        charge.learn(RankSaid(rank=0, incarnation=1, message=message), after(1))
    charge.learn(exited(0, 1, code=1), after(2))
    (row,) = rows(charge)
    assert (row.step_at_start, row.step_at_end) == steps


def test_a_worker_that_never_took_up_the_state_has_no_steps() -> None:
    story = Story.training(world_size=1).beats(0, 12).dies(0)
    charge = charge_of(story.comes_back(0).beats(0, 0))
    charge.learn(exited(0, 1, code=1), after(2))
    (row,) = rows(charge)
    assert (row.step_at_start, row.step_at_end) == (None, None)


def test_what_ran_under_a_predecessor_is_brought_to_its_end() -> None:
    alive = Worker(rank=0, incarnation=3, state="live", process=PROCESS, step=8)
    gone = Worker(rank=1, incarnation=2, state="exited", process=None)
    job = Story.running(world_size=2).agent_is_lost().job
    (row,) = ended_meanwhile(job, [alive, gone], after(4))
    assert (row.rank, row.pid, row.ended_at) == (0, 4711, NOON + timedelta(seconds=4))
    assert row.step_at_end is None, "none of them has ever said where it is"
