"""Which checkpoints of another library are resumed from, and which are deleted."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from muster.checkpoints.errors import CheckpointDamaged, CheckpointMismatch
from muster.torch.saved import SavedCheckpoints
from tests.support.ranks import run_of


def save(saved: SavedCheckpoints, directory: Path, step: int, best: Path | None = None) -> Path:
    """Write a checkpoint as a trainer does, and record it."""
    saved._run.steps_done = step  # noqa: SLF001
    path = directory / "output" / f"checkpoint-{step}"
    (path / "shards").mkdir(parents=True)
    (path / "model").write_bytes(b"weights" * step)
    (path / "shards" / "0").write_bytes(b"moments" * step)
    saved.add(str(path), best and str(best))
    return path


def resumed(directory: Path) -> SavedCheckpoints:
    return SavedCheckpoints(run_of(directory))


def test_the_newest_recorded_checkpoint_is_resumed_from(tmp_path: Path) -> None:
    saved = resumed(tmp_path)
    assert saved.newest_path is None
    save(saved, tmp_path, 5)
    path = save(saved, tmp_path, 10)
    (tmp_path / "output" / "checkpoint-15").mkdir()  # torn: the trainer was killed
    again = resumed(tmp_path)
    assert again.newest_path == str(path)
    assert again._run.steps_done == 10  # noqa: SLF001
    assert again.has(10)


@pytest.mark.parametrize("damage", ["torn", "changed", "deleted", "more"])
def test_a_damaged_checkpoint_is_skipped(
    damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = resumed(tmp_path)
    older, newest = save(saved, tmp_path, 5), save(saved, tmp_path, 10)
    model = newest / "model"
    if damage == "torn":
        model.write_bytes(model.read_bytes()[:-1])
    elif damage == "changed":
        model.write_bytes(model.read_bytes().replace(b"w", b"x"))
    elif damage == "deleted":
        model.unlink()
    else:
        (newest / "model.tmp").touch()
    assert resumed(tmp_path).newest_path == str(older)
    assert f"skipped the checkpoint {newest}" in capfd.readouterr().err
    (older / "model").unlink()
    with pytest.raises(CheckpointDamaged, match="none of the last 2 checkpoints is intact"):
        resumed(tmp_path)


def test_old_checkpoints_are_deleted_but_the_best(tmp_path: Path) -> None:
    saved = SavedCheckpoints(run_of(tmp_path, MUSTER_KEEP_LAST=2))
    best = save(saved, tmp_path, 1)
    for step in range(2, 6):
        save(saved, tmp_path, step, best)
    left = sorted(it.name for it in (tmp_path / "output").iterdir())
    assert left == ["checkpoint-1", "checkpoint-4", "checkpoint-5"]


def test_a_checkpoint_of_another_script_is_refused(tmp_path: Path) -> None:
    run_of(tmp_path).checkpoint({"weights": np.ones(1)})
    with pytest.raises(CheckpointMismatch, match="not saved by a MusterCallback"):
        resumed(tmp_path)
