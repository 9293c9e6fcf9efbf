"""A log is opened where it is, and nothing in its place is."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from api.logs.opening import open_log
from muster.contracts.layout import DataDirectory, JobFiles


@pytest.fixture
def files(tmp_path: Path) -> JobFiles:
    files = DataDirectory(tmp_path).job("job")
    files.logs.mkdir(parents=True)
    files.log(0, 0).write_text("a line\n")
    return files


def content(path: Path) -> bytes:
    descriptor = open_log(path)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


def test_a_log_is_opened(files: JobFiles) -> None:
    assert content(files.log(0, 0)) == b"a line\n"


def test_the_data_directory_may_be_reached_through_a_link(files: JobFiles, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(files.root.parent)
    assert content(JobFiles(link / "job").log(0, 0)) == b"a line\n"


@pytest.mark.parametrize(
    "swapped", [lambda files: files.root, lambda files: files.logs, lambda files: files.log(0, 0)]
)
def test_no_link_below_it_is_followed(files: JobFiles, swapped: Callable[[JobFiles], Path]) -> None:
    path = swapped(files)
    moved = path.with_name("moved")
    path.rename(moved)
    path.symlink_to(moved)
    with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
        open_log(files.log(0, 0))


@pytest.mark.parametrize("put", [os.mkdir, os.mkfifo])
def test_what_is_no_file_is_no_log(files: JobFiles, put: Callable[[Path], None]) -> None:
    put(files.log(0, 1))
    with pytest.raises(OSError, match="not a regular file"):
        open_log(files.log(0, 1))
