"""Exports are complete, never pickled, and never overwrite."""

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from muster.checkpoints.errors import ExportFailed
from muster.checkpoints.export import FORMATS, REST, SAFETENSORS, TORCH, export
from muster.checkpoints.listing import checkpoint_dirs
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.nested import flatten
from muster.checkpoints.reader import Checkpoint
from tests.support.checkpoint_ranks import Rank, position

STATE = {
    "layer/0": np.arange(6, dtype=np.float32).reshape(2, 3),
    "../up": np.float64(7),
    "file": np.array([True]),
    "best": float("inf"),
}


def saved(tmp_path: Path, state: dict[str, Any]) -> Checkpoint:
    manager = Rank(LocalFileSystem(), directory=tmp_path / "job").manager
    manager.save(5, position(5), flatten(state))
    [directory] = checkpoint_dirs(tmp_path / "job")
    return directory.newest()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return saved(tmp_path, STATE)


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


def test_safetensors_hold_the_arrays_of_one_part(tmp_path: Path) -> None:
    nested = {"model": {"w": np.ones(2), "b": np.zeros(1)}, "models": np.ones(1), "n": 1}
    checkpoint = saved(tmp_path, nested)
    assert export(checkpoint, tmp_path / "all.safetensors", SAFETENSORS) == 3
    assert {*load_file(tmp_path / "all.safetensors")} == {"model.w", "model.b", "models"}
    assert export(checkpoint, tmp_path / "model.safetensors", SAFETENSORS, only="model") == 2
    assert {*load_file(tmp_path / "model.safetensors")} == {"w", "b"}
    assert export(checkpoint, tmp_path / "model.npz", only="model") == 2
    with pytest.raises(ExportFailed, match="no part 'modle' with arrays: it has model, models"):
        export(checkpoint, tmp_path / "x.safetensors", SAFETENSORS, only="modle")
    assert not (tmp_path / "x.safetensors").exists()


def test_pytorch_reads_what_a_script_saved(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 3).to(torch.bfloat16)
    state = {"model": model.state_dict(), "ids": np.arange(2), "n": (1, {0: float("inf")})}
    checkpoint = saved(tmp_path, state)
    assert export(checkpoint, tmp_path / "all.pt", TORCH) == 3
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    assert (found["ids"].tolist(), found["n"]) == ([0, 1], (1, {0: float("inf")}))
    export(checkpoint, tmp_path / "model.pt", TORCH, only="model")
    export(checkpoint, tmp_path / "model.safetensors", SAFETENSORS, only="model")
    only = torch.load(tmp_path / "model.pt", weights_only=True)
    safe = pytest.importorskip("safetensors.torch").load_file(tmp_path / "model.safetensors")
    for exported in (found["model"], only, safe):
        assert all(
            exported[name].dtype == torch.bfloat16 and torch.equal(exported[name], value)
            for name, value in model.state_dict().items()
        )


def test_a_dotted_path_exports_a_nested_part(tmp_path: Path) -> None:
    torch, safe = map(pytest.importorskip, ("torch", "safetensors.torch"))
    average = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 3).to(torch.bfloat16))
    state = {"model": {"w": np.ones(2)}, "registered": {"average": average.state_dict()}}
    checkpoint = saved(tmp_path, state)
    for at, (only, strip) in enumerate(
        {"registered.average": "", "registered.average.module": "module."}.items()
    ):
        expected = {
            name.removeprefix(strip): it
            for name, it in average.state_dict().items()
            if name.startswith(strip)
        }
        export(checkpoint, tmp_path / f"{at}.pt", TORCH, only=only)
        export(checkpoint, tmp_path / f"{at}.safetensors", SAFETENSORS, only=only)
        found = torch.load(tmp_path / f"{at}.pt", weights_only=True)
        assert {*safe.load_file(tmp_path / f"{at}.safetensors")} == {*found} == {*expected}
        assert all(torch.equal(found[name], it) for name, it in expected.items())
    with pytest.raises(
        ExportFailed, match=r"no part 'average' .*: it has model, registered.average$"
    ):
        export(checkpoint, tmp_path / "x.npz", only="average")


def test_export_for_pytorch_without_torch_says_what_to_install(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ExportFailed, match=f"needs torch, and {sys.executable} has none: install"):
        export(checkpoint, tmp_path / "model.pt", TORCH)
    assert not (tmp_path / "model.pt").exists()


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


TARGETS = ["model.npz", "model", "model.safetensors", "model.pt"]


@pytest.mark.parametrize("name", TARGETS)
def test_export_refuses_existing_target(tmp_path: Path, checkpoint: Checkpoint, name: str) -> None:
    if name == "model.pt":
        pytest.importorskip("torch")
    (tmp_path / name).write_text("mine")
    with pytest.raises(ExportFailed, match="exists"):
        export(checkpoint, tmp_path / name, FORMATS[(tmp_path / name).suffix])
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("name", TARGETS)
def test_failed_export_leaves_nothing(tmp_path: Path, name: str) -> None:
    if name == "model.pt":
        pytest.importorskip("torch")
    checkpoint = saved(tmp_path, {"weights": np.zeros(1 << 17)})
    with file_size_limit(1 << 18), pytest.raises(ExportFailed, match="writing"):
        export(checkpoint, tmp_path / name, FORMATS[(tmp_path / name).suffix])
    assert not (tmp_path / name).exists()
