"""A nudge goes to whoever holds the lease, and asks who that is only now and then."""

import socket

import pytest
from store_samples import PROCESS

from api.nudge import REMEMBERED_SECONDS, Nudge
from store.errors import StoreUnavailable
from store.records import Lease


class Office:
    """A lease that counts how often it is read, a clock, and an address that may be nudged."""

    def __init__(self, channel: socket.socket) -> None:
        self.now = 100.0
        self.reads = 0
        self.is_away = False
        self._address = "{}:{}".format(*channel.getsockname())

    def read(self) -> Lease:
        self.reads += 1
        if self.is_away:
            raise StoreUnavailable("away")
        return Lease(
            name="coordinator", epoch=1, beat=0, owner="me", process=PROCESS, address=self._address
        )


def test_it_remembers_for_a_moment_whom_to_nudge() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        channel.bind(("127.0.0.1", 0))
        office = Office(channel)
        nudge = Nudge(office.read, lambda: office.now)
        for _ in range(3):
            nudge()
        assert office.reads == 1
        office.now += REMEMBERED_SECONDS
        nudge()
        assert office.reads == 2
        assert [channel.recv(1) for _ in range(4)] == [b""] * 4


def test_what_fails_is_nobodys_trouble() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        channel.bind(("127.0.0.1", 0))
        office = Office(channel)
        office.is_away = True
        nudge = Nudge(office.read, lambda: office.now)
        nudge()
        channel.setblocking(False)  # noqa: FBT003  its name
        with pytest.raises(BlockingIOError):
            channel.recv(1)
        office.is_away = False
        nudge()
        channel.setblocking(True)  # noqa: FBT003  its name
        assert channel.recv(1) == b""
