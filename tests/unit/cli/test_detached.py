"""What is said of services that ended and could not say why."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from cli.detached import why_silent


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    said = why_silent(tmp_path)
    assert said == f"nothing, and {tmp_path} cannot be written to: No space left on device"


def test_where_there_is_room_nothing_is_made_up_and_nothing_stays(tmp_path: Path) -> None:
    assert why_silent(tmp_path) == "nothing"
    assert not list(tmp_path.iterdir())
