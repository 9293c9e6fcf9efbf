"""A data directory that no other user can enter or replace."""

import os
import pwd
from collections.abc import Callable
from pathlib import Path
from stat import S_IMODE

import pytest

from muster.host.private import UnusableDirectory, make_private
from tests.support.strangers import STRANGER, needs_root


def test_directory_is_private_whatever_the_umask_and_its_mode_before(tmp_path: Path) -> None:
    data = tmp_path / "above" / "data"
    umask = os.umask(0)
    try:
        make_private(data)
        data.chmod(0o777)
        (data / "muster.db").touch(mode=0o666)
        make_private(data)
    finally:
        os.umask(umask)
    found = {path.name: S_IMODE(path.stat().st_mode) for path in (tmp_path / "above").rglob("*")}
    assert found == {"data": 0o700, "muster.db": 0o600}
    assert S_IMODE(data.parent.stat().st_mode) == 0o700


DANGERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "anyone may rename it": (lambda data: data.parent.chmod(0o777), "chmod go-w .*/above"),
    "a group may rename it": (
        lambda data: (
            os.chown(data.parent, -1, pwd.getpwnam("nobody").pw_gid),
            data.parent.chmod(0o775),
        ),
        "chmod go-w .*/above",
    ),
    "another user owns what it lies in": (
        lambda data: os.chown(data.parent, STRANGER, -1),
        f"user {STRANGER} owns .*/above",
    ),
    "another user owns it": (
        lambda data: os.chown(data, STRANGER, -1),
        f"chown -R {os.geteuid()} .*/data",
    ),
    "another user has put something there": (
        lambda data: (data / "muster.db").touch() or os.chown(data / "muster.db", STRANGER, -1),
        f"chown -R {os.geteuid()} .*/muster.db",
    ),
}


@needs_root
@pytest.mark.parametrize("danger", DANGERS)
def test_directory_that_another_user_may_replace_is_refused(tmp_path: Path, danger: str) -> None:
    endanger, command = DANGERS[danger]
    data = tmp_path / "above" / "data"
    make_private(data)
    endanger(data)
    with pytest.raises(UnusableDirectory, match=command):
        make_private(data)


def test_link_that_others_may_replace_is_refused(tmp_path: Path) -> None:
    make_private(tmp_path / "data")
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "link").symlink_to(tmp_path / "data")
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UnusableDirectory, match=r"chmod go-w .*/open"):
        make_private(tmp_path / "open" / "link")


@pytest.mark.parametrize("mode", [0o1777, 0o775])
def test_place_like_tmp_or_of_the_own_group_is_accepted(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    make_private(tmp_path / "data")
