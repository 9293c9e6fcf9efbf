"""A host without power sends no reset: its peers notice what it does not acknowledge."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from muster.collectives.errors import ChannelClosed, Timeout
from muster.collectives.transports import message_backend, streams
from muster.collectives.transports.message_backend import MessageBackend
from muster.collectives.transports.streams import SocketStream
from tests.support.hosts import Host, hosts, needs_hosts

pytestmark = needs_hosts()

SILENT_MILLISECONDS = 200
LONGER_SECONDS = 0.6
NEVER_SECONDS = 60.0


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    with hosts(2, tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def pair(two: list[Host], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[MessageBackend]]:
    """A rank on each host, connected to the other one."""
    monkeypatch.setattr(streams, "SILENT_MILLISECONDS", SILENT_MILLISECONDS)
    monkeypatch.setattr(message_backend, "SILENCE_CHECK_ATTEMPTS", 2)
    with two[0].open_socket() as listener:
        listener.bind((two[0].address, 0))
        listener.listen()
        caller = two[1].open_socket()
        caller.connect(listener.getsockname())
        accepted, _ = listener.accept()
    zero = MessageBackend(0, 2, {1: SocketStream(accepted, 1)})
    one = MessageBackend(1, 2, {0: SocketStream(caller, 0)})
    with closing(zero), closing(one):
        yield [zero, one]


def test_peer_on_a_silent_host_is_gone(pair: list[MessageBackend], two: list[Host]) -> None:
    zero, one = pair
    zero.send(1, b"hello")
    assert one.recv(0, 5) == b"hello"
    two[1].cut(two[0])
    try:
        zero.send(1, b"lost")  # the kernel takes it
        with pytest.raises(ChannelClosed):
            zero.recv(1, 1, timeout_seconds=NEVER_SECONDS)
    finally:
        two[1].heal()


@pytest.mark.parametrize("sent", [b"x", bytes(64 << 20)], ids=["read later", "too much to send"])
def test_peer_that_computes_is_not_gone(pair: list[MessageBackend], sent: bytes) -> None:
    zero, _ = pair
    with pytest.raises(Timeout):
        zero.exchange([(1, sent)], [(1, memoryview(bytearray(1)))], timeout_seconds=LONGER_SECONDS)
