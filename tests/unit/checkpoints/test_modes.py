"""A job never begins afresh beside checkpoints that it only does not see."""

from pathlib import Path

import pytest

from muster.checkpoints.errors import CheckpointError, CheckpointMismatch
from muster.checkpoints.modes import holds_checkpoints, refuse_other_mode

TOGETHER = "step_0000000042.g0003"


@pytest.mark.parametrize(
    ("left", "mode"),
    [
        ((TOGETHER,), "synchronous"),
        (("worker_0", f"worker_12/{TOGETHER}"), "independent"),
        (("worker_0/.FENCE.g0004.8d777f385d3dfec8",), "synchronous"),
        ((TOGETHER, f"worker_0/{TOGETHER}"), "synchronous"),
        ((TOGETHER, f"worker_0/{TOGETHER}"), "independent"),
        (("LATEST", "notes", "worker_x"), "synchronous"),
        ((), "independent"),
    ],
)
def test_a_job_goes_on_where_there_is_something_of_its_mode_or_nothing_at_all(
    tmp_path: Path, left: tuple[str, ...], mode: str
) -> None:
    for name in left:
        (tmp_path / name).mkdir(parents=True)
    refuse_other_mode(tmp_path, mode)


@pytest.mark.parametrize(
    ("left", "mode"), [(TOGETHER, "independent"), (f"worker_0/{TOGETHER}", "synchronous")]
)
def test_checkpoints_of_the_other_mode_alone_are_refused(
    tmp_path: Path, left: str, mode: str
) -> None:
    (tmp_path / left).mkdir(parents=True)
    with pytest.raises(CheckpointMismatch, match=f"a job of mode {mode} cannot go on"):
        refuse_other_mode(tmp_path, mode)


def test_a_directory_that_is_not_there_is_nothing(tmp_path: Path) -> None:
    refuse_other_mode(tmp_path / "missing", "synchronous")


def test_what_cannot_be_looked_into_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="looking into"):
        refuse_other_mode(tmp_path / ("x" * 300), "synchronous")


@pytest.mark.parametrize(
    ("left", "is_one"),
    [
        (TOGETHER, True),
        ("LATEST", True),
        (f"worker_3/{TOGETHER}", True),
        ("worker_3", False),
        (".FENCE.g0004.8d777f385d3dfec8", False),
        ("worker_3/.FENCE.g0004.8d777f385d3dfec8", False),
        ("notes", False),
    ],
)
def test_what_a_job_leaves_that_never_saved_is_no_checkpoint(
    tmp_path: Path, left: str, *, is_one: bool
) -> None:
    assert not holds_checkpoints(tmp_path / "nowhere")
    (tmp_path / left).mkdir(parents=True)
    assert holds_checkpoints(tmp_path) is is_one
