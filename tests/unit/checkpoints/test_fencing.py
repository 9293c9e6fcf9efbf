"""Fencing of older generations, and checkpoints of other jobs and ranks."""

import re

import pytest

from muster.checkpoints.errors import CheckpointFailed, CheckpointMismatch, StaleGeneration
from muster.checkpoints.manifest import LATEST, CheckpointName, Fence, temporary_latest
from tests.support.checkpoint_ranks import DIRECTORY, Rank, owner
from tests.support.crash_simulator import MemoryFileSystem


def test_restarted_rank_may_save_a_step_again() -> None:
    first = Rank(owner=owner(generation=0))
    first.save(5, 10)
    second = Rank(first.files, owner(generation=1))
    assert second.restored() == CheckpointName(0, 10)
    second.save(10)
    assert second.restored() == CheckpointName(1, 10)
    assert second.on_disk() == [LATEST, "step_0000000010.g0000", "step_0000000010.g0001"]
    found = second.files.list_directory(str(DIRECTORY))
    assert [name for name in found if "FENCE" in name] == [str(Fence.of(1, "uid"))]


def latest_of(rank: Rank) -> CheckpointName | None:
    """Return the name in LATEST, even if a newer checkpoint exists."""
    return rank.store.latest()


class Sleeps(MemoryFileSystem):
    """Generation 0 is paused before one of its calls while a successor claims and reads.

    The successor also saves if `successor_saves` is true.
    """

    def __init__(self, before: int, *, successor_saves: bool) -> None:
        super().__init__()
        self._before = before
        self._successor_saves = successor_saves
        self.successor: Rank | None = None
        self.restored: CheckpointName | None = None
        self.found: list[str] = []
        self.latest: CheckpointName | None = None

    def _record(self, name: str, *arguments: str | int | bytes) -> None:
        if len(self.operations) >= self._before and self.successor is None:
            self.successor = Rank(self, owner(generation=1))
            self.successor.manager.claim()
            self.restored = self.successor.restored()
            self.found = self.successor.on_disk()
            self.latest = latest_of(self.successor)
            if self._successor_saves:
                self.successor.save(3)
        super()._record(name, *arguments)


def calls_of_a_save(steps: tuple[int, ...]) -> range:
    """Return the numbers of the calls of the last of these saves."""
    rank = Rank()
    rank.save(*steps[:-1])
    start = len(rank.files.operations)
    rank.save(steps[-1])
    return range(start, len(rank.files.operations))


@pytest.mark.parametrize("successor_saves", [True, False])
@pytest.mark.parametrize(
    "steps", [(7,), (5, 6, 7), (4, 5, 6, 7, 8)], ids=["new", "old", "recycled"]
)
def test_replaced_process_never_commits(
    steps: tuple[int, ...],
    successor_saves: bool,  # noqa: FBT001  a case
) -> None:
    for before in calls_of_a_save(steps):
        files = Sleeps(before, successor_saves=successor_saves)
        stale = Rank(files)
        stale.save(*steps[:-1])
        try:
            stale.save(steps[-1])
        except StaleGeneration:
            pass
        else:
            # It had committed before its successor read; only the cleanup was missing.
            assert files.restored == CheckpointName(0, steps[-1])
        assert latest_of(stale) == (CheckpointName(1, 3) if successor_saves else files.latest)
        theirs = {name for name in stale.on_disk() if re.match(r"step_.*\.g0000", name)}
        assert theirs <= set(files.found)
        files.successor.save(9)
        assert files.successor.restored() == CheckpointName(1, 9)
        assert not [words for words in files.successor.warnings if "delete" in words]
        with pytest.raises(StaleGeneration):
            stale.save(10)
        assert files.successor.restored() == CheckpointName(1, 9)


def test_process_started_by_hand_gets_a_new_generation() -> None:
    files = MemoryFileSystem()
    by_hand = owner(uid=None, generation=None)
    first = Rank(files, by_hand)
    first.save(1, 2)
    second = Rank(files, by_hand)
    assert second.restored() == CheckpointName(0, 2)
    second.save(2)
    assert second.on_disk() == [LATEST, "step_0000000002.g0000", "step_0000000002.g0001"]
    with pytest.raises(StaleGeneration):
        first.save(3)


def test_same_generation_keeps_each_others_checkpoints() -> None:
    """Two processes started by hand at once may compute the same generation."""
    rank = Rank(owner=owner(generation=0))
    rank.save(1)
    others = f"{DIRECTORY}/{temporary_latest(0)}"
    rank.files.close(rank.files.create(others))
    with pytest.raises(CheckpointFailed):
        rank.save(2)
    assert others in rank.files.tree()
    assert latest_of(rank) == CheckpointName(0, 1)


def test_checkpoints_of_another_job_are_ignored() -> None:
    old = Rank(owner=owner(uid="old", generation=7))
    old.save(1, 2)
    new = Rank(old.files, owner(uid="new", generation=0), keep_last=1)
    assert new.restored() is None
    new.save(2, 3)
    assert new.restored() == CheckpointName(0, 3)
    assert new.warnings == []
    theirs = ["step_0000000001.g0007", "step_0000000002.g0007"]
    assert set(theirs) < set(new.on_disk())


@pytest.mark.parametrize("changed", [{"rank": 1}, {"world_size": 3}])
def test_checkpoint_of_another_rank_is_refused(changed: dict[str, int]) -> None:
    rank = Rank()
    rank.save(1)
    with pytest.raises(CheckpointMismatch, match="rank 0 of 2"):
        Rank(rank.files, owner(**changed)).manager.restore()
