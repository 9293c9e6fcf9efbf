"""Channels of ranks without processes, and ranks that reconnect."""

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.contracts.messages import Hello, RankMessage, RankSaid
from muster.contracts.wire import encode
from tests.support.stories import beat
from worker.adopt import GoneProcess
from worker.rank import RankProcess
from worker.rank_listener import CONNECTIONS_LIMIT, ChannelReader, ReconnectListener


def turn(selector: selectors.BaseSelector) -> int:
    """Call all ready handlers; return their number."""
    ready = selector.select(0)
    for key, _ in ready:
        key.data()
    return len(ready)


class Desk:
    """A channel reader with one rank, and what it reports."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.reports: list[RankSaid] = []
        self.reader = ChannelReader(self.selector, self.reports.append)
        self.rank = RankProcess(
            rank=0, attempt=0, tag="", log=None, process=GoneProcess(0), channel=None
        )
        self.reader.add(self.rank)
        self._theirs: list[socket.socket] = []

    def reconnect(self) -> socket.socket:
        """Give the rank a new channel; return its other end."""
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        self._theirs.append(theirs)
        self.reader.replace_channel(self.rank, ours)
        return theirs

    @property
    def received(self) -> list[RankMessage]:
        return [report.message for report in self.reports]

    def close(self) -> None:
        self.selector.close()
        for channel in (*self._theirs, self.rank.channel):
            if channel is not None:
                channel.close()


@pytest.fixture
def desk() -> Iterator[Desk]:
    desk = Desk()
    yield desk
    desk.close()


def test_a_rank_without_a_channel_is_read_once_it_reconnects(desk: Desk) -> None:
    assert not desk.selector.get_map()
    desk.reconnect().send(encode(Hello()))
    assert turn(desk.selector) == 1
    assert desk.received == [Hello()]


def test_a_paused_rank_is_read_on_its_new_channel(desk: Desk) -> None:
    before = desk.reconnect()
    desk.rank.grant(1)
    for step in (1, 2):
        before.send(encode(beat(step=step)))
    assert turn(desk.selector) == 1
    assert not desk.selector.get_map(), "its share is used up"
    desk.reconnect().send(encode(Hello()))
    assert desk.received == [beat(step=1), beat(step=2)], "the old channel is read first"
    desk.reader.resume()
    assert turn(desk.selector) == 1
    assert desk.received[2:] == [Hello()]
    (registered,) = desk.selector.get_map().values()
    assert registered.fileobj is desk.rank.channel
    with pytest.raises(BrokenPipeError):
        before.send(b"lost")


def test_a_removed_rank_is_read_once_more_and_then_ignored(desk: Desk) -> None:
    channel = desk.reconnect()
    channel.send(encode(Hello()))
    desk.reader.remove(desk.rank)
    assert desk.received == [Hello()]
    channel.send(encode(beat(step=1)))
    desk.reader.resume()
    assert turn(desk.selector) == 0


class Entrance:
    """A listener, the processes that connect, and the channels it has accepted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.selector = selectors.DefaultSelector()
        self.accepted: list[socket.socket] = []
        self._callers: list[socket.socket] = []
        self.listener = ReconnectListener(path, self.selector, self._accept)
        (self._registered,) = self.selector.get_map().values()

    def _accept(self, channel: socket.socket, _pid: int) -> bool:
        self.accepted.append(channel)
        return True

    def connect(self) -> None:
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        caller.connect(str(self._path))
        self._callers.append(caller)

    def close(self) -> None:
        self._registered.fileobj.close()
        self.selector.close()
        for channel in (*self.accepted, *self._callers):
            channel.close()


@pytest.fixture
def entrance(tmp_path: Path) -> Iterator[Entrance]:
    entrance = Entrance(tmp_path / "agent.0001.sock")
    yield entrance
    entrance.close()


def test_all_waiting_connections_are_accepted(entrance: Entrance) -> None:
    entrance.connect()
    entrance.connect()
    assert turn(entrance.selector) == 1
    assert len(entrance.accepted) == 2
    assert turn(entrance.selector) == 0


def test_the_number_of_connections_per_turn_is_limited(entrance: Entrance) -> None:
    for _ in range(CONNECTIONS_LIMIT + 1):
        entrance.connect()
    assert not entrance.listener.accept_waiting()
    assert entrance.listener.accept_waiting()
    assert len(entrance.accepted) == CONNECTIONS_LIMIT + 1
