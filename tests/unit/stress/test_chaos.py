"""The chaos harness: it draws the faults that it reports, and its checks can fail."""

import shlex
from pathlib import Path

import pytest

from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import LATEST, STATE
from muster.contracts.rank import ProcessRecord
from stress.chaos.__main__ import Plan
from stress.chaos.faults import CHOICES, Fault, Kind, Victim, blows, choices_of
from stress.chaos.figures import Event, History
from stress.chaos.logs import NumberedLines
from stress.chaos.observer import JobSeen, Look, RankSeen
from stress.chaos.program import witness_directory
from stress.chaos.reader import Watch
from stress.chaos.report import Report
from stress.chaos.saves import Saves
from stress.chaos.strikes import Strike, Target
from tests.support.checkpoint_ranks import Rank
from tests.support.log_follower import Event as StreamEvent
from tests.support.log_follower import events

pytestmark = pytest.mark.slow

COUNT = 2000
WHO = "job.0.4711.1"


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    """A rank that saves on a disk."""
    directory = tmp_path / "checkpoints" / "job" / "worker_0"
    directory.mkdir(parents=True)
    return Rank(files=LocalFileSystem(), directory=directory)


def test_a_seed_decides_the_faults() -> None:
    assert blows(50, seed=7) == blows(50, seed=7)
    assert blows(50, seed=7) != blows(50, seed=8)


def test_the_faults_are_mixed() -> None:
    drawn = blows(COUNT, seed=0)
    faults = [fault for blow in drawn for fault in blow.faults]
    assert [fault.number for fault in faults] == list(range(COUNT))
    assert {fault.victim for fault in faults} == set(Victim)
    assert {fault.kind for fault in faults} == set(Kind)
    inside = sum(fault.calls is not None for fault in faults) / COUNT
    together = sum(len(blow.faults) for blow in drawn if len(blow.faults) > 1) / COUNT
    assert inside == pytest.approx(1 / 4, abs=0.05)
    assert together == pytest.approx(1 / 10, abs=0.03)


def test_only_chosen_faults_are_drawn() -> None:
    only = choices_of("coordinator:kill,agent:freeze")
    drawn = blows(COUNT, seed=0, only=only)
    assert drawn == blows(COUNT, seed=0, only=only)
    assert {(it.victim, it.kind) for blow in drawn for it in blow.faults} == set(only)


@pytest.mark.parametrize("words", ["coordinator", "api:freeze", "agent:kill,rank:hang", ","])
def test_an_unknown_fault_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"choose of rank:kill, .*coordinator:freeze"):
        choices_of(words)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(),
        Plan(faults=100, seed=9, minutes=2.5, jobs=2, steps=50, coordinators=1),
        Plan(only=tuple(CHOICES)),
    ],
)
def test_the_command_of_a_run_repeats_it(plan: Plan) -> None:
    python, flag, module, *words = shlex.split(plan.command)
    assert (python, flag, module) == ("python", "-m", "stress.chaos")
    again = Plan.of(words)
    assert again == plan


@pytest.mark.parametrize("breaches", [[], ["job-1 is FAILED"]])
def test_a_breach_fails_the_run_and_names_its_command(breaches: list[str]) -> None:
    report = Report(
        history=History(strikes=[], looks=[], events={}, ends={}),
        breaches={"all jobs COMPLETED": breaches},
        facts={},
        replay=Plan(seed=9).command,
    )
    assert report.has_failed == bool(breaches)
    assert (f"again:  {Plan(seed=9).command}" in report.lines()) == bool(breaches)


def strike_at(at: float, victim: Victim, job_id: str | None = None) -> Strike:
    fault = Fault(
        number=0,
        kind=Kind.KILL,
        victim=victim,
        lot=0.0,
        calls=None,
        waits_for_a_step=False,
        pause_seconds=0.0,
        nap_seconds=0.0,
    )
    process = ProcessRecord(pid=7, start_ticks=1, boot_id="boot", node="here")
    target = Target(record=process, job_id=job_id)
    return Strike(
        fault=fault, target=target, at=at, until=at, inside=False, observed=True, woken=False
    )


def adopted_seconds(strikes: list[Strike], **events: list[tuple[float, str]]) -> list[float]:
    """Return what the table says of the first strike's kind; all jobs were well before it."""
    jobs = {job_id: JobSeen("RUNNING", 1, (RankSeen("live", 4, beats=True),)) for job_id in events}
    history = History(
        strikes=strikes,
        looks=[Look(0.0, jobs)],
        events={
            job_id: [Event(at=at, kind=kind, rank=None, incarnation=None) for at, kind in of_job]
            for job_id, of_job in events.items()
        },
        ends={victim: [] for victim in Victim},
    )
    return history.rows()[strikes[0].fault.victim, Kind.KILL].adopted_seconds


