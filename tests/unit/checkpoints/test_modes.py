"""A job never begins afresh beside checkpoints that it only does not see."""

from pathlib import Path

import pytest

from muster.checkpoints.errors import CheckpointError, CheckpointMismatch
from muster.checkpoints.modes import refuse_other_mode
from muster.contracts.layout import checkpoints_of_rank

TOGETHER = "step_0000000042.g0003"


@pytest.mark.parametrize(
    ("left", "mode"),
    [
        ((TOGETHER,), "synchronous"),
        (("worker_0", "worker_12"), "independent"),
        ((TOGETHER, "worker_0"), "synchronous"),
        ((TOGETHER, "worker_0"), "independent"),
        (("LATEST", "notes", "worker_x"), "synchronous"),
        ((), "independent"),
    ],
)
def test_a_job_goes_on_where_there_is_something_of_its_mode_or_nothing_at_all(
    tmp_path: Path, left: tuple[str, ...], mode: str
) -> None:
    for name in left:
        (tmp_path / name).mkdir()
    refuse_other_mode(tmp_path, mode)


@pytest.mark.parametrize(("left", "mode"), [(TOGETHER, "independent"), ("worker_0", "synchronous")])
def test_checkpoints_of_the_other_mode_alone_are_refused(
    tmp_path: Path, left: str, mode: str
) -> None:
    (tmp_path / left).mkdir()
    with pytest.raises(CheckpointMismatch, match=f"a job of mode {mode} cannot go on"):
        refuse_other_mode(tmp_path, mode)


def test_a_directory_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    refuse_other_mode(tmp_path / "missing", "synchronous")


def test_what_cannot_be_looked_into_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="looking into"):
        refuse_other_mode(tmp_path / ("x" * 300), "synchronous")


def test_the_directory_of_a_rank_is_recognised(tmp_path: Path) -> None:
    checkpoints_of_rank(tmp_path, "job", 3).mkdir(parents=True)
    refuse_other_mode(tmp_path / "job", "independent")
