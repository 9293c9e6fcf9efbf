"""What is the simulation's own; what every transport promises is in `test_promises`."""

import pytest

from muster.collectives.backend import Backend
from muster.collectives.errors import ChannelClosed, InvalidWorldSize
from muster.collectives.gathering import all_gather, broadcast
from muster.collectives.simulated import SimulatedGroup, run_ranks


def test_one_rank_is_a_group() -> None:
    (backend,) = SimulatedGroup(1).backends()
    backend.barrier()
    assert all_gather(backend, b"own") == [b"own"]
    assert broadcast(backend, b"own") == b"own"


def test_no_rank_is_none() -> None:
    with pytest.raises(InvalidWorldSize):
        SimulatedGroup(0)


def test_each_rank_returns_its_own() -> None:
    assert run_ranks(SimulatedGroup(3).backends(), lambda backend: backend.rank) == [0, 1, 2]


def test_the_error_that_is_raised_is_the_one_that_made_the_others() -> None:
    def rank(backend: Backend) -> None:
        if backend.rank == 2:
            raise ArithmeticError("the loss is not a number")
        backend.barrier()

    with pytest.raises(ArithmeticError, match="the loss is not a number"):
        run_ranks(SimulatedGroup(3).backends(), rank)


def test_a_killed_rank_can_do_nothing_more() -> None:
    group = SimulatedGroup(2)
    backends = group.backends()
    group.kill(0)
    with pytest.raises(ChannelClosed, match="rank 0"):
        backends[0].send(1, b"")
    with pytest.raises(ChannelClosed, match="rank 0"):
        backends[1].send(0, b"")
