from pathlib import Path

import pytest

from coordinator.preparation import Unprepared, prepare
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


def test_the_data_set_at_the_default_place_is_used(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    write_shard(tmp_path / "shards")
    places = prepare(JobSpec(), settings)
    assert places.dataset_dir == tmp_path / "shards"
    assert places.checkpoint_dir == tmp_path / "checkpoints"
    assert places.working_dir == Path.cwd()
    assert not (tmp_path / "state").exists(), "nothing was made"


def test_where_none_was_named_and_none_is_found_a_small_one_is_made(
    settings: ServiceSettings, tmp_path: Path
) -> None:
    places = prepare(JobSpec(), settings)
    assert places.dataset_dir == tmp_path / "state" / "datasets" / "synthetic"
    assert len(find_shards(places.dataset_dir)) == 8
    assert prepare(JobSpec(), settings) == places


def test_an_empty_default_place_counts_as_none(settings: ServiceSettings, tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    assert prepare(JobSpec(), settings).dataset_dir.name == "synthetic"


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


def test_relative_places_are_those_of_the_working_directory(
    settings: ServiceSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shard(tmp_path / "named")
    spec = JobSpec(dataset_dir="named", checkpoint_dir="here", working_dir="named")
    places = prepare(spec, settings)
    assert places.dataset_dir == places.working_dir == tmp_path / "named"
    assert places.checkpoint_dir == tmp_path / "here"


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
