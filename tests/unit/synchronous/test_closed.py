"""A program that closes what is not its own is told so in a sentence."""

import os
import socket
from collections.abc import Iterator

import pytest

from muster.program import InvalidProgram
from muster.synchronous.rank import _refusing_closed

CLOSED = 1 << 20
"""A descriptor that no process here has."""


@pytest.fixture
def channel() -> Iterator[socket.socket]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours


def test_an_error_behind_a_channel_that_was_closed_is_the_programs() -> None:
    with pytest.raises(InvalidProgram, match="only what it has opened"), _refusing_closed(CLOSED):
        os.fstat(CLOSED)


def test_so_it_is_where_something_else_has_been_opened_in_its_place() -> None:
    with (
        open(os.devnull) as taken,  # noqa: PTH123  a plain file
        pytest.raises(InvalidProgram, match="only what it has opened"),
        _refusing_closed(taken.fileno()),
    ):
        os.fstat(CLOSED)


def test_any_other_error_of_the_system_stays_what_it_is(channel: socket.socket) -> None:
    with pytest.raises(OSError, match="Bad file"), _refusing_closed(channel.fileno()):
        os.fstat(CLOSED)
