"""Calls of ranks, to a reception that may have no descriptor to take them with."""

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from scarcity import no_descriptors

from worker.reception import CALLS_LIMIT, FOR_A_CALL, Reception


class Hall:
    """A reception, who calls there, and whom it has received."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.received: list[socket.socket] = []
        self.callers: list[socket.socket] = []
        self.reception = Reception(path, self.selector, self._receive)
        (self._listening,) = self.selector.get_map().values()

    def _receive(self, channel: socket.socket, _pid: int) -> bool:
        self.received.append(channel)
        return True

    def is_called(self, word: bytes = b"") -> None:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect(str(self.path))
        caller.send(word)
        self.callers.append(caller)

    def turns(self) -> int:
        """Do what is to be done now; return how much that was."""
        ready = self.selector.select(0)
        for key, _ in ready:
            key.data()
        return len(ready)

    def close(self) -> None:
        self._listening.fileobj.close()
        self.selector.close()
        for channel in (*self.received, *self.callers):
            channel.close()


@pytest.fixture
def hall(tmp_path: Path) -> Iterator[Hall]:
    hall = Hall(tmp_path / "agent.0001.sock")
    yield hall
    hall.close()


def test_everybody_who_calls_is_received(hall: Hall) -> None:
    hall.is_called()
    hall.is_called()
    assert hall.turns() == 1
    assert len(hall.received) == 2
    assert hall.turns() == 0


def test_a_call_for_which_there_is_no_descriptor_waits_and_nobody_spins(hall: Hall) -> None:
    for word in (b"first", b"second", b"third"):
        hall.is_called(word)
    with no_descriptors(but=FOR_A_CALL):
        assert hall.turns() == 1
        assert hall.turns() == 0, "nobody looks there before the next tick"
        assert not hall.reception.answer()
        hall.reception.listen_again()
        assert hall.turns() == 1
        assert hall.turns() == 0
        assert len(hall.received) == 1
    hall.reception.listen_again()
    assert hall.reception.answer()
    assert [channel.recv(100) for channel in hall.received] == [b"first", b"second", b"third"]


def test_without_a_call_a_lack_of_descriptors_is_no_hindrance(hall: Hall) -> None:
    with no_descriptors():
        assert hall.reception.answer()
    assert hall.selector.get_map(), "it goes on listening"


def test_only_so_many_calls_are_taken_in_one_go(hall: Hall) -> None:
    for _ in range(CALLS_LIMIT + 1):
        hall.is_called()
    assert not hall.reception.answer()
    assert len(hall.received) == CALLS_LIMIT
    assert hall.reception.answer()
    assert len(hall.received) == CALLS_LIMIT + 1


def test_without_a_socket_there_is_nothing_to_answer(tmp_path: Path) -> None:
    path = tmp_path / "agent.0001.sock"
    (path / "is a directory").mkdir(parents=True)
    with selectors.DefaultSelector() as selector:
        reception = Reception(path, selector, lambda *_: False)
        reception.listen_again()
        assert reception.answer()
        assert not selector.get_map()


def test_a_job_that_is_gone_with_its_files_is_not_made_anew(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "job"
    with selectors.DefaultSelector() as selector:
        reception = Reception(
            root / "run" / "agent.0001.sock", selector, lambda _channel, _pid: False
        )
        assert reception.answer(), "nobody can call"
    assert not root.exists()
    assert "ranks would not find another agent" in capfd.readouterr().err
