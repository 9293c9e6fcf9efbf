"""How a rank hears of layouts: the newest counts, and nothing that comes along is leaked."""

import os
import socket
from collections.abc import Iterator

import pytest

from muster.contracts.messages import WorkerGroup
from muster.contracts.wire import encode
from muster.runtime.agent_client import AgentSocket
from muster.training.group_updates import (
    AgentGroupUpdates,
    GroupChanged,
    SingleRankUpdates,
    StopRequested,
)


class Channel:
    """Both ends of a rank's channel, and whether somebody has asked it to stop."""

    def __init__(self) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        self.agent, self.rank = socket.socketpair(socket.AF_UNIX, kind)
        self.is_stopping = False
        self.line = AgentSocket(self.rank.detach())
        self.layouts = AgentGroupUpdates(self.line, lambda: self.is_stopping)

    def tells(self, generation: int, memory: int = 0) -> None:
        layout = WorkerGroup(generation=generation, token="", members=(), paused=False)
        self.sends(encode(layout), memory)

    def sends(self, content: bytes, memory: int = 0) -> None:
        descriptors = [os.memfd_create("test") for _ in range(memory)]
        socket.send_fds(self.agent, [content], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.fixture
def channel() -> Iterator[Channel]:
    before = open_descriptors()
    channel = Channel()
    yield channel
    channel.agent.close()
    channel.line.close()
    assert open_descriptors() == before, "nothing stays open"


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a Path would open one more


def test_only_the_newest_group_counts(channel: Channel) -> None:
    channel.tells(1, memory=2)
    channel.tells(3, memory=3)
    channel.tells(2, memory=2)
    newest = channel.layouts.next()
    assert newest.group.generation == 3
    assert len(newest.memory) == 3
    newest.close()


def test_only_a_newer_group_ends_the_current_one(channel: Channel) -> None:
    channel.layouts.check()
    channel.tells(1)
    with pytest.raises(GroupChanged):
        channel.layouts.check()
    channel.layouts.next()
    channel.layouts.check()
    channel.tells(1, memory=1)
    channel.layouts.check()


def test_invalid_message_is_dropped_with_its_descriptors(channel: Channel) -> None:
    channel.sends(b"no layout", memory=3)
    channel.layouts.check()
    channel.tells(1)
    assert channel.layouts.next().group.generation == 1


def test_stop_request_comes_first(channel: Channel) -> None:
    channel.tells(1, memory=1)
    channel.is_stopping = True
    with pytest.raises(StopRequested):
        channel.layouts.check()
    channel.is_stopping = False
    channel.layouts.next().close()


def test_rank_continues_without_its_agent(
    channel: Channel,
) -> None:
    channel.line.send(b"a beat that nobody reads")
    channel.tells(1)
    channel.agent.close()
    assert channel.layouts.next().group.generation == 1, "what it had told is not lost"
    channel.layouts.check()
    channel.layouts.check()


def test_single_rank_has_one_group_and_can_be_stopped() -> None:
    stops = iter([False, True])
    alone = SingleRankUpdates(3, lambda: next(stops))
    (seat,) = alone.next().group.members
    assert seat.rank == 3
    alone.check()
    with pytest.raises(StopRequested):
        alone.check()
