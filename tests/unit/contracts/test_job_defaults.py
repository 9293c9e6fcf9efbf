"""The directories of a job: named ones, defaults and the synthetic data set."""

from pathlib import Path

import pytest

from muster.contracts.job.spec import JobSpec
from muster.contracts.settings.services import ServiceSettings
from muster.datasets.errors import ShardUnreadable
from muster.job_defaults import resolve


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    environ = {
        "MUSTER_DATA_DIR": str(tmp_path / "state"),
        "DATASET_DIR": str(tmp_path / "shards"),
        "CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
    }
    return ServiceSettings.read(environ, cores=2)


def write_shard(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "shard_first.txt").write_text("{}\n")


def test_a_default_data_set_is_used(settings: ServiceSettings, tmp_path: Path) -> None:
    command = resolve(JobSpec(command=("true",)), settings, tmp_path)
    write_shard(tmp_path)
    for resolved in (command, resolve(JobSpec(), settings, tmp_path)):
        assert (resolved.dataset_dir, resolved.note) == (tmp_path / "shards", None)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (None, "does not exist"),
        ("shard_first.txt", "has 1 shards without a single line"),
        ("a.gz", "holds no shard file such as shard_00000.txt, but a.gz"),
    ],
)
def test_without_data_the_synthetic_set_is_named_but_not_made(
    settings: ServiceSettings, tmp_path: Path, name: str | None, problem: str
) -> None:
    if name is not None:
        (tmp_path / "shards").mkdir()
        (tmp_path / "shards" / name).touch()
    resolved = resolve(JobSpec(), settings, tmp_path)
    assert resolved.dataset_dir == tmp_path / "state" / "datasets" / "synthetic"
    assert resolved.note == (
        f"no data set was named and {tmp_path / 'shards'} {problem}: "
        "a small synthetic one will be used"
    )
    assert not (tmp_path / "state").exists()


def test_an_unreadable_default_data_set_is_an_error(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "shard_00000.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(ShardUnreadable, match=r"shard_00000\.txt"):
        resolve(JobSpec(), settings, tmp_path)


def test_named_directories_are_made_absolute(settings: ServiceSettings, tmp_path: Path) -> None:
    write_shard(tmp_path)
    spec = JobSpec(dataset_dir="gone", checkpoint_dir="/saved", working_dir="work")
    resolved = resolve(spec, settings, tmp_path)
    assert resolved.dataset_dir == tmp_path / "gone"
    assert resolved.checkpoint_dir == Path("/saved")
    assert resolved.working_dir == tmp_path / "work"
    for field in ("dataset_dir", "checkpoint_dir", "working_dir"):
        assert getattr(resolved.spec, field) == str(getattr(resolved, field))


def test_completing_twice_changes_nothing(settings: ServiceSettings, tmp_path: Path) -> None:
    spec = resolve(JobSpec(), settings, tmp_path).spec
    write_shard(tmp_path)
    assert resolve(spec, settings, tmp_path / "elsewhere").spec == spec
