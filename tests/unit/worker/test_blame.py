"""Errors as the kernel really gives them: of what was submitted, and of what is ours."""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from muster.contracts.environ import MARK
from muster.contracts.messages import StartRank
from muster.descriptors import DescriptorLimits
from worker.blame import is_of_the_command, is_of_the_order
from worker.logbook import Logbook
from worker.starting import Exec


def error_of_start(working_dir: str, environment: dict[str, str] | None = None) -> OSError:
    order = StartRank(
        rank=0,
        incarnation=0,
        environment={MARK: "uid/0/0", **(environment or {})},
        working_dir=working_dir,
    )
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(OSError) as caught:  # noqa: PT011  which is what we want to see
        Exec(DescriptorLimits(64, 64)).start(order, 2, theirs)
    return caught.value


@pytest.mark.parametrize("working_dir", ["/nowhere/at/all", "/nowhere//at/all/", "/dev/null"])
def test_a_working_directory_is_of_the_order(working_dir: str) -> None:
    assert is_of_the_order(error_of_start(working_dir), working_dir)


def test_an_environment_that_the_kernel_does_not_take_is_of_the_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("INHERITED", "x" * (1 << 18))
    error = error_of_start("/", {"SMALL": "s"})
    assert error.errno == errno.E2BIG
    assert is_of_the_order(error, "/")
    assert "the longest is INHERITED with 262163. " in str(error)


def test_an_interpreter_that_is_not_there_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/bin/python")
    error = error_of_start("/")
    assert error.errno == errno.ENOENT
    assert not is_of_the_order(error, "/")


def test_a_log_that_cannot_be_written_is_ours(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    with pytest.raises(FileExistsError) as caught:
        Logbook(tmp_path / "logs" / "a.log", tmp_path / "logs" / "a.times")
    assert not is_of_the_order(caught.value, str(tmp_path))
    (tmp_path / "a.log").mkdir()
    with pytest.raises(IsADirectoryError) as caught_later:
        Logbook(tmp_path / "a.log", tmp_path / "a.times")
    assert not is_of_the_order(caught_later.value, str(tmp_path))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_what_the_host_lacks_is_nobodys_fault(number: int) -> None:
    assert not is_of_the_order(OSError(number, os.strerror(number), "/"), "/")
    assert not is_of_the_command(OSError(number, os.strerror(number), "sh"))


@pytest.mark.parametrize("command", ["/nowhere/at/all", "/dev/null", "/"])
def test_a_command_that_is_none_is_of_the_submission(command: str) -> None:
    with pytest.raises(OSError) as caught:  # noqa: PT011  which is what we want to see
        subprocess.run([command], check=False)
    assert is_of_the_command(caught.value)
