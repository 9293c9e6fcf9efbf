"""How a rank is set up: memory that it keeps, and programs that close what is not theirs."""

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from muster.program import InvalidProgram
from muster.runtime.agent_client import AgentSocket
from muster.training.rank import _refusing_closed

CLOSED = 1 << 20
"""A descriptor that no process here has."""


@pytest.fixture
def channel() -> Iterator[AgentSocket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        channel = AgentSocket(theirs.detach())
        yield channel
        channel.close()


@pytest.mark.parametrize("reused", [False, True])
def test_program_that_closed_the_channel_is_invalid(channel: AgentSocket, *, reused: bool) -> None:
    number = channel._channel.fileno()  # noqa: SLF001  programs close numbers, not objects
    os.close(number)
    taken = os.open(os.devnull, os.O_RDONLY) if reused else None
    if taken not in {number, None}:
        os.dup2(taken, number)
        os.close(taken)
    with pytest.raises(InvalidProgram, match="only what it has opened"), _refusing_closed(channel):
        os.fstat(CLOSED)
    if reused:
        os.close(number)


def test_other_os_errors_pass_through(channel: AgentSocket) -> None:
    for each in (channel, AgentSocket(None)):
        with pytest.raises(OSError, match="Bad file"), _refusing_closed(each):
            os.fstat(CLOSED)


KEEPS_MEMORY = """
import resource
import numpy as np
from muster.training.start import keep_freed_memory

def step():
    arrays = [np.ones(1_000_000, np.float32) for _ in range(4)]

keep_freed_memory()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not the GNU C library")
def test_pages_of_one_step_serve_the_next() -> None:
    # In another process: malloc's options cannot be taken back.
    arguments = [sys.executable, "-c", KEEPS_MEMORY]
    faults = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    assert int(faults) < 1000  # one array alone has almost as many pages
