"""Ranks that meet at a path."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from muster.collectives import SharedMemoryBackend
from muster.collectives.errors import CollectiveError, PeerRefused, Timeout, TransportFailed


def test_file_at_the_path_stays(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_text("precious")
    with pytest.raises(TransportFailed, match="in the way"):
        SharedMemoryBackend.connect(file, 0, 2, timeout_seconds=1)
    assert file.read_text() == "precious"


def test_second_group_at_a_path_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "group"
    with ThreadPoolExecutor() as threads:
        first = threads.submit(SharedMemoryBackend.connect, path, 0, 2, timeout_seconds=20)
        while not path.exists():
            assert not first.done()
        with pytest.raises(PeerRefused, match="another rank 0"):
            SharedMemoryBackend.connect(path, 0, 2, timeout_seconds=1)
        other = SharedMemoryBackend.connect(path, 1, 2)
        first.result().send(1, b"first")
        assert other.recv(0, 5) == b"first"
        other.close()
        first.result().close()
    assert not path.exists()


def test_socket_of_a_group_that_has_ended_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "group"
    with pytest.raises(Timeout):
        SharedMemoryBackend.connect(path, 0, 2, timeout_seconds=0.05)
    assert not path.exists()
    with pytest.raises(CollectiveError):
        SharedMemoryBackend.connect(path, 1, 2, timeout_seconds=0.05)
