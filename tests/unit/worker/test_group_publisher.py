"""Which rank gets which worker group with which memory, read by what ranks read it with."""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from msgspec.structs import replace

from muster.contracts.agent import LOCAL_HOST
from muster.contracts.messages.agent import AnnounceGroup
from muster.runtime.agent_client import AgentSocket
from muster.training.groups.updates import AgentGroupUpdates, GroupUpdate
from tests.support.takeovers import announced
from worker.ranks.rank import RankProcess
from worker.ranks.ranks import GroupPublisher


class Member(RankProcess):
    """A rank with a channel but without a process."""

    def __init__(self, rank: int, attempt: int = 0) -> None:
        self.rank = rank
        self.attempt = attempt
        self._received: list[GroupUpdate] = []
        self._connect()

    def _connect(self) -> None:
        kind = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK
        self.channel, self.theirs = socket.socketpair(socket.AF_UNIX, kind)
        self.link = AgentSocket(os.dup(self.theirs.fileno()))
        self._groups = AgentGroupUpdates(self.link, lambda: False)

    def receives(self) -> GroupUpdate:
        self._received.append(self._groups.next())
        return self._received[-1]

    def reconnects(self) -> None:
        """Lose the channel, with what was on its way, and get another one."""
        self._disconnect()
        self._connect()

    def _disconnect(self) -> None:
        for end in (self.link, self.channel, self.theirs):
            end.close()

    def close(self) -> None:
        self._disconnect()
        for group in self._received:
            group.close()
        if "arena" in vars(self):
            os.close(self.arena)

    def has_nothing_to_read(self) -> bool:
        try:
            self.theirs.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        return False

    def fill_channel(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.channel.send(b"filling")

    def empty_channel(self) -> None:
        with suppress(BlockingIOError):
            while True:
                self.theirs.recv(100)


class Table:
    """What a publisher needs of a rank table."""

    def __init__(self, ranks: int) -> None:
        self.running = [Member(rank) for rank in range(ranks)]

    def find(self, rank: int, attempt: int) -> Member | None:
        return {(one.rank, one.attempt): one for one in self.running}.get((rank, attempt))


@pytest.fixture
def table() -> Iterator[Table]:
    table = Table(3)
    members = list(table.running)
    yield table
    for member in members:
        member.close()


@pytest.fixture
def publisher(table: Table) -> Iterator[GroupPublisher]:
    publisher = GroupPublisher(table, LOCAL_HOST)
    yield publisher
    # A group without recipients makes it close the memory of the last one.
    table.running = []
    publisher.publish(announced(100))


def test_every_member_gets_the_group_and_all_arenas_in_announced(
    table: Table, publisher: GroupPublisher
) -> None:
    publisher.publish(announced(1, 0, 1, 2))
    received = [member.receives() for member in table.running]
    assert [one.group.round for one in received] == [1, 1, 1]
    for one in received:
        assert os.path.sameopenfile(one.memory[0], received[0].memory[0]), "one result for all"
        for member, arena in zip(table.running, one.memory[1:], strict=True):
            assert os.path.sameopenfile(arena, member.arena)


def over_hosts(round_number: int, *hosts: str) -> AnnounceGroup:
    """Return the order to send a group with a rank on each of these hosts."""
    order = announced(round_number, *range(len(hosts)))
    members = tuple(
        replace(member, host=host) for member, host in zip(order.group.members, hosts, strict=True)
    )
    return replace(order, group=replace(order.group, members=members))


def test_member_of_several_hosts_gets_the_arenas_of_its_own(
    table: Table, publisher: GroupPublisher
) -> None:
    publisher.publish(over_hosts(1, LOCAL_HOST, LOCAL_HOST, "another", "another"))
    for member in table.running[:2]:
        own, _result, *arenas = member.receives().memory
        assert os.path.sameopenfile(own, member.arena)
        for peer, arena in zip(table.running[:2], arenas, strict=True):
            assert os.path.sameopenfile(arena, peer.arena)
    assert table.running[2].receives().memory == (), "the group's rank 2 is on another host"


def test_group_of_several_hosts_with_a_missing_member_here_is_not_sent(
    table: Table, publisher: GroupPublisher
) -> None:
    publisher.publish(over_hosts(1, LOCAL_HOST, "another", "another", LOCAL_HOST))
    assert all(member.has_nothing_to_read() for member in table.running)


def test_each_round_has_a_new_result_and_the_same_arenas(
    table: Table, publisher: GroupPublisher
) -> None:
    publisher.publish(announced(1, 0, 1, 2))
    first = table.running[0].receives()
    publisher.publish(announced(2, 0, 1, 2))
    second = table.running[0].receives()
    assert not os.path.sameopenfile(first.memory[0], second.memory[0])
    assert os.path.sameopenfile(first.memory[1], second.memory[1])


def test_a_rank_outside_the_group_gets_no_memory(table: Table, publisher: GroupPublisher) -> None:
    publisher.publish(announced(1, 0, 2))
    received = table.running[1].receives()
    assert [member.rank for member in received.group.members] == [0, 2]
    assert received.memory == ()


@pytest.mark.parametrize("round_number", [0, 1])
def test_a_group_that_is_not_newer_is_ignored(
    table: Table, publisher: GroupPublisher, round_number: int
) -> None:
    publisher.publish(announced(1, 0, 1, 2))
    for member in table.running:
        member.receives()
    publisher.publish(announced(round_number, 0))
    assert all(member.has_nothing_to_read() for member in table.running)


@pytest.mark.parametrize("attempts", [[0, 1], [1, 0]])
def test_a_group_with_a_missing_member_is_not_sent(
    table: Table, publisher: GroupPublisher, attempts: list[int]
) -> None:
    publisher.publish(announced(1, 0, 1, attempts=attempts))
    publisher.deliver()
    assert all(member.has_nothing_to_read() for member in table.running)


def test_a_full_channel_gets_the_group_later_and_once(
    table: Table, publisher: GroupPublisher
) -> None:
    slow = table.running[1]
    slow.fill_channel()
    publisher.publish(announced(1, 0, 1))
    table.running[0].receives()
    slow.empty_channel()
    publisher.deliver()
    slow.receives()
    table.running[2].receives()
    publisher.deliver()
    assert all(member.has_nothing_to_read() for member in table.running)


def test_a_member_that_exits_does_not_delay_the_next_group(
    table: Table, publisher: GroupPublisher
) -> None:
    table.running[1].fill_channel()
    publisher.publish(announced(1, 0, 1))
    del table.running[1]
    publisher.deliver()
    table.running[0].receives()
    publisher.publish(announced(2, 0))
    assert table.running[0].receives().group.round == 2


def test_a_closed_channel_does_not_delay_the_others(
    table: Table, publisher: GroupPublisher
) -> None:
    table.running[1].theirs.close()
    table.running[1].link.close()
    publisher.publish(announced(1, 0, 1, 2))
    assert table.running[2].receives().group.round == 1


def test_a_reconnected_rank_gets_the_group_again(table: Table, publisher: GroupPublisher) -> None:
    """The group may have been lost with the old channel; a rank ignores one that it has."""
    member, *others = table.running
    publisher.publish(announced(1, 0, 1))
    member.reconnects()
    publisher.deliver()
    assert member.receives().group.round == 1
    for other in others:
        other.receives()
        assert other.has_nothing_to_read()
