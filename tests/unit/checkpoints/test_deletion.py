"""A deleted job's checkpoints are removed, and nothing beside them."""

from pathlib import Path

import pytest

from muster.checkpoints.deletion import entries
from muster.checkpoints.deletion import remove as remove_entries
from muster.checkpoints.local import LocalFileSystem
from muster.checkpoints.manifest import CheckpointName, Owner
from tests.support.checkpoint_ranks import Rank, owner

OWNER = owner()


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints" / "job"


def save(directory: Path, *steps: int, uid: str = "uid") -> None:
    rank = Rank(
        files=LocalFileSystem(), directory=directory, owner=owner(uid=uid, generation=len(uid))
    )
    rank.save(*steps)


def remove(directory: Path, of: Owner) -> bool:
    """Remove all entries; return whether there were any."""
    found = entries(directory, of)
    remove_entries(found)
    return bool(found)


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def test_checkpoints_of_all_ranks_are_deleted(checkpoints: Path) -> None:
    save(checkpoints, 1, 2, 3)
    save(checkpoints / "worker_0", 1, 2, 3)
    save(checkpoints / "worker_11", 1)
    (checkpoints / str(CheckpointName(3, 2)) / "witness.json").write_text("{}")
    assert sum(entry.size_bytes for entry in entries(checkpoints, OWNER)) > 1000
    assert remove(checkpoints, OWNER)
    assert tree(checkpoints.parent) == []


def test_missing_directory_has_nothing_to_delete(checkpoints: Path) -> None:
    checkpoints.parent.mkdir()
    assert not remove(checkpoints, OWNER)
    assert not remove(checkpoints / "none" / "job", OWNER)
    assert not remove(Path("/dev/null/job"), OWNER)


def test_interrupted_deletion_can_be_repeated(checkpoints: Path) -> None:
    save(checkpoints, 1, 2)
    (checkpoints / str(CheckpointName(3, 2)) / "manifest.json").unlink()
    (checkpoints / str(CheckpointName(3, 1))).rename(
        checkpoints / ".step_0000000001.g0003.gone.tmp"
    )
    assert remove(checkpoints, OWNER)
    assert not checkpoints.exists()


@pytest.mark.parametrize(
    "name",
    [
        "precious.txt",
        "LATEST.bak",
        "step_1/file",
        "worker_0/model.pt",
        "worker_x/LATEST",
        "step_0000000001.g0003/notes.txt",
        ".ssh/id_rsa",
    ],
)
def test_other_files_stay(checkpoints: Path, name: str) -> None:
    save(checkpoints, 1, 2)
    save(checkpoints / "worker_0", 1)
    (checkpoints / name).parent.mkdir(exist_ok=True)
    (checkpoints / name).write_text("precious")
    assert remove(checkpoints, OWNER)
    left = [path for path in tree(checkpoints) if not (checkpoints / path).is_dir()]
    assert left == [name]


def test_directory_without_checkpoints_stays(checkpoints: Path) -> None:
    checkpoints.mkdir(parents=True)
    assert not remove(checkpoints, OWNER)
    (checkpoints / "LATEST").write_text("release 7\n")
    (checkpoints / "worker_0").mkdir()
    (checkpoints / "empty").mkdir()
    before = tree(checkpoints)
    assert not remove(checkpoints, OWNER)
    assert tree(checkpoints) == before


def test_checkpoints_of_another_job_stay(checkpoints: Path) -> None:
    save(checkpoints, 1, uid="another")
    begun = checkpoints / ".step_0000000002.g0007.tmp"
    begun.mkdir()
    (begun / "manifest.json").touch()
    theirs = tree(checkpoints)
    save(checkpoints / "worker_1", 1)
    assert remove(checkpoints, OWNER)
    assert tree(checkpoints) == theirs


def test_owner_without_uid_deletes_earlier_jobs(checkpoints: Path) -> None:
    save(checkpoints, 1, uid="earlier")
    save(checkpoints, 2)
    assert remove(checkpoints, owner(uid=None))
    assert not checkpoints.exists()


@pytest.mark.parametrize(
    "swapped",
    ["", "worker_0", "LATEST", "step_0000000001.g0003", "step_0000000001.g0003/manifest.json"],
)
def test_symbolic_links_are_not_followed(checkpoints: Path, tmp_path: Path, swapped: str) -> None:
    save(checkpoints, 1)
    save(checkpoints / "worker_0", 1)
    precious = tmp_path / "precious"
    save(precious, 1)
    swap = checkpoints / swapped if swapped else checkpoints
    swap.rename(swap.with_name(f"{swap.name}.moved"))
    swap.symlink_to(precious / "LATEST" if swapped == "LATEST" else precious)
    before = tree(precious)
    remove(checkpoints, OWNER)
    assert tree(precious) == before
    assert (checkpoints / swapped).is_symlink()