def test_a_coordinators_takeover_ends_with_the_last_agent() -> None:
    kill = strike_at(10.0, Victim.COORDINATOR)
    first, second = [(9.0, "agent_adopted"), (10.5, "agent_adopted")], [(11.0, "agent_adopted")]
    assert adopted_seconds([kill], first=first, second=second) == [1.0]
    assert adopted_seconds([kill], first=first, over=[(10.2, "job_completed")]) == [0.5]
    assert adopted_seconds([kill], over=[(10.2, "job_completed")]) == []
    again = strike_at(10.5, Victim.COORDINATOR)
    assert adopted_seconds([kill, again], job=[(11.0, "agent_adopted")]) == [0.5]


def test_an_agents_takeover_ends_with_its_own_event() -> None:
    kill = strike_at(10.0, Victim.AGENT, "mine")
    mine, other = [(10.0625, "agent_adopted")], [(12.0, "agent_adopted")]
    assert adopted_seconds([kill], mine=mine, other=other) == [0.0625]


def test_the_reader_counts_intact_checkpoints(rank: Rank) -> None:
    watch = Watch(rank.directory.parents[1])
    rank.save(1, 2)
    watch.look()
    rank.save(3)
    watch.look()
    report = watch.report()
    assert report["reads"] > 1
    assert not report["invalid"]
    assert not report["regressed"]


def test_the_reader_sees_a_torn_checkpoint(rank: Rank) -> None:
    rank.save(1, 2)
    (newest,) = rank.directory.glob(f"step_0000000002*/{STATE}")
    newest.write_bytes(newest.read_bytes()[:-1])
    watch = Watch(rank.directory.parents[1])
    watch.look()
    assert "does not match its hash" in watch.report()["invalid"][0]


def test_the_reader_sees_a_checkpoint_that_goes_back(rank: Rank) -> None:
    watch = Watch(rank.directory.parents[1])
    rank.save(1)
    older = (rank.directory / LATEST).read_bytes()
    rank.save(2)
    watch.look()
    (rank.directory / LATEST).write_bytes(older)
    watch.look()
    assert watch.report()["regressed"]


@pytest.mark.parametrize(
    ("numbers", "written", "is_whole"),
    [
        pytest.param([0, 1, 2], 3, True, id="whole"),
        pytest.param([0, 1, 2], 2, True, id="killed between a line and its witness"),
        pytest.param([0, 1, 3], 4, False, id="a gap"),
        pytest.param([0, 1, 1, 2], 3, False, id="a line twice"),
        pytest.param([1, 0, 2], 3, False, id="out of order"),
        pytest.param([0, 1], 3, False, id="the last line is missing"),
        pytest.param([], 3, False, id="nothing at all"),
    ],
)
def test_an_incomplete_log_is_found(
    tmp_path: Path, numbers: list[int], written: int, *, is_whole: bool
) -> None:
    printed = _printed(tmp_path, numbers, written)
    assert is_whole == (not list(printed.faults(tmp_path / "checkpoints")))


def _printed(root: Path, numbers: list[int], written: int) -> NumberedLines:
    witnesses = witness_directory(root / "checkpoints")
    witnesses.mkdir()
    (witnesses / WHO).write_bytes(written.to_bytes(8, "little"))
    printed = NumberedLines("job")
    for event in events(f"data: [rank 0] line {it} of {WHO}\n\n".encode() for it in numbers):
        printed.take(event.data)
    return printed


def test_a_strike_inside_a_save_comes_before_its_end(rank: Rank) -> None:
    rank.save(1, 2, 3)
    with Saves(rank.directory) as saves:
        assert not saves.reach(0, timeout_seconds=0.01)
        rank.save(4)
        # All of it at once: by the time it is seen it is over.
        assert not saves.reach(0, timeout_seconds=0.01)
        (rank.directory / ".step_0000000005.g0000.tmp").mkdir()
        assert saves.reach(0, timeout_seconds=1.0)
        assert saves.is_unfinished()
        rank.save(6)
        assert not saves.is_unfinished()


# The reader of a log stream


STREAM = (
    "retry: 1000\n\n"
    "id: 0.0:9\ndata: one\ndata: two: of them\n\n"
    ": ping\n\n"
    "data: a\u2028line\n\n"
    "event: end\nid: 0.0:12\ndata: {}\n\n"
).encode()
EVENTS = [
    StreamEvent(id="0.0:9", data=["one", "two: of them"]),
    StreamEvent(data=["a\u2028line"]),
    StreamEvent(kind="end", id="0.0:12", data=["{}"]),
]


@pytest.mark.parametrize("size", [1, 7, len(STREAM)])
def test_a_stream_in_pieces_has_the_same_events(size: int) -> None:
    chunks = [STREAM[place : place + size] for place in range(0, len(STREAM), size)]
    assert list(events(chunks)) == EVENTS


def test_an_incomplete_event_is_dropped() -> None:
    assert list(events([STREAM[:-1]])) == EVENTS[:-1]
