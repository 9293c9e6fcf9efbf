"""Files that are replaced in one step."""

import resource
from pathlib import Path
from stat import S_IMODE

import pytest

from muster.host.files import replace_private


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_private(path, b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))  # as if the disk were full
    try:
        with pytest.raises(OSError, match="too large"):
            replace_private(path, b"newer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (path.read_bytes(), S_IMODE(path.stat().st_mode)) == (b"old", 0o600)
    assert list(tmp_path.iterdir()) == [path], "nothing is left of the attempt"
    replace_private(path, b"newer")
    assert path.read_bytes() == b"newer"
