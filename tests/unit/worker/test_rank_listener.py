"""Channels of ranks without processes, and ranks that reconnect."""

import selectors
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.contracts.messages.agent import RankSaid
from muster.contracts.messages.rank import Hello
from muster.contracts.messages.wire import encode
from muster.contracts.series import Window, aggregate
from tests.support.stories import beat
from worker.ranks.listener import CONNECTIONS_LIMIT, ChannelReader, ReconnectListener
from worker.ranks.rank import RankProcess


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    selector = selectors.DefaultSelector()
    yield selector
    for key in list(selector.get_map().values()):
        key.fileobj.close()
    selector.close()


def turn(selector: selectors.BaseSelector) -> int:
    """Call all ready handlers; return their number."""
    ready = selector.select(0)
    for key, _ in ready:
        key.data()
    return len(ready)


def test_a_rank_is_read_from_its_reconnect_to_its_removal(selector: selectors.BaseSelector) -> None:
    reports: list[RankSaid] = []
    reader = ChannelReader(selector, reports.append)
    rank = RankProcess(rank=0, attempt=0, tag="", log=None, process=None, channel=None)
    reader.add(rank)
    assert not selector.get_map()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    with ours, theirs:
        reader.replace_channel(rank, ours)
        theirs.send(encode(Hello()))
        assert turn(selector) == 1
        theirs.send(encode(beat(step=1)))
        reader.remove(rank)
        theirs.send(encode(beat(step=2)))
        assert turn(selector) == 0
    assert [said.message for said in reports] == [Hello(), beat(step=1)], "read once more"


def test_values_wait_for_a_coordinator(selector: selectors.BaseSelector) -> None:
    is_connected = False
    reader = ChannelReader(selector, lambda _said: is_connected)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    rank = RankProcess(rank=0, attempt=0, tag="", log=None, process=None, channel=ours)
    reader.add(rank)
    with ours, theirs:
        for step, kept in ((1, (0, 1)), (2, (0, 2)), (3, None), (4, None)):
            is_connected = step > 2
            window = Window(
                step - 1, step, is_back=False, values={"loss": aggregate([float(step)])}
            )
            theirs.send(encode(beat(step=step, window=window)))
            turn(selector)
            (said,) = rank.kept_messages()
            found = said.message.window
            assert (found and (found.since, found.step)) == kept


def test_connections_of_one_turn_are_limited(
    selector: selectors.BaseSelector, tmp_path: Path
) -> None:
    accepted: list[socket.socket] = []

    def accept(channel: socket.socket, _pid: int) -> bool:
        accepted.append(channel)
        return True

    listener = ReconnectListener(tmp_path / "agent.0001.sock", selector, accept)
    callers = []
    for _ in range(CONNECTIONS_LIMIT + 2):
        callers.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        callers[-1].connect(str(tmp_path / "agent.0001.sock"))
    assert not listener.accept_waiting()
    assert turn(selector) == 1
    assert len(accepted) == len(callers)
    assert listener.accept_waiting(), "none is left"
    assert turn(selector) == 0
    for channel in (*accepted, *callers):
        channel.close()
