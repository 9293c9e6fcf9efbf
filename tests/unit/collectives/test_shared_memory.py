from collections.abc import Callable
from threading import Event

import pytest

from muster.collectives.backend import Backend
from muster.collectives.errors import (
    ChannelClosed,
    SizeMismatch,
    TimedOut,
)
from muster.collectives.shared_memory import SharedMemoryBackend
from muster.collectives.simulated import run_ranks
from tests.support.arenas import Host

RING_BYTES = 4096
SIZES = [0, 1, RING_BYTES - 9, RING_BYTES - 8, RING_BYTES, RING_BYTES + 1, 50_000]


class LayoutChanged(Exception):
    pass


def host(ranks: int) -> Host:
    return Host(ranks, ring_bytes=RING_BYTES)


def text(size: int, seed: int = 0) -> bytes:
    return bytes((seed + 7 * at) % 251 for at in range(size))


def by_rank(*functions: Callable[[Backend], object]) -> Callable[[Backend], object]:
    """Let each rank run its own function."""
    return lambda backend: functions[backend.rank](backend)


def test_messages_of_any_size_arrive_in_order() -> None:
    def sends(backend: Backend) -> None:
        for seed, size in enumerate(SIZES * 3):
            backend.send(1, text(size, seed))

    def receives(backend: Backend) -> list[bytearray]:
        return [backend.receive(0, size) for size in SIZES * 3]

    _, received = run_ranks(host(2).backends(), by_rank(sends, receives))
    assert received == [text(size, seed) for seed, size in enumerate(SIZES * 3)]


def test_a_circle_of_ranks_exchanges_more_than_the_rings_hold() -> None:
    def turn(backend: Backend) -> list[bytearray]:
        following, preceding = (backend.rank + 1) % 3, (backend.rank - 1) % 3
        targets = [bytearray(size) for size in SIZES]
        backend.exchange(
            [(following, text(size, backend.rank)) for size in SIZES],
            [(preceding, memoryview(target)) for target in targets],
        )
        return targets

    received = run_ranks(host(3).backends(), turn)
    assert received == [[text(size, (rank - 1) % 3) for size in SIZES] for rank in range(3)]


def test_a_group_of_one_waits_for_nobody() -> None:
    (backend,) = host(1).backends()
    backend.barrier()
    backend.exchange([], [])
    assert (backend.rank, backend.world_size) == (0, 1)


def test_a_message_that_came_in_half_is_finished_by_the_next_call() -> None:
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


def test_a_message_that_does_not_fit_now_is_not_sent_in_part() -> None:
    first, second = host(2).backends()
    first.send(1, text(RING_BYTES - 100))
    with pytest.raises(TimedOut):
        first.send(1, text(200, 1), timeout_seconds=0.0)
    assert second.receive(0, RING_BYTES - 100) == text(RING_BYTES - 100)
    first.send(1, text(200, 2))
    assert second.receive(0, 200) == text(200, 2)


def test_a_size_that_cannot_be_meant_allocates_nothing() -> None:
    group = host(2)
    _, second = group.backends()
    group.own[0].ring(1)[:8] = b"\xff" * 8
    group.own[0].words[group.geometry.sent_word(1)] += 8
    with pytest.raises(SizeMismatch):
        second.receive(0, 4)


def test_a_rank_that_waits_hears_that_the_layout_has_changed() -> None:
    changed = Event()

    def on_wait() -> None:
        if changed.is_set():
            raise LayoutChanged

    backends = host(2).backends(on_wait=on_wait)
    changed.set()
    with pytest.raises(LayoutChanged):
        backends[0].receive(1, 5)
    changed.clear()
    backends[1].send(0, b"hello")
    assert backends[0].receive(1, 5) == b"hello"


def test_a_new_generation_starts_without_what_was_under_way_in_the_old() -> None:
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


def test_a_rank_ahead_may_send_before_its_peer_has_taken_up_the_generation() -> None:
    group = host(2)
    _, laggard = group.backends()
    ahead = SharedMemoryBackend(group.flags(0, generation=2))
    ahead.send(1, b"hurry")
    with pytest.raises(ChannelClosed):
        laggard.receive(0, 5)
    follower = SharedMemoryBackend(group.flags(1, generation=2))
    assert follower.receive(0, 5) == b"hurry"
