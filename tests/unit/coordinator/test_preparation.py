from pathlib import Path

import pytest

from coordinator.preparation import Unprepared, prepare
from muster.completion import complete
from muster.contracts.environ import ServiceSettings
from muster.contracts.job import Reason
from muster.contracts.spec import JobSpec
from muster.datasets.listing import find_shards


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    environ = {
        "MUSTER_DATA_DIR": str(tmp_path / "state"),
        "DATASET_DIR": str(tmp_path / "shards"),
        "CHECKPOINT_DIR": str(tmp_path / "checkpoints"),
    }
    return ServiceSettings.read(environ, cores=2)


def write_shard(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "shard_00000.txt").write_text('{"x":[1],"y":0}\n')
    return directory


def refusal(spec: JobSpec, settings: ServiceSettings) -> tuple[Reason, str]:
    with pytest.raises(Unprepared) as caught:
        prepare(spec, settings)
    return caught.value.verdict.reason, caught.value.verdict.message


@pytest.fixture
def synthetic(tmp_path: Path) -> Path:
    return tmp_path / "state" / "datasets" / "synthetic"


def test_the_synthetic_data_set_is_made_where_the_job_names_it(
    settings: ServiceSettings, synthetic: Path
) -> None:
    spec = JobSpec(dataset_dir=str(synthetic))
    places = prepare(spec, settings)
    assert places.dataset_dir == synthetic
    made = {shard: shard.stat() for shard in find_shards(synthetic)}
    assert len(made) == 8
    assert prepare(spec, settings) == places
    assert {shard: shard.stat() for shard in find_shards(synthetic)} == made


def test_a_job_of_synthetic_data_never_changes_to_a_data_set_that_came_later(
    settings: ServiceSettings, synthetic: Path, tmp_path: Path
) -> None:
    spec = complete(JobSpec(), settings, tmp_path).spec
    write_shard(tmp_path / "shards")
    assert prepare(spec, settings).dataset_dir == synthetic


def test_a_job_of_the_default_data_set_is_refused_once_that_is_gone(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    shards = write_shard(tmp_path / "shards")
    spec = complete(JobSpec(), settings, tmp_path).spec
    shards.rename(tmp_path / "elsewhere")
    reason, _ = refusal(spec, settings)
    assert reason is Reason.INVALID_DATASET
    assert not (tmp_path / "state").exists()


def test_a_job_stored_by_an_earlier_version_is_completed_first(
    settings: ServiceSettings, synthetic: Path, tmp_path: Path
) -> None:
    places = prepare(JobSpec(), settings)
    assert places.dataset_dir == synthetic
    assert places.checkpoint_dir == tmp_path / "checkpoints"
    assert places.working_dir == Path.cwd()
    assert len(find_shards(synthetic)) == 8


def test_the_data_set_that_was_named_is_used(settings: ServiceSettings, tmp_path: Path) -> None:
    write_shard(tmp_path / "shards")
    named = write_shard(tmp_path / "named")
    assert prepare(JobSpec(dataset_dir=str(named)), settings).dataset_dir == named


def test_a_named_data_set_that_is_not_there_is_never_replaced_by_another(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    reason, message = refusal(JobSpec(dataset_dir=str(tmp_path / "gone")), settings)
    assert reason is Reason.INVALID_DATASET
    assert str(tmp_path / "gone") in message
    assert not (tmp_path / "state").exists()


def test_a_named_data_set_without_shards_is_refused(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    reason, _ = refusal(JobSpec(dataset_dir=str(tmp_path)), settings)
    assert reason is Reason.INVALID_DATASET


def test_a_default_place_that_cannot_be_read_is_no_reason_to_invent_data(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "shard_00000.txt").symlink_to(tmp_path / "gone")
    reason, message = refusal(JobSpec(), settings)
    assert reason is Reason.INVALID_DATASET
    assert "shard_00000.txt" in message


def test_whether_a_command_needs_data_is_its_own_business(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    spec = JobSpec(command=("true",), dataset_dir=str(tmp_path / "gone"))
    assert prepare(spec, settings).dataset_dir == tmp_path / "gone"


@pytest.mark.parametrize("working_dir", ["gone", "file", "x" * 4000])
def test_a_working_directory_that_is_none_is_the_programs_fault(
    settings: ServiceSettings, tmp_path: Path, working_dir: str
) -> None:
    (tmp_path / "file").touch()
    spec = JobSpec(command=("true",), working_dir=str(tmp_path / working_dir))
    reason, message = refusal(spec, settings)
    assert reason is Reason.INVALID_PROGRAM
    assert message == (
        f"the working directory {tmp_path / working_dir} does not exist: make it first"
    )
