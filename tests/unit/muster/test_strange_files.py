"""What is found where a file of ours should be."""

import os
from pathlib import Path

import pytest

from muster.strange_files import content_of


def test_a_file_is_read_up_to_its_limit_and_not_beyond(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"four")
    assert content_of(path, 4) == b"four"
    assert content_of(path, 3) == b""


@pytest.mark.parametrize("what", ["nothing", "a directory", "a pipe", "a link"])
def test_what_is_no_file_counts_as_empty_and_keeps_nobody(tmp_path: Path, what: str) -> None:
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_bytes(b"somebody else's")
    match what:
        case "a directory":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "a link":
            path.symlink_to(target)
    assert content_of(path, 1 << 20) == b""
