import os
import platform
from collections.abc import Iterator

import numpy as np
import pytest

from muster.collectives.errors import BackendUnavailable, PeerRefused, TransportFailed
from muster.collectives.transports.arena import SHORT_BYTES, Arena, Geometry, map_memory

GEOMETRY = Geometry(slot_count=3, elements=1000, max_ranks=4, ring_bytes=4096)
LONG = Geometry(slot_count=2, elements=SHORT_BYTES // 4 + 1)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("arena")
    yield descriptor
    os.close(descriptor)


def test_a_peer_reads_what_the_owner_wrote(memory: int) -> None:
    own = Arena.create(memory, GEOMETRY)
    peer = Arena.attach(memory)
    assert peer.geometry == GEOMETRY
    own.words[GEOMETRY.sent_word(3)] = -7
    own.ring(3)[:3] = b"abc"
    own.slots[2] = 2.5
    own.halves[1, 0] = 1.5
    assert peer.words[GEOMETRY.sent_word(3)] == -7
    assert bytes(peer.ring(3)[:3]) == b"abc"
    assert (peer.slots[2] == 2.5).all()
    assert (peer.halves[1, 0] == 1.5).all()


def test_only_the_owner_can_write(memory: int) -> None:
    Arena.create(memory, GEOMETRY)
    peer = Arena.attach(memory)
    with pytest.raises(TypeError, match="read-only"):
        peer.words[0] = 1
    with pytest.raises(TypeError, match="read-only"):
        peer.ring(0)[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        peer.slots[0] = 1


def test_nothing_overlaps(memory: int) -> None:
    own = Arena.create(memory, GEOMETRY)
    regions = [own.words, own.slots, own.halves, *(own.ring(peer) for peer in range(4))]
    for number, region in enumerate(regions):
        np.frombuffer(region, np.uint8)[:] = number + 1
    for number, region in enumerate(regions):
        assert (np.frombuffer(region, np.uint8) == number + 1).all()
    assert Arena.attach(memory).geometry == GEOMETRY


def test_each_word_has_its_own_cache_line() -> None:
    words = [
        *(GEOMETRY.sent_word(peer) for peer in range(4)),
        *(GEOMETRY.taken_word(peer) for peer in range(4)),
    ]
    assert len({word // 8 for word in words}) == 8
    assert min(words) == 32
    assert max(words) < GEOMETRY.word_count


def test_untouched_memory_costs_nothing(memory: int) -> None:
    Arena.create(memory, Geometry(slot_count=32, elements=25_000_000))
    assert os.fstat(memory).st_size > 32 * 100_000_000
    assert os.fstat(memory).st_blocks * 512 <= 4096


def test_arena_is_created_once(memory: int) -> None:
    own = Arena.create(memory, GEOMETRY)
    own.slots[:] = 3
    with pytest.raises(BackendUnavailable, match="before"):
        Arena.create(memory, LONG)
    assert (own.slots == 3).all()


@pytest.mark.parametrize("content", [b"", b"\0" * 9000, b"garbage!" * 2000])
def test_other_memory_is_refused(memory: int, content: bytes) -> None:
    os.write(memory, content)
    with pytest.raises(PeerRefused, match="not an arena"):
        Arena.attach(memory)


def test_truncated_arena_is_refused(memory: int) -> None:
    Arena.create(memory, GEOMETRY)
    os.ftruncate(memory, GEOMETRY.size_bytes - 1)
    with pytest.raises(PeerRefused, match="shorter"):
        Arena.attach(memory)


def test_machine_with_weak_memory_order_is_refused(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Arena.create(memory, GEOMETRY)
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(BackendUnavailable, match="x86-64"):
        Arena.attach(memory)


def test_failed_mapping_is_a_transport_failure() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(TransportFailed):
            map_memory(reading, 4096, is_writable=False)
    finally:
        os.close(reading)
        os.close(writing)
