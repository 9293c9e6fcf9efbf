"""What services say that no terminal holds, and what is said of those that could not say why."""

import errno
import fcntl
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from installation import await_value

from cli import detached
from cli.detached import _set_aside_if_long, why_silent

LONG = b"a line\n" * 9


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the place of a log that is soon long."""
    monkeypatch.setattr(detached, "LONG_BYTES", len(LONG) - 1)
    return tmp_path / "up.log"


def test_a_disk_without_room_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    said = why_silent(tmp_path)
    assert said == f"nothing, and {tmp_path} cannot be written to: No space left on device"


def test_where_there_is_room_nothing_is_made_up_and_nothing_stays(tmp_path: Path) -> None:
    assert why_silent(tmp_path) == "nothing"
    assert not list(tmp_path.iterdir())


def test_a_log_that_is_long_is_kept_aside_and_begun_anew(log: Path) -> None:
    before = log.with_name("up.log.1")
    _set_aside_if_long(log)
    assert not before.exists(), "there is none"
    log.write_bytes(LONG[1:])
    _set_aside_if_long(log)
    assert not before.exists(), "it is not long"
    log.write_bytes(LONG)
    _set_aside_if_long(log)
    assert (before.read_bytes(), log.exists()) == (LONG, False)


def test_what_another_has_begun_anew_is_not_set_aside(log: Path) -> None:
    before = log.with_name("up.log.1")
    log.write_bytes(LONG)
    with ThreadPoolExecutor() as aside:
        with log.open("rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            second = aside.submit(_set_aside_if_long, log)
            await_value(lambda: second.done() or _is_waited_for(log), lambda: "nobody is there")
            log.replace(before)
            log.write_bytes(LONG[::-1])
        second.result()
    assert (before.read_bytes(), log.read_bytes()) == (LONG, LONG[::-1])


def _is_waited_for(path: Path) -> bool:
    """Whether somebody waits for a lock of this file."""
    inode = f":{path.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any(" -> " in line and inode in line for line in lines)
