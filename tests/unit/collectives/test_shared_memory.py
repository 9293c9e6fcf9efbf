import pytest

from muster.collectives.backend import Backend
from muster.collectives.errors import (
    ChannelClosed,
    PeerRefused,
    Timeout,
)
from muster.collectives.simulated import run_ranks
from muster.collectives.transports.shared_memory import SharedMemoryBackend
from tests.support.arenas import Host

RING_BYTES = 4096


def host(ranks: int) -> Host:
    return Host(ranks, ring_bytes=RING_BYTES)


def text(size: int, seed: int = 0) -> bytes:
    return bytes((seed + 7 * at) % 251 for at in range(size))


def test_half_a_message_continues_with_the_next_call() -> None:
    first, second = host(2).backends()
    with pytest.raises(Timeout):
        first.send(1, text(RING_BYTES + 5000), timeout_seconds=0.0)
    with pytest.raises(Timeout):
        second.recv(0, RING_BYTES + 5000, timeout_seconds=0.0)

    def rank(backend: Backend) -> list[bytes]:
        if backend.rank == 0:
            backend.send(1, b"after")
            return []
        return [backend.recv(0, RING_BYTES + 5000), backend.recv(0, 5)]

    _, received = run_ranks([first, second], rank)
    assert received == [text(RING_BYTES + 5000), b"after"]


def test_huge_size_allocates_nothing() -> None:
    group = host(2)
    _, second = group.backends()
    group.own[0].ring(1)[:48] = b"\xff" * 48
    group.own[0].words[group.geometry.sent_word(1)] += 48
    with pytest.raises(PeerRefused):
        second.recv(0, 4)


def test_new_generation_drops_old_messages() -> None:
    group = host(2)
    first, second = group.backends()
    first.send(1, b"of the first generation")
    second.send(0, b"received")
    first.recv(1, 8)
    first, second = group.backends(generation=2)
    with pytest.raises(Timeout):
        second.recv(0, 1, timeout_seconds=0.0)
    first.send(1, b"of the second")
    assert second.recv(0, 13) == b"of the second"


def test_rank_may_send_before_its_peer_has_joined() -> None:
    group = host(2)
    _, laggard = group.backends()
    ahead = SharedMemoryBackend(group.flags(0, generation=2))
    ahead.send(1, b"hurry")
    with pytest.raises(ChannelClosed):
        laggard.recv(0, 5)
    follower = SharedMemoryBackend(group.flags(1, generation=2))
    assert follower.recv(0, 5) == b"hurry"
