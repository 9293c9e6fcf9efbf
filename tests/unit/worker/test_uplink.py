import selectors
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from scarcity import no_descriptors

from muster.contracts.agent import CoordinatorAddress
from muster.contracts.encoding import decode_agent_message, encode
from muster.contracts.framing import FrameReader, frame
from muster.contracts.messages import (
    AgentHello,
    AgentMessage,
    CoordinatorMessage,
    Dismiss,
    TerminateRank,
    Welcome,
)
from worker.uplink import FOR_A_CONNECTION, Uplink

HELLO = AgentHello(job_uid="uid", generation=1, token="secret")  # noqa: S106  for a test
ORDER = TerminateRank(rank=0, incarnation=0)
PATIENCE_SECONDS = 10.0


class Line:
    """An uplink, its selector, and a coordinator that has a listening socket."""

    def __init__(self, directory: Path) -> None:
        self.selector = selectors.DefaultSelector()
        self.heard: list[CoordinatorMessage] = []
        self.address_file = directory / "coordinator.json"
        self.uplink = Uplink(self.address_file, self.selector, self.heard.append)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._accepted: list[socket.socket] = []
        self.is_listed_at(self._listening.getsockname()[1])

    def is_listed_at(self, port: int) -> None:
        address = CoordinatorAddress(host="127.0.0.1", port=port)
        self.address_file.write_bytes(msgspec.json.encode(address))

    def accepts(self) -> socket.socket:
        connection, _ = self._listening.accept()
        connection.settimeout(PATIENCE_SECONDS)
        self._accepted.append(connection)
        return connection

    def turns_until(self, condition: Callable[[], bool]) -> None:
        """Run the agent's loop until something is so."""
        while not condition():
            ready = self.selector.select(PATIENCE_SECONDS)
            assert ready, "nothing happens any more"
            for key, _ in ready:
                key.data()

    def close(self) -> None:
        self.uplink.drop()
        for connection in [self._listening, *self._accepted]:
            connection.close()
        self.selector.close()


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    line = Line(tmp_path)
    yield line
    line.close()


def receive(connection: socket.socket, count: int) -> list[AgentMessage]:
    frames = FrameReader()
    messages: list[AgentMessage] = []
    while len(messages) < count:
        messages += map(decode_agent_message, frames.feed(connection.recv(1 << 16)))
    return messages


def test_what_is_sent_before_the_connection_stands_arrives_in_order(line: Line) -> None:
    assert line.uplink.connect()
    line.uplink.send(HELLO)
    line.uplink.send(HELLO)
    coordinator = line.accepts()
    line.turns_until(lambda: not line.selector.get_map() or not line.uplink._unsent)  # noqa: SLF001
    assert receive(coordinator, 2) == [HELLO, HELLO]


def test_orders_are_heard_however_they_are_cut(line: Line) -> None:
    line.uplink.connect()
    coordinator = line.accepts()
    words = frame(encode(Welcome(epoch=1))) + frame(encode(ORDER))
    for byte in words:
        coordinator.sendall(bytes([byte]))
    line.turns_until(lambda: len(line.heard) == 2)
    assert line.heard == [Welcome(epoch=1), ORDER]


@pytest.mark.parametrize(
    "words", [b"\xff" * 8, frame(b"no message"), frame(encode(HELLO)), frame(b"\x81\xa1\xff\x00")]
)
def test_a_coordinator_that_breaks_the_protocol_is_hung_up_on(line: Line, words: bytes) -> None:
    line.uplink.connect()
    line.uplink.is_welcome = True
    line.accepts().sendall(words)
    line.turns_until(lambda: not line.uplink.is_open)
    assert line.heard == []
    assert not line.uplink.is_welcome
    assert not line.selector.get_map()


def test_a_coordinator_that_hangs_up_can_be_called_again(line: Line) -> None:
    line.uplink.connect()
    line.accepts().close()
    line.turns_until(lambda: not line.uplink.is_open)
    assert line.uplink.connect()
    line.uplink.send(HELLO)
    assert receive(line.accepts(), 1) == [HELLO]


def test_half_a_frame_of_one_connection_is_not_the_beginning_of_the_next(line: Line) -> None:
    line.uplink.connect()
    first = line.accepts()
    first.sendall(frame(encode(ORDER))[:-1])
    line.turns_until(lambda: bool(line.uplink._reader._buffer))  # noqa: SLF001  it has come
    first.close()
    line.turns_until(lambda: not line.uplink.is_open)
    line.uplink.connect()
    line.accepts().sendall(frame(encode(ORDER)))
    line.turns_until(lambda: bool(line.heard))
    assert line.heard == [ORDER]


def test_after_hanging_up_not_a_word_more_is_heard(line: Line) -> None:
    """A stale coordinator says welcome and dismiss in one breath; the first ends it."""

    def hang_up(message: CoordinatorMessage) -> None:
        line.heard.append(message)
        line.uplink.drop()

    line.uplink = Uplink(line.address_file, line.selector, hang_up)
    line.uplink.connect()
    line.accepts().sendall(frame(encode(Welcome(epoch=1))) + frame(encode(Dismiss())))
    line.turns_until(lambda: bool(line.heard))
    assert line.heard == [Welcome(epoch=1)]


def test_nobody_there_is_no_error(line: Line) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    line.is_listed_at(port)
    if line.uplink.connect():
        line.turns_until(lambda: not line.uplink.is_open)
    line.uplink.send(HELLO)  # to nobody
    assert not line.uplink.is_open


@pytest.mark.parametrize("spare", range(FOR_A_CONNECTION))
def test_nobody_is_called_who_could_not_be_looked_at(line: Line, spare: int) -> None:
    with no_descriptors(but=spare):
        assert not line.uplink.connect()
    assert not line.selector.get_map()
    with no_descriptors(but=FOR_A_CONNECTION):
        assert line.uplink.connect()
    line.accepts()
    with no_descriptors(but=FOR_A_CONNECTION - 1):
        assert line.uplink.peer_is_ours


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"host": 3}', b'{"host":"\xff"}'])
def test_an_address_that_cannot_be_read_is_none(line: Line, content: bytes) -> None:
    line.address_file.write_bytes(content)
    assert not line.uplink.connect()
    line.address_file.unlink()
    assert not line.uplink.connect()


def test_a_coordinator_that_stopped_reading_is_as_good_as_away(line: Line) -> None:
    line.uplink.connect()
    line.accepts()
    news = AgentHello(job_uid="x" * 500_000, generation=1, token="")
    sent = 0
    while line.uplink.is_open:
        line.uplink.send(news)
        sent += 1
        assert sent < 1000
    assert not line.selector.get_map()


def test_a_connection_to_a_coordinator_of_the_past_is_known_for_one(line: Line) -> None:
    assert line.uplink.connect()
    assert not line.uplink.is_superseded
    line.is_listed_at(1)
    assert line.uplink.is_superseded
    line.address_file.unlink()
    assert not line.uplink.is_superseded, "nobody is known to be there instead"


def test_a_successor_is_known_for_one_without_a_connection_too(line: Line) -> None:
    assert line.uplink.connect()
    line.uplink.drop()
    assert not line.uplink.is_superseded
    line.is_listed_at(1)
    assert line.uplink.is_superseded
