"""Exports are complete, never pickled, and never overwrite."""

import json
from pathlib import Path

import numpy as np
import pytest

from muster.checkpoints.errors import ExportFailed
from muster.checkpoints.export import REST, export
from muster.checkpoints.listing import checkpoint_dirs
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.reader import Checkpoint
from tests.support.checkpoint_ranks import Rank, position

STATE = {
    "layer/0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "../up": np.float64(7),
    "file": np.array([True]),
    "best": float("inf"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    Rank(LocalFileSystem(), directory=tmp_path / "job").manager.save(5, position(5), STATE)
    [directory] = checkpoint_dirs(tmp_path / "job")
    return directory.newest()


def test_npz_holds_arrays_by_name(tmp_path: Path, checkpoint: Checkpoint) -> None:
    target = tmp_path / "model.npz"
    assert export(checkpoint, target) == 3
    with np.load(target, allow_pickle=False) as found:
        assert set(found.files) == {"layer/0", "../up", "file"}
        assert all(np.array_equal(found[name], STATE[name]) for name in found.files)


def test_directory_holds_a_file_per_array_and_the_rest(
    tmp_path: Path, checkpoint: Checkpoint
) -> None:
    target = tmp_path / "model"
    assert export(checkpoint, target) == 3
    names = sorted(path.name for path in target.iterdir())
    assert names == ["..%2Fup.npy", REST, "file.npy", "layer%2F0.npy"]
    assert np.array_equal(np.load(target / "layer%2F0.npy"), STATE["layer/0"])
    rest = json.loads((target / REST).read_text())
    assert (rest["position"]["step"], rest["values"]) == (5, {"best": {"__float__": "inf"}})


@pytest.mark.parametrize("name", ["model.npz", "model"])
def test_export_refuses_existing_target(tmp_path: Path, checkpoint: Checkpoint, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ExportFailed, match="exists"):
        export(checkpoint, tmp_path / name)
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["model.npz", "model"])
def test_failed_export_leaves_nothing(
    tmp_path: Path, checkpoint: Checkpoint, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(ExportFailed, match="failed: No space left"):
        export(checkpoint, tmp_path / name)
    assert not (tmp_path / name).exists()
