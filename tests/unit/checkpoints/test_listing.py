"""The checkpoints of a job: directories, conditions and modes."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from muster.checkpoints.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointMissing,
)
from muster.checkpoints.listing import (
    ALL_RANKS,
    LISTED_LIMIT,
    NAMES_LIMIT,
    Condition,
    checkpoint_dirs,
    examine,
    gang_checkpoints,
    holds_checkpoints,
    refuse_other_mode,
)
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manager import open_manager
from muster.checkpoints.manifest import LATEST, STATE
from muster.contracts.settings.paths import rank_place
from muster.contracts.shards import Position
from tests.support.checkpoint_ranks import Rank, owner
from tests.support.storage_processes import session_of


def saved(directory: Path, *steps: int, **whose: object) -> Path:
    rank = Rank(LocalFileSystem(), owner(**whose), keep_last=3, directory=directory)
    rank.save(*steps)
    rank.manager.close()
    return directory


def damage(directory: Path, step: int) -> Path:
    [file] = directory.glob(f"step_{step:010d}*/{STATE}")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    return file


def conditions(directory: Path, uid: str | None = None) -> list[tuple[int, Condition]]:
    [found] = checkpoint_dirs(directory, uid)
    return [(one.name.step, one.condition) for one in examine(found)]


def test_newest_intact_checkpoint_is_current(tmp_path: Path) -> None:
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
    [found] = checkpoint_dirs(directory)
    assert str(file) in next(examine(found)).damage
    assert found.newest().step == 2
    with pytest.raises(CheckpointDamaged, match="does not match its hash"):
        found.of_step(3)


def test_checkpoints_of_another_job_are_foreign(tmp_path: Path) -> None:
    directory = saved(tmp_path / "job", 7, uid="before")
    saved(directory, 1)
    assert dict(conditions(directory)) == {7: Condition.FOREIGN, 1: Condition.CURRENT}
    assert dict(conditions(directory, "before")) == {7: Condition.CURRENT, 1: Condition.FOREIGN}
    assert [checkpoint_dirs(directory, uid)[0].newest().step for uid in (None, "before")] == [1, 7]
    with pytest.raises(CheckpointMissing, match="holds no checkpoint of this job yet"):
        checkpoint_dirs(directory, "after")[0].newest()


def test_each_rank_has_a_checkpoint_dir(tmp_path: Path) -> None:
    for rank in (10, 2):
        saved(tmp_path / "apart" / f"worker_{rank}", 1, rank=rank)
    saved(tmp_path / "together", 1)
    assert [found.label for found in checkpoint_dirs(tmp_path / "apart")] == ["rank 2", "rank 10"]
    assert [found.label for found in checkpoint_dirs(tmp_path / "together")] == [ALL_RANKS]
    [alone] = checkpoint_dirs(tmp_path / "apart" / "worker_10")
    assert (alone.label, alone.rank, alone.newest().step) == ("rank 10", 10, 1)


def test_missing_checkpoint_raises(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match="holds no checkpoints"):
        checkpoint_dirs(tmp_path)
    [found] = checkpoint_dirs(saved(tmp_path / "job", 1, 2))
    with pytest.raises(CheckpointMissing, match="no checkpoint of step 9: it has steps 1, 2"):
        found.of_step(9)
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / LATEST).write_text("step_0000000001.g0000\n")
    [found] = checkpoint_dirs(tmp_path / "begun")
    with pytest.raises(CheckpointMissing, match="holds no checkpoint of this job yet"):
        found.newest()
    assert not list(examine(found))


TOGETHER = "step_0000000042.g0003"


@pytest.mark.parametrize(
    ("left", "mode", "is_refused"),
    [
        ((TOGETHER,), "synchronous", False),
        ((TOGETHER,), "independent", True),
        ((f"worker_0/{TOGETHER}",), "synchronous", True),
        (("worker_0", f"worker_12/{TOGETHER}"), "independent", False),
        (("worker_0/.FENCE.g0004.8d777f385d3dfec8",), "synchronous", False),
        ((TOGETHER, f"worker_0/{TOGETHER}"), "synchronous", False),
        ((TOGETHER, f"worker_0/{TOGETHER}"), "independent", False),
        (("LATEST", "notes", "worker_x"), "independent", False),
        ((), "independent", False),
    ],
)
def test_checkpoints_only_of_the_other_mode_are_refused(
    tmp_path: Path, left: tuple[str, ...], mode: str, *, is_refused: bool
) -> None:
    for name in left:
        (tmp_path / name).mkdir(parents=True)
    expected = pytest.raises(CheckpointMismatch, match=f"a job of mode {mode} cannot resume")
    with expected if is_refused else nullcontext():
        refuse_other_mode(tmp_path, mode)


def test_only_an_unreadable_directory_raises(tmp_path: Path) -> None:
    refuse_other_mode(tmp_path / "missing", "synchronous")
    with pytest.raises(CheckpointError, match="listing"):
        refuse_other_mode(tmp_path / ("x" * 300), "synchronous")


@pytest.mark.parametrize(
    ("left", "is_one"),
    [
        (TOGETHER, True),
        ("LATEST", False),
        (f"worker_3/{TOGETHER}", True),
        ("worker_3", False),
        (".FENCE.g0004.8d777f385d3dfec8", False),
        ("worker_3/.FENCE.g0004.8d777f385d3dfec8", False),
        ("notes", False),
    ],
)
def test_fences_alone_are_no_checkpoints(tmp_path: Path, left: str, *, is_one: bool) -> None:
    assert not holds_checkpoints(tmp_path / "nowhere")
    (tmp_path / left).mkdir(parents=True)
    assert holds_checkpoints(tmp_path) is is_one


def test_all_ranks_of_a_gang_inherit_from_the_same_job(tmp_path: Path) -> None:
    """Under one id several jobs may have saved, on each rank another one as the last."""
    for rank, uid, step in (0, "old", 6), (1, "old", 6), (0, "ours", 9), (1, "older", 3):
        place = rank_place(tmp_path, rank)
        session = session_of(place, 0, job_uid=uid, keep_last=9)
        open_manager(session, print).save(step, Position(step=step), {})
    inherited = gang_checkpoints(tmp_path, 2, "ours", is_inherited=True)
    assert [len(it.intact) for it in inherited] == [0, 1]
    own = gang_checkpoints(tmp_path, 2, "ours", is_inherited=False)
    assert [it.intact for it in own] == [("step_0000000009.g0000",), ()]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, NAMES_LIMIT // 8])
def test_the_newest_of_very_many_checkpoints_are_listed(tmp_path: Path, ranks: int) -> None:
    place, limit = rank_place(tmp_path, 0), min(LISTED_LIMIT, NAMES_LIMIT // ranks)
    for step in range(limit + 2):
        open_manager(session_of(place, 0, keep_last=999), print).save(step, Position(step=step), {})
        (place / f"step_{step:010}.g0001").mkdir()
    listed = gang_checkpoints(tmp_path, ranks, "uid", is_inherited=False)[0]
    assert [len(listed.intact), len(listed.damaged)] == [limit, limit]
    assert listed.intact[0] == f"step_{limit + 1:010}.g0000"
