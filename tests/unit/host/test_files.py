import os
from pathlib import Path

import pytest

from muster.host.files import read_limited


def test_a_file_is_read_only_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"four")
    assert read_limited(path, 4) == b"four"
    assert read_limited(path, 3) == b""


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe", "link"])
def test_anything_but_a_regular_file_reads_as_empty(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "file", tmp_path / "target"
    target.write_bytes(b"of another program")
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "link":
            path.symlink_to(target)
    assert read_limited(path, 1 << 20) == b""
