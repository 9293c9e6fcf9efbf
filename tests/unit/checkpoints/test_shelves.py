"""What lies on the shelves of a job, and how it is."""

from pathlib import Path

import pytest
from vaults import Rank, owner

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMissing
from muster.checkpoints.filesystem import LocalFileSystem
from muster.checkpoints.names import LATEST, STATE
from muster.checkpoints.shelves import EVERYBODY, Condition, examine, shelves


def saved(directory: Path, *steps: int, **whose: object) -> Path:
    rank = Rank(LocalFileSystem(), owner(**whose), keep_last=3, directory=directory)
    rank.save(*steps)
    rank.vault.close()
    return directory


def damage(directory: Path, step: int) -> Path:
    [file] = directory.glob(f"step_{step:010d}*/{STATE}")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def conditions(directory: Path, uid: str | None = None) -> list[tuple[int, Condition]]:
    [shelf] = shelves(directory, uid)
    return [(one.name.step, one.condition) for one in examine(shelf)]


def test_the_newest_that_is_intact_is_current(tmp_path: Path) -> None:
    directory = saved(tmp_path / "job", 1, 2, 3)
    assert conditions(directory) == [
        (3, Condition.CURRENT),
        (2, Condition.INTACT),
        (1, Condition.INTACT),
    ]
    file = damage(directory, 3)
    assert conditions(directory) == [
        (3, Condition.DAMAGED),
        (2, Condition.CURRENT),
        (1, Condition.INTACT),
    ]
    [shelf] = shelves(directory)
    assert str(file) in next(examine(shelf)).damage
    assert shelf.newest().step == 2
    with pytest.raises(CheckpointDamaged, match="is not what was written"):
        shelf.of_step(3)


def test_another_jobs_are_told_apart(tmp_path: Path) -> None:
    directory = saved(tmp_path / "job", 7, uid="before")
    saved(directory, 1)
    assert dict(conditions(directory)) == {7: Condition.FOREIGN, 1: Condition.CURRENT}
    assert dict(conditions(directory, "before")) == {7: Condition.CURRENT, 1: Condition.FOREIGN}
    assert [shelves(directory, uid)[0].newest().step for uid in (None, "before")] == [1, 7]
    with pytest.raises(CheckpointMissing, match="holds no checkpoint of this job yet"):
        shelves(directory, "after")[0].newest()


def test_every_rank_has_its_shelf_and_all_together_one(tmp_path: Path) -> None:
    for rank in (10, 2):
        saved(tmp_path / "apart" / f"worker_{rank}", 1, rank=rank)
    saved(tmp_path / "together", 1)
    assert [shelf.whose for shelf in shelves(tmp_path / "apart")] == ["rank 2", "rank 10"]
    assert [shelf.whose for shelf in shelves(tmp_path / "together")] == [EVERYBODY]
    [alone] = shelves(tmp_path / "apart" / "worker_10")
    assert (alone.whose, alone.rank, alone.newest().step) == ("rank 10", 10, 1)


def test_what_is_not_there_is_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="holds no checkpoints"):
        shelves(tmp_path)
    [shelf] = shelves(saved(tmp_path / "job", 1, 2))
    with pytest.raises(CheckpointMissing, match="no checkpoint of step 9: there are those of 1, 2"):
        shelf.of_step(9)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / LATEST).write_text("torn")
    [shelf] = shelves(tmp_path / "begun")
    with pytest.raises(CheckpointMissing, match="holds no checkpoint of this job yet"):
        shelf.newest()
    assert not list(examine(shelf))
