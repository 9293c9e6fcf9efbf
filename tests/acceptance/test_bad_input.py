"""User mistakes and full disks: the job reports the cause and never hangs."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.installation import Installation, await_value
from tests.support.scarcity import small_disk

GOOD = b'{"x":[0.5,0.25],"y":1}\n'


@pytest.fixture
def shards(tmp_path: Path) -> Callable[..., str]:
    """Write a data set of these shards; return its directory."""

    def write(*contents: bytes) -> str:
        directory = tmp_path / "shards"
        directory.mkdir()
        for index, content in enumerate(contents):
            (directory / f"shard_{index:05d}.txt").write_bytes(content)
        return str(directory)

    return write


@pytest.mark.parametrize(
    ("contents", "named"),
    [
        pytest.param([GOOD * 3, GOOD + b"{nonsense\n"], "shard_00001.txt:2", id="no JSON"),
        pytest.param([GOOD * 3 + b"17\n"], "shard_00000.txt:4", id="another shape"),
    ],
)
def test_an_invalid_dataset_fails_the_job_and_is_named(
    installation: Installation,
    shards: Callable[..., str],
    contents: list[bytes],
    named: str,
) -> None:
    directory = shards(*contents)
    job = installation.fail(installation.submit(world_size=2, dataset_dir=directory))
    assert job["reason"] == "invalid_dataset"
    assert f"{directory}/{named}" in job["message"]


def test_an_empty_shard_among_good_ones_is_fine(
    installation: Installation, shards: Callable[..., str]
) -> None:
    job_id = installation.submit(world_size=1, dataset_dir=shards(GOOD * 3, b"", GOOD * 2))
    installation.complete(job_id)
    (checkpoint,) = installation.checkpoints(job_id, 1)
    assert checkpoint.position.consumed == 5


def test_a_rank_without_shards_is_done_at_once(
    installation: Installation, shards: Callable[..., str]
) -> None:
    job_id = installation.submit(world_size=3, dataset_dir=shards(GOOD * 3, GOOD))
    installation.complete(job_id)
    assert "has no samples: nothing to do" in installation.log(job_id, rank=2)


def test_data_without_a_line_is_refused_at_submission(
    installation: Installation, shards: Callable[..., str]
) -> None:
    answer = installation.request("POST", "/jobs", json={"dataset_dir": shards(b"", b"")})
    assert answer.status_code == 422
    assert "has 2 shards without a single line" in answer.text


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "small"):
        yield tmp_path / "small"


def test_a_full_disk_fails_the_job_with_a_reason(installation: Installation, disk: Path) -> None:
    (disk / "ballast").write_bytes(b"0" * 250_000)
    job_id = installation.submit(world_size=1, checkpoint_dir=str(disk), max_restarts=1)
    job = installation.fail(job_id)
    assert job["reason"] == "restart_limit"
    assert "No space left on device" in job["message"]


def test_a_job_goes_on_once_there_is_room_on_the_disk(
    installation: Installation, disk: Path
) -> None:
    ballast = disk / "ballast"
    ballast.write_bytes(b"0" * 250_000)
    job_id = installation.submit(world_size=1, checkpoint_dir=str(disk))
    installation.wait_until(job_id, lambda now: now["restarts"] > 0)
    ballast.unlink()
    installation.complete(job_id)


def test_a_data_set_that_vanishes_in_the_middle_fails_the_job(
    installation: Installation, shards: Callable[..., str]
) -> None:
    directory = shards(GOOD * 400, GOOD * 400)
    job_id = installation.submit(world_size=1, dataset_dir=directory, sleep_sec=0.2)
    installation.wait_until(job_id, lambda now: now["step"] > 3)
    shutil.rmtree(directory)
    installation.kill(job_id, 0)
    job = installation.fail(job_id)
    assert job["reason"] == "invalid_dataset"
    assert directory in job["message"]


def test_without_any_data_set_a_small_one_is_made(narrow: Installation) -> None:
    job_id = narrow.submit(world_size=4)
    assert "a small synthetic one will be used" in narrow.see(job_id)["message"]
    assert narrow.complete(job_id)["step"] == 128


def test_a_log_directory_that_cannot_be_made_fails_no_other_job(
    installation: Installation,
) -> None:
    installation.files.root.joinpath("jobs").mkdir(exist_ok=True)
    (installation.files.root / "jobs" / "blocked").write_text("a file where a directory should be")
    blocked = installation.submit(job_id="blocked", world_size=1)
    installation.complete(installation.submit(world_size=1))
    await_value(lambda: "could not be started" in str(installation.events(blocked)), str)
    (installation.files.root / "jobs" / "blocked").unlink()
    installation.complete(blocked)
