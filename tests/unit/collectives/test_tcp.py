"""What is TCP's own; what every transport promises is in `test_promises`."""

import pytest

from muster.collectives.errors import InvalidWorldSize, NotConnected
from muster.collectives.tcp import TcpBackend
from tests.support.groups import GENERATION, connected


class NewLayoutError(Exception):
    pass


def test_what_becomes_more_important_ends_a_wait_and_harms_nothing() -> None:
    ends = connected(2)
    layouts: list[int] = []

    def on_wait() -> None:
        if layouts:
            raise NewLayoutError

    zero, one = (
        TcpBackend(rank, 2, ends[rank], generation=GENERATION, on_wait=on_wait) for rank in (0, 1)
    )
    layouts.append(1)
    for wait in (lambda: zero.receive(1, 4), zero.barrier):
        with pytest.raises(NewLayoutError):
            wait()
    layouts.clear()
    one.send(0, b"data")
    assert zero.receive(1, 4) == b"data"
    zero.close()
    one.close()


def test_a_group_of_one_needs_no_network() -> None:
    with pytest.raises(InvalidWorldSize, match="at least 2"):
        TcpBackend(0, 1, {})


def test_a_rank_without_a_connection_is_named() -> None:
    with pytest.raises(NotConnected, match="rank 1"):
        TcpBackend(0, 2, {}).send(1, b"")
