"""A program that closes what is not its own is told so in a sentence."""

import os
import socket
from collections.abc import Iterator

import pytest

from muster.program import InvalidProgram
from muster.runtime.agent_client import AgentSocket
from muster.training.rank import _refusing_closed

CLOSED = 1 << 20
"""A descriptor that no process here has."""


@pytest.fixture
def line() -> Iterator[AgentSocket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        line = AgentSocket(theirs.detach())
        yield line
        line.close()


def close(line: AgentSocket) -> int:
    """Close it as a program does, which knows nothing of lines; return its number."""
    assert line._channel is not None  # noqa: SLF001
    number = line._channel.fileno()  # noqa: SLF001
    os.close(number)
    return number


def test_an_error_behind_a_channel_that_was_closed_is_the_programs(line: AgentSocket) -> None:
    close(line)
    with pytest.raises(InvalidProgram, match="only what it has opened"), _refusing_closed(line):
        os.fstat(CLOSED)


def test_so_it_is_where_something_else_has_been_opened_in_its_place(line: AgentSocket) -> None:
    number = close(line)
    taken = os.open(os.devnull, os.O_RDONLY)
    if taken != number:
        os.dup2(taken, number)
        os.close(taken)
    with pytest.raises(InvalidProgram, match="only what it has opened"), _refusing_closed(line):
        os.fstat(CLOSED)
    os.close(number)


def test_any_other_error_of_the_system_stays_what_it_is(line: AgentSocket) -> None:
    with pytest.raises(OSError, match="Bad file"), _refusing_closed(line):
        os.fstat(CLOSED)


def test_a_rank_that_nobody_supervises_has_nothing_to_close() -> None:
    with pytest.raises(OSError, match="Bad file"), _refusing_closed(AgentSocket(None)):
        os.fstat(CLOSED)
