from pathlib import Path

import pytest

from cli.accelerators import VISIBLE, visible_gpus


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """Give the devices of a machine with four GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_all_that_are_there_are_counted_where_nothing_is_said(devices: Path) -> None:
    assert visible_gpus({}, devices) == 4


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("", 0),
        ("0,1", 2),
        ("3", 1),
        (" 2 , 0", 2),
        ("0,4,1", 1),
        ("0,-1,1", 1),
        ("-1", 0),
        ("1,1", 0),
        ("GPU-8932f937,GPU-5f2cd0a1", 2),
        ("MIG-8932f937", 1),
        ("NoDevFiles", 0),
        ("9" * 5000, 0),
    ],
)
def test_only_those_are_counted_that_the_environment_leaves(
    devices: Path, said: str, count: int
) -> None:
    assert visible_gpus({VISIBLE: said}, devices) == count


@pytest.mark.parametrize("said", ["0", "GPU-8932f937"])
def test_what_is_named_and_not_there_is_not_counted(tmp_path: Path, said: str) -> None:
    assert visible_gpus({VISIBLE: said}, tmp_path) == 0
