"""A harness that cannot fail shows nothing: it draws what it says, and its checks have teeth."""

from pathlib import Path

import pytest

from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import LATEST, STATE
from muster.contracts.rank import ProcessRecord
from stress.chaos.faults import ON_S3, Fault, Kind, Victim, blows, choices_of
from stress.chaos.figures import Event, History
from stress.chaos.observer import JobSeen, Look, RankSeen
from stress.chaos.reader import Reader
from stress.chaos.saves import Saves
from stress.chaos.services import NumberedLines
from stress.chaos.strikes import Strike, Target
from tests.support.checkpoint_ranks import Rank
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


def test_a_seed_gives_the_same_faults_and_another_one_others() -> None:
    assert blows(50, seed=7) == blows(50, seed=7)
    assert blows(50, seed=7) != blows(50, seed=8)


def test_the_faults_are_mixed_as_they_say() -> None:
    drawn = blows(COUNT, seed=0)
    faults = [fault for blow in drawn for fault in blow.faults]
    assert [fault.number for fault in faults] == list(range(COUNT))
    assert {fault.victim for fault in faults} == set(Victim) - {Victim.STORAGE, Victim.STORE}
    on_s3 = [fault for blow in blows(COUNT, seed=0, victims=ON_S3) for fault in blow.faults]
    assert {fault.victim for fault in on_s3} == set(Victim)
    assert {fault.kind for fault in faults} == set(Kind)
    inside = sum(fault.calls is not None for fault in faults) / COUNT
    together = sum(len(blow.faults) for blow in drawn if len(blow.faults) > 1) / COUNT
    assert inside == pytest.approx(1 / 4, abs=0.05)
    assert together == pytest.approx(1 / 10, abs=0.03)


def test_only_what_was_chosen_is_drawn() -> None:
    only = choices_of("coordinator:kill,agent:freeze")
    drawn = blows(COUNT, seed=0, only=only)
    assert drawn == blows(COUNT, seed=0, only=only)
    assert {(it.victim, it.kind) for blow in drawn for it in blow.faults} == set(only)


@pytest.mark.parametrize("words", ["coordinator", "api:freeze", "agent:kill,rank:hang", ","])
def test_unknown_fault_is_refused_with_the_choices(words: str) -> None:
    with pytest.raises(ValueError, match=r"choose of rank:kill, .*coordinator:freeze"):
        choices_of(words)


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
    process = ProcessRecord(pid=7, start_ticks=1, boot_id="boot", node="here", pid_namespace=1)
    target = Target(record=process, job_id=job_id)
    return Strike(
        fault=fault, target=target, at=at, until=at, inside=False, observed=True, woken=False
    )


def recovered_seconds(strikes: list[Strike], **events: list[tuple[float, str]]) -> list[float]:
    """Return what the table says of the first strike's kind; all jobs were well before it."""
    jobs = {job_id: JobSeen("RUNNING", 1, (RankSeen("live", 4, beats=True),)) for job_id in events}
    history = History(
        strikes=strikes,
        looks=[Look(0.0, jobs)],
        events={
            job_id: [Event(at=at, kind=kind, rank=None, attempt=None) for at, kind in of_job]
            for job_id, of_job in events.items()
        },
        ends={victim: [] for victim in Victim},
    )
    return history.rows()[strikes[0].fault.victim, Kind.KILL].recovered_seconds


def test_a_coordinator_has_taken_over_when_it_has_the_last_agent() -> None:
    kill = strike_at(10.0, Victim.COORDINATOR)
    first, second = [(9.0, "agent_adopted"), (10.5, "agent_adopted")], [(11.0, "agent_adopted")]
    assert recovered_seconds([kill], first=first, second=second) == [1.0]
    assert recovered_seconds([kill], first=first, over=[(10.2, "job_completed")]) == [0.5]
    assert recovered_seconds([kill], over=[(10.2, "job_completed")]) == []


def test_an_agent_is_there_again_when_its_own_job_says_so() -> None:
    kill = strike_at(10.0, Victim.AGENT, "mine")
    mine, other = [(10.0625, "agent_adopted")], [(12.0, "agent_adopted")]
    assert recovered_seconds([kill], mine=mine, other=other) == [0.0625]


def test_second_strike_during_recovery_is_not_counted() -> None:
    kills = [strike_at(at, Victim.COORDINATOR) for at in (10.0, 10.5)]
    assert recovered_seconds(kills, job=[(11.0, "agent_adopted")]) == [0.5]


def test_the_reader_counts_what_is_intact(rank: Rank) -> None:
    watch = Reader(rank.directory.parents[1])
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
    watch = Reader(rank.directory.parents[1])
    watch.look()
    assert "does not match its hash" in watch.report()["invalid"][0]


def test_the_reader_sees_a_checkpoint_that_goes_back(rank: Rank) -> None:
    watch = Reader(rank.directory.parents[1])
    rank.save(1)
    older = (rank.directory / LATEST).read_bytes()
    rank.save(2)
    watch.look()
    (rank.directory / LATEST).write_bytes(older)
    watch.look()
    assert watch.report()["regressed"]


@pytest.mark.parametrize(
    ("numbers", "written"),
    [
        pytest.param([0, 1, 3], 4, id="a gap"),
        pytest.param([0, 1, 1, 2], 3, id="a line twice"),
        pytest.param([1, 0, 2], 3, id="out of order"),
        pytest.param([0, 1], 3, id="the last line is missing"),
        pytest.param([], 3, id="nothing at all"),
    ],
)
def test_a_log_that_lacks_anything_is_found_out(
    tmp_path: Path, numbers: list[int], written: int
) -> None:
    assert list(_printed(tmp_path, numbers, written).faults(tmp_path / "witnesses"))


@pytest.mark.parametrize("written", [2, 3])
def test_a_whole_log_is_a_whole_log(tmp_path: Path, written: int) -> None:
    """Who was killed between a line and its witness has written one line more."""
    assert not list(_printed(tmp_path, [0, 1, 2], written).faults(tmp_path / "witnesses"))


def _printed(root: Path, numbers: list[int], written: int) -> NumberedLines:
    witnesses = root / "witnesses"
    witnesses.mkdir()
    (witnesses / WHO).write_bytes(written.to_bytes(8, "little"))
    printed = NumberedLines("job")
    for event in events(f"data: [rank 0] line {it} of {WHO}\n\n".encode() for it in numbers):
        printed.take(event.data)
    return printed


def test_an_instant_inside_a_save_is_before_its_end(rank: Rank) -> None:
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
