"""What a network between two hosts may do to a sealed stream."""

import socket
from collections.abc import Iterator

import pytest

from muster.collectives.backend import Backend
from muster.collectives.errors import ChannelClosed, PeerRefused, Timeout
from muster.collectives.simulated import run_ranks
from muster.collectives.transports.rendezvous import Connections
from muster.collectives.transports.sealed import SealedStream
from muster.collectives.transports.tcp import TcpBackend
from muster.links.sealing import Cipher, derive_keys
from tests.support.groups import member

TALK = b"what both said"


def backend_of(rank: int, end: socket.socket, token: bytes = b"secret") -> TcpBackend:
    cipher = Cipher(derive_keys(token, TALK, is_caller=rank == 1))
    peer = 1 - rank
    return TcpBackend(member(rank, 2), Connections({peer: SealedStream(end, peer, cipher)}, ()))


class Network:
    """Two ranks, and what one sends the other on its way."""

    def __init__(self) -> None:
        own, self.from_zero = socket.socketpair()
        other, self.to_one = socket.socketpair()
        self.zero, self.one = backend_of(0, own), backend_of(1, other)

    def taken(self) -> bytes:
        """Return all that rank 0 has sent."""
        return self.from_zero.recv(1 << 20)


@pytest.fixture
def network() -> Iterator[Network]:
    network = Network()
    yield network
    network.from_zero.close()
    network.to_one.close()
    network.zero.close()
    network.one.close()


def test_large_messages_go_both_ways() -> None:
    ends = socket.socketpair()
    backends = [backend_of(rank, end) for rank, end in enumerate(ends)]
    messages = [bytes([size % 251]) * size for size in (0, 1, 17, 300_001, 5 << 20)]

    def rank(backend: Backend) -> bool:
        peer = 1 - backend.rank
        targets = [bytearray(len(message)) for message in messages]
        backend.exchange(
            [(peer, message) for message in messages],
            [(peer, memoryview(target)) for target in targets],
        )
        return targets == messages

    assert run_ranks(backends, rank) == [True, True]


def test_nothing_readable_is_on_the_wire(network: Network) -> None:
    network.zero.send(1, b"the weights of the model")
    assert b"weights" not in network.taken()


def changed(sent: bytes, at: int) -> bytes:
    return sent[:at] + bytes([sent[at] ^ 1]) + sent[at + 1 :]


@pytest.mark.parametrize(
    "forge",
    [
        lambda sent: changed(sent, 0),
        lambda sent: changed(sent, 4),
        lambda sent: changed(sent, len(sent) - 1),
        lambda sent: b"\xff\xff\xff\x7f" + sent,
        lambda sent: (1).to_bytes(4, "little") + sent,
        lambda sent: bytes(len(sent)),
    ],
    ids=["length", "first byte", "tag", "huge length", "short length", "zeros"],
)
def test_forged_record_is_refused(network: Network, forge: object) -> None:
    network.zero.send(1, b"true")
    network.to_one.sendall(forge(network.taken()))
    with pytest.raises((PeerRefused, Timeout), match=r"was changed on the way|waited"):
        network.one.recv(0, 4, timeout_seconds=0.2)


def test_replayed_record_is_refused(network: Network) -> None:
    network.zero.send(1, b"once")
    sent = network.taken()
    network.to_one.sendall(sent + sent)
    assert network.one.recv(0, 4) == b"once"
    with pytest.raises(PeerRefused, match="changed on the way"):
        network.one.recv(0, 4)


def test_record_sent_back_is_refused(network: Network) -> None:
    network.zero.send(1, b"mine")
    network.from_zero.sendall(network.taken())
    with pytest.raises(PeerRefused, match="changed on the way"):
        network.zero.recv(1, 4)


def test_stream_cut_short_is_a_death(network: Network) -> None:
    network.zero.send(1, b"last")
    network.zero.send(1, b"lost")
    sent = network.taken()
    network.to_one.sendall(sent[:-3])
    network.to_one.shutdown(socket.SHUT_WR)
    assert network.one.recv(0, 4) == b"last"
    with pytest.raises(ChannelClosed):
        network.one.recv(0, 4)


def test_another_token_opens_nothing() -> None:
    ends = socket.socketpair()
    zero, one = backend_of(0, ends[0]), backend_of(1, ends[1], token=b"another")
    zero.send(1, b"data")
    with pytest.raises(PeerRefused):
        one.recv(0, 4)
    zero.close()
    one.close()
