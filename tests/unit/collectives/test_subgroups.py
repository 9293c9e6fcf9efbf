"""Views of some ranks, and two transports as one."""

import numpy as np
import pytest

from muster.collectives import HybridBackend, SimulatedBackend, SubBackend, all_reduce
from muster.collectives.backend import Backend
from muster.collectives.errors import ChannelClosed, InvalidRank, InvalidWorldSize, SelfMessage
from muster.collectives.simulated import run_ranks


def test_members_are_sorted_and_counted_once() -> None:
    parent = SimulatedBackend.create_group(5)[2]
    view = SubBackend(parent, [3, 2, 0, 2, 3])
    assert view.members() == [0, 2, 3]
    assert (view.rank, view.world_size, view.parent()) == (1, 3, parent)
    assert [view.to_global(rank) for rank in range(3)] == [0, 2, 3]
    assert [view.to_local(rank) for rank in range(5)] == [0, None, 1, 2, None]


@pytest.mark.parametrize(
    ("ranks", "error"),
    [([], InvalidWorldSize), ([0, 5], InvalidRank), ([-1, 0], InvalidRank), ([1, 2], InvalidRank)],
    ids=["nobody", "too high", "negative", "without the caller"],
)
def test_impossible_view_is_refused(ranks: list[int], error: type[Exception]) -> None:
    with pytest.raises(error):
        SubBackend(SimulatedBackend.create_group(5)[0], ranks)


def test_peers_are_those_of_the_view() -> None:
    view = SubBackend(SimulatedBackend.create_group(4)[3], [1, 3])
    with pytest.raises(InvalidRank):
        view.send(2, b"")
    with pytest.raises(SelfMessage):
        view.send(1, b"")
    with pytest.raises(InvalidRank):
        view.to_global(2)


def test_probe_finds_messages_of_the_view_only() -> None:
    def rank(parent: Backend) -> int | None:
        if parent.rank == 0:
            parent.send(2, b"of the parent")
            return None
        view = SubBackend(parent, [1, 2])
        if view.rank == 0:
            view.send(1, b"of the view")
            return None
        return view.probe()

    assert run_ranks(SimulatedBackend.create_group(3), rank) == [None, None, 0]


def test_messages_of_views_and_parent_never_match() -> None:
    """Even of two views of the same ranks, one of which is a view of the other."""

    def rank(parent: Backend) -> list[bytes]:
        first = SubBackend(parent, [0, 1])
        second = SubBackend(parent, [0, 1])
        inner = SubBackend(first, [0, 1])
        backends = [parent, first, second, inner]
        if parent.rank == 0:
            for number, backend in enumerate(backends):
                backend.send(1, bytes([number]))
            return []
        return [bytes(backend.recv(0, 1)) for backend in reversed(backends)]

    assert run_ranks(SimulatedBackend.create_group(2), rank)[1] == [b"\3", b"\2", b"\1", b"\0"]


def test_views_of_views_add_up_and_wait() -> None:
    def rank(parent: Backend) -> float:
        half = SubBackend(parent, range(parent.rank // 4 * 4, parent.rank // 4 * 4 + 4))
        pair = SubBackend(half, [half.rank // 2 * 2, half.rank // 2 * 2 + 1])
        value = np.full(3, 2.0**parent.rank)
        for backend in (pair, half):
            backend.barrier()
            all_reduce(backend, value)
        alone = SubBackend(parent, [parent.rank])
        alone.barrier()
        return float(all_reduce(alone, value)[0])

    sums = run_ranks(SimulatedBackend.create_group(8), rank)
    assert sums == [2.0 * 15] * 4 + [2.0 * 240] * 4


def test_death_outside_a_view_does_not_end_its_waits() -> None:
    group = SimulatedBackend.create_group(3)
    views = [SubBackend(backend, [0, 1]) for backend in group[:2]]
    group[2].kill()
    views[0].send(1, b"goes on")
    assert views[1].recv(0, 7) == b"goes on"
    with pytest.raises(ChannelClosed):
        group[0].recv(1, 1)


def test_hybrid_sends_messages_and_collectives_by_two_ways() -> None:
    one, other = SimulatedBackend.create_group(2), SimulatedBackend.create_group(2)
    hybrids = [HybridBackend(*pair) for pair in zip(one, other, strict=True)]
    hybrids[0].send(1, b"message")
    assert one[1].recv(0, 7) == b"message"

    def rank(hybrid: Backend) -> float:
        hybrid.barrier()
        return float(all_reduce(hybrid, np.ones(1))[0])

    one[0].close()
    assert run_ranks(hybrids, rank) == [2, 2]
    with pytest.raises(InvalidRank):
        HybridBackend(one[0], other[1])
