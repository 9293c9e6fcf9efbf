"""The API sees whether the coordinator is alive, and wakes it up."""

import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from api.dependencies import LEASE_CACHED_SECONDS, CoordinatorHandle
from database.errors import DatabaseUnavailable
from database.leases import LEASE_SECONDS
from database.records import Lease
from muster.contracts.rank import ProcessRecord
from muster.host.processes import this_process
from tests.support.database_samples import PROCESS

HERE = Lease(
    name="coordinator", epoch=1, beat=0, owner="me", process=this_process(), address="127.0.0.1:1"
)
ELSEWHERE = replace(
    HERE,
    process=ProcessRecord(pid=1, start_ticks=1, boot_id="other", node="elsewhere", pid_namespace=1),
)


class Watched:
    """A lease that can change or be unavailable, and a clock; counts queries."""

    def __init__(self, lease: Lease | None) -> None:
        self.lease = lease
        self.seconds = 0.0
        self.queries = 0
        self.is_away = False
        self.handle = CoordinatorHandle(self._read, lambda: self.seconds)

    def _read(self) -> Lease | None:
        self.queries += 1
        if self.is_away:
            raise DatabaseUnavailable("away")
        return self.lease


def test_without_a_lease_there_is_no_coordinator() -> None:
    assert "muster up" in str(Watched(None).handle.absence())


def test_a_process_of_this_host_is_judged_by_itself() -> None:
    assert Watched(HERE).handle.absence() is None
    dead = replace(HERE, process=replace(HERE.process, start_ticks=1))
    watched = Watched(dead)
    assert watched.handle.absence() is not None
    watched.lease = replace(dead, beat=1)
    assert watched.handle.absence() is not None


def test_the_age_of_a_lease_counts_from_its_last_change() -> None:
    watched, ages = Watched(None), []
    assert watched.handle.lease_age_seconds() is None
    for seconds, beat in ((10, 0), (13, 0), (15, 1), (16, 1)):
        watched.seconds, watched.lease = seconds, replace(HERE, beat=beat)
        ages.append(watched.handle.lease_age_seconds())
    assert ages == [0, 3, 0, 1]


def test_a_process_of_another_host_is_judged_by_its_heartbeat() -> None:
    watched = Watched(ELSEWHERE)
    assert watched.handle.absence() is None
    watched.seconds = LEASE_SECONDS
    assert watched.handle.absence() is not None
    watched.lease = replace(ELSEWHERE, beat=1)
    assert watched.handle.absence() is None


@pytest.fixture
def channel() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as bound:
        bound.bind(("127.0.0.1", 0))
        bound.settimeout(20)
        yield bound


def at(channel: socket.socket) -> Lease:
    return replace(HERE, process=PROCESS, address="{}:{}".format(*channel.getsockname()))


def test_the_address_is_cached_for_a_second(channel: socket.socket) -> None:
    leases = Watched(at(channel))
    for _ in range(3):
        leases.handle.wake()
    assert leases.queries == 1
    leases.seconds += LEASE_CACHED_SECONDS
    leases.handle.wake()
    assert leases.queries == 2
    assert [channel.recv(1) for _ in range(4)] == [b""] * 4


def test_waking_never_fails(channel: socket.socket) -> None:
    leases = Watched(at(channel))
    leases.is_away = True
    leases.handle.wake()
    channel.setblocking(False)  # noqa: FBT003  its name
    with pytest.raises(BlockingIOError):
        channel.recv(1)
    leases.is_away = False
    leases.handle.wake()
    channel.settimeout(20)
    assert channel.recv(1) == b""
