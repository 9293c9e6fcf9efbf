import os

import pytest

from muster.collectives.deadline import Deadline
from muster.collectives.errors import (
    ChannelClosed,
    PeerRefused,
    Timeout,
)
from muster.collectives.transports.arena import BARRIER, PUBLISHED, Arena, Geometry
from muster.collectives.transports.flags import FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, Flags
from tests.support.arenas import Host, unreachable


def soon() -> Deadline:
    return Deadline(60.0, "a test")


def test_count_is_seen_by_every_rank() -> None:
    host = Host(2)
    first, second = host.flags(0), host.flags(1)
    first.raise_to(PUBLISHED, 5)
    assert second.count(0, PUBLISHED) == 5
    assert first.count(1, PUBLISHED) == 0


def test_completed_wait_does_not_sleep() -> None:
    host = Host(2)
    first, second = host.flags(0, sleep=unreachable), host.flags(1)
    for flags in (first, second):
        flags.raise_to(PUBLISHED, 1)
    first.wait_for_all(PUBLISHED, 1, soon())


def test_counts_of_an_older_generation_are_zero() -> None:
    host = Host(2)
    host.flags(1, generation=1).raise_to(PUBLISHED, 100)
    first = host.flags(0, generation=2)
    first.raise_to(PUBLISHED, 1)
    assert first.count(1, PUBLISHED) == 0
    with pytest.raises(Timeout):
        first.wait_for_all(PUBLISHED, 1, Deadline(0.0, "a test"))


def test_rank_of_a_newer_generation_has_left() -> None:
    host = Host(2)
    first = host.flags(0, generation=1)
    first.raise_to(PUBLISHED, 1)
    host.flags(1, generation=2).raise_to(PUBLISHED, 1)
    for act in (
        lambda: first.count(1, PUBLISHED),
        lambda: first.confirm(PUBLISHED),
        lambda: first.wait_for_all(PUBLISHED, 1, soon()),
    ):
        with pytest.raises(ChannelClosed) as raised:
            act()
        assert raised.value.rank == 1


def test_old_generation_cannot_write_to_the_new_one() -> None:
    host = Host(2)
    old = host.flags(0, generation=1)
    new, peer = (host.flags(rank, generation=2) for rank in range(2))
    new.raise_to(PUBLISHED, 3)
    with pytest.raises(ChannelClosed) as raised:
        old.raise_to(PUBLISHED, 9)
    assert raised.value.rank == 0
    old.close()
    assert peer.count(0, PUBLISHED) == 3
    assert not peer.is_closed(0)


@pytest.mark.parametrize("generation", [0, 1, 2, 1 << 23])
def test_generation_must_rise(generation: int) -> None:
    host = Host(1)
    host.flags(0, generation=2).raise_to(PUBLISHED, 7)
    before = list(host.own[0].words)
    with pytest.raises(ValueError, match="generation"):
        host.flags(0, generation=generation)
    assert list(host.own[0].words) == before


def test_pauses_double_up_to_a_millisecond() -> None:
    pauses: list[float] = []
    host = Host(2)
    second = host.flags(1)

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 10:
            second.raise_to(BARRIER, 1)

    first = host.flags(0, sleep=sleep)
    first.raise_to(BARRIER, 1)
    first.wait_for_all(BARRIER, 1, soon())
    assert pauses == sorted(pauses)
    assert pauses[0] == FIRST_PAUSE_SECONDS
    assert pauses[-1] == LONGEST_PAUSE_SECONDS
    assert len(pauses) == 10


def test_last_counts_of_a_closed_peer_are_valid() -> None:
    host = Host(2)
    second = host.flags(1)

    def on_wait() -> None:
        second.raise_to(BARRIER, 1)
        second.close()

    first = host.flags(0, on_wait=on_wait)
    first.raise_to(BARRIER, 1)
    first.wait_for_all(BARRIER, 1, soon())


def test_closed_peer_ends_only_waits_for_it() -> None:
    host = Host(3)
    first, second, third = (host.flags(rank) for rank in range(3))
    second.close()
    answers = iter([[2]] * 100)
    first.wait(lambda: next(answers, []), soon())
    with pytest.raises(ChannelClosed):
        third.wait(lambda: [1], soon())


def test_arenas_of_different_sizes_are_refused() -> None:
    arenas = [Host(1, elements=5).own[0], Host(1, elements=6).own[0]]
    with pytest.raises(PeerRefused, match="elements=6"):
        flags_of(arenas, 0)


def test_more_ranks_than_places_are_refused() -> None:
    memory = os.memfd_create("arena")
    arena = Arena.create(memory, Geometry(slot_count=1, elements=1, max_ranks=2))
    os.close(memory)
    with pytest.raises(ValueError, match="2 ranks, not 3"):
        flags_of([arena] * 3, 0)


def flags_of(arenas: list[Arena], rank: int) -> Flags:
    return Flags(arenas=arenas, rank=rank, generation=1, on_wait=lambda: None)
