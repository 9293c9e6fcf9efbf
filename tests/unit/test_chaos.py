"""A harness that cannot fail shows nothing: it draws what it says, and its checks have teeth."""

from pathlib import Path

import pytest
from chaos_faults import Kind, Victim, blows
from chaos_logs import LogFollower
from chaos_program import witness_directory
from chaos_reader import Watch
from chaos_saves import Saves
from vaults import Rank

from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.names import LATEST, STATE

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
    assert {fault.victim for fault in faults} == set(Victim)
    assert {fault.kind for fault in faults} == set(Kind)
    inside = sum(fault.calls is not None for fault in faults) / COUNT
    together = sum(len(blow.faults) for blow in drawn if len(blow.faults) > 1) / COUNT
    assert inside == pytest.approx(1 / 4, abs=0.05)
    assert together == pytest.approx(1 / 10, abs=0.03)


def test_the_reader_counts_what_is_intact(rank: Rank) -> None:
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
    assert "is not what was written" in watch.report()["invalid"][0]


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
    assert list(_followed(tmp_path, numbers, written).faults(tmp_path / "checkpoints"))


@pytest.mark.parametrize("written", [2, 3])
def test_a_whole_log_is_a_whole_log(tmp_path: Path, written: int) -> None:
    """Who was killed between a line and its witness has written one line more."""
    assert not list(_followed(tmp_path, [0, 1, 2], written).faults(tmp_path / "checkpoints"))


def _followed(root: Path, numbers: list[int], written: int) -> LogFollower:
    witnesses = witness_directory(root / "checkpoints")
    witnesses.mkdir()
    (witnesses / WHO).write_bytes(written.to_bytes(8, "little"))
    follower = LogFollower("http://127.0.0.1:1", "job")
    follower.take_events(
        line for number in numbers for line in (f"data: [rank 0] line {number} of {WHO}", "")
    )
    return follower


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
