"""A rank receives worker groups: the newest counts, and no descriptor is leaked."""

import os
import socket
from collections.abc import Iterator, Sequence

import pytest

from muster.contracts.messages.rank import GroupMember, WorkerGroup
from muster.contracts.messages.wire import encode
from muster.runtime.agent_client import AgentSocket
from muster.training.groups.updates import (
    AgentGroupUpdates,
    GroupChanged,
    SingleRankUpdates,
    StopRequested,
)


class Channel:
    """Both ends of a rank's channel, and whether the rank is asked to stop."""

    def __init__(self) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        self.agent, self.rank = socket.socketpair(socket.AF_UNIX, kind)
        self.is_stopping = False
        self.socket = AgentSocket(self.rank.detach())
        self.updates = AgentGroupUpdates(self.socket, lambda: self.is_stopping)

    def send_group(self, round_number: int, memory: int = 0, members: Sequence[int] = ()) -> None:
        found = tuple(GroupMember(worker_id=it, rank=it, host="", port=0) for it in members)
        group = WorkerGroup(round=round_number, token="", members=found, paused=False)
        self.send(encode(group), memory)

    def send(self, content: bytes, memory: int = 0) -> None:
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
    channel.socket.close()
    assert open_descriptors() <= before, "nothing stays open"  # those of earlier tests may close


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a Path would open one more


def test_only_the_newest_group_counts(channel: Channel) -> None:
    channel.send_group(1, memory=2)
    channel.send_group(3, memory=3)
    channel.send_group(2, memory=2)
    newest = channel.updates.next()
    assert newest.group.round == 3
    assert len(newest.memory) == 3
    newest.close()


def test_only_a_newer_group_ends_the_current_one(channel: Channel) -> None:
    channel.updates.check()
    channel.send_group(1)
    with pytest.raises(GroupChanged):
        channel.updates.check()
    channel.updates.next()
    channel.updates.check()
    channel.send_group(1, memory=1)
    channel.updates.check()


def test_group_that_only_adds_members_waits_for_the_end_of_a_step(channel: Channel) -> None:
    channel.send_group(1, members=[0, 1])
    channel.updates.next()
    channel.updates.in_step = True
    channel.send_group(2, members=[0, 1, 2])
    channel.updates.check()
    channel.updates.in_step = False
    with pytest.raises(GroupChanged):
        channel.updates.check()


def test_group_without_a_member_ends_a_step(channel: Channel) -> None:
    channel.send_group(1, members=[0, 1])
    channel.updates.next()
    channel.updates.in_step = True
    channel.send_group(2, members=[0, 2])
    with pytest.raises(GroupChanged):
        channel.updates.check()


def test_invalid_message_is_dropped_with_its_descriptors(channel: Channel) -> None:
    channel.send(b"no group", memory=3)
    channel.updates.check()
    channel.send_group(1)
    assert channel.updates.next().group.round == 1


def test_stop_request_comes_first(channel: Channel) -> None:
    channel.is_stopping = True
    with pytest.raises(StopRequested):
        channel.updates.next()
    channel.send_group(1, memory=1)
    with pytest.raises(StopRequested):
        channel.updates.check()
    channel.is_stopping = False
    channel.updates.next().close()


def test_rank_continues_without_its_agent(channel: Channel) -> None:
    channel.socket.send(b"an unread heartbeat")
    channel.send_group(1)
    channel.agent.close()
    assert channel.updates.next().group.round == 1, "earlier messages are not lost"
    channel.updates.check()
    channel.updates.check()


def test_single_rank_has_one_group_and_can_be_stopped() -> None:
    stops = iter([False, True])
    alone = SingleRankUpdates(3, lambda: next(stops))
    (member,) = alone.next().group.members
    assert member.rank == 3
    alone.check()
    with pytest.raises(StopRequested):
        alone.check()
