import pytest

from muster.collectives.errors import (
    ChannelClosed,
    SizeMismatch,
    TimedOut,
)
from muster.collectives.shared_memory import SharedMemoryBackend
from tests.support.arenas import Host

RING_BYTES = 4096


def host(ranks: int) -> Host:
    return Host(ranks, ring_bytes=RING_BYTES)


def text(size: int, seed: int = 0) -> bytes:
    return bytes((seed + 7 * at) % 251 for at in range(size))


def test_half_a_message_continues_with_the_next_call() -> None:
    first, second = host(2).backends()
    with pytest.raises(TimedOut):
        first.send(1, text(RING_BYTES + 5000), timeout_seconds=0.0)
    with pytest.raises(TimedOut):
        second.receive(0, RING_BYTES + 5000, timeout_seconds=0.0)
    with pytest.raises(TimedOut):
        first.send(1, b"after", timeout_seconds=0.0)  # its turn never came
    with pytest.raises(TimedOut):
        second.receive(0, RING_BYTES + 5000, timeout_seconds=0.0)
    first.send(1, b"after")
    assert second.receive(0, RING_BYTES + 5000) == text(RING_BYTES + 5000)
    assert second.receive(0, 5) == b"after"


def test_message_that_could_fit_is_not_sent_in_part() -> None:
    first, second = host(2).backends()
    first.send(1, text(RING_BYTES - 100))
    with pytest.raises(TimedOut):
        first.send(1, text(200, 1), timeout_seconds=0.0)
    assert second.receive(0, RING_BYTES - 100) == text(RING_BYTES - 100)
    first.send(1, text(200, 2))
    assert second.receive(0, 200) == text(200, 2)


def test_huge_size_allocates_nothing() -> None:
    group = host(2)
    _, second = group.backends()
    group.own[0].ring(1)[:8] = b"\xff" * 8
    group.own[0].words[group.geometry.sent_word(1)] += 8
    with pytest.raises(SizeMismatch):
        second.receive(0, 4)


def test_new_generation_drops_old_messages() -> None:
    group = host(2)
    first, second = group.backends()
    first.send(1, b"of the first generation")
    second.send(0, b"received")
    first.receive(1, 8)
    first, second = group.backends(generation=2)
    with pytest.raises(TimedOut):
        second.receive(0, 1, timeout_seconds=0.0)
    first.send(1, b"of the second")
    assert second.receive(0, 13) == b"of the second"


def test_rank_may_send_before_its_peer_has_joined() -> None:
    group = host(2)
    _, laggard = group.backends()
    ahead = SharedMemoryBackend(group.flags(0, generation=2))
    ahead.send(1, b"hurry")
    with pytest.raises(ChannelClosed):
        laggard.receive(0, 5)
    follower = SharedMemoryBackend(group.flags(1, generation=2))
    assert follower.receive(0, 5) == b"hurry"
