import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from unit.coordinator.neighbours import neighbour, stop

from coordinator.address import publish
from coordinator.stopped_predecessor import end_if_stopped, last_known
from muster.contracts.agent import CoordinatorAddress
from muster.contracts.process import ProcessRecord
from muster.processes import identify


@pytest.fixture
def former() -> Iterator[subprocess.Popen[bytes]]:
    """A process of this machine that has coordinated."""
    with neighbour() as process:
        yield process


def published(former: subprocess.Popen[bytes], file: Path) -> ProcessRecord:
    """Publish its address; return what a successor reads there."""
    publish(CoordinatorAddress(host="here", port=1, process=identify(former.pid)), file)
    found = last_known(file)
    assert found is not None
    return found


def test_who_coordinated_last_and_stands_still_is_ended(
    former: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    found = published(former, tmp_path / "address")
    stop(former)
    assert end_if_stopped(found)
    assert former.wait(20) == -signal.SIGKILL
    assert not end_if_stopped(found)


def test_who_goes_on_is_left_alone(former: subprocess.Popen[bytes], tmp_path: Path) -> None:
    assert not end_if_stopped(published(former, tmp_path / "address"))
    assert former.poll() is None


def test_another_user_s_process_is_left_alone(
    former: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = published(former, tmp_path / "address")
    stop(former)

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr("signal.pidfd_send_signal", refuse)
    assert not end_if_stopped(found)
    assert former.poll() is None


def test_a_stranger_with_its_pid_is_left_alone(
    former: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    found = published(former, tmp_path / "address")
    stop(former)
    assert not end_if_stopped(replace(found, start_ticks=1))
    assert former.poll() is None


@pytest.mark.parametrize("content", [None, b"", b"\xff", b"{}", b'{"host": "here", "port": 1}'])
def test_a_file_that_names_nobody_is_no_error(content: bytes | None, tmp_path: Path) -> None:
    file = tmp_path / "address"
    if content is not None:
        file.write_bytes(content)
    assert last_known(file) is None
