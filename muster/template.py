"""A warm process from which ranks are forked that run a training of ours.

Started by an agent as ``python -P -m muster.template``. Importing numpy costs more than everything
else a rank does before its first step. The template has paid for it once; a fork of it is a rank
within milliseconds. It has one thread, opens no file of a job, and never imports what runs on the
agent's side, so a rank finds no more in its memory than if it had started by itself.

It serves its agent over one socket: a request carries the log and the rank's channel as
descriptors, the answer is a pid. The rank is forked twice, so that the agent, a child subreaper,
becomes its parent and learns how it ends.
"""

import ctypes
import gc
import os
import random
import socket
import sys
from pathlib import Path
from typing import Final, NoReturn

import msgspec
import numpy as np

import muster.classifier
import muster.synchronous.rank  # noqa: F401  what a rank needs is there before it is forked
from muster.containment import enclose
from muster.contracts.agent import FORKED_PID, ForkRequest
from muster.contracts.environ import AGENT_FD, MARK, MARK_WIDTH, TEMPLATE_FD, RankSettings
from muster.contracts.spec import JobSpec
from muster.departure import last_word, leave
from muster.training import train

REQUEST_LIMIT_BYTES: Final = 1 << 17
"""An environment of that size is larger than any that a template is used for."""

_ENV_START_FIELD: Final = 47
"""Of /proc/self/stat, counted after the command name."""


def serve(channel: socket.socket) -> int:
    """Fork on request until the agent is gone; return the exit code."""
    # What is shared with the forks is not touched by their garbage collectors.
    gc.collect()
    gc.freeze()
    while True:
        content, descriptors, _, _ = socket.recv_fds(channel, REQUEST_LIMIT_BYTES, 2)
        if not content:
            return 0
        request = msgspec.msgpack.decode(content, type=ForkRequest)
        log, rank_channel = descriptors
        pid = _fork_orphan(request, log, rank_channel, channel)
        os.close(log)
        os.close(rank_channel)
        channel.send(FORKED_PID.pack(pid))


def _fork_orphan(request: ForkRequest, log: int, rank_channel: int, channel: socket.socket) -> int:
    """Return the pid of a grandchild whose parent is gone: the subreaper above takes it."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        rank = os.fork()
        if rank == 0:
            # Who is known by its pid leads its group: what is sent to that reaches it.
            os.setsid()
            os.write(writing, FORKED_PID.pack(os.getpid()))
            os.close(reading)
            os.close(writing)
            channel.close()
            _be_rank(request, log, rank_channel)
        os._exit(0)
    os.waitpid(middle, 0)
    os.close(writing)
    (pid,) = FORKED_PID.unpack(os.read(reading, FORKED_PID.size))
    os.close(reading)
    return int(pid)


def _be_rank(request: ForkRequest, log: int, rank_channel: int) -> NoReturn:
    """Become what ``python -P -m worker`` would be with this environment, and end as it would."""
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(request.environment, **{AGENT_FD: str(rank_channel)})
        _wear_mark(request.environment[MARK])
        enclose(request.environment[MARK])
        os.chdir(request.working_dir)
        random.seed()
        np.random.seed()  # noqa: NPY002  a fork must not repeat its siblings' numbers
        train(RankSettings.read(os.environ, world_size=JobSpec().world_size))
    except BaseException as error:  # noqa: BLE001  nothing comes after it
        code = last_word(error)
    finally:
        leave(code)


def _wear_mark(mark: str) -> None:
    """Write the rank's mark over the template's, where the kernel shows it.

    /proc/PID/environ is the memory that exec had filled; a fork has it from the template. The
    mark there is padded to `MARK_WIDTH`, so that every mark fits in its place.
    """
    offset = Path("/proc/self/environ").read_bytes().index(f"{MARK}=".encode())
    stat = Path("/proc/self/stat").read_text()
    env_start = int(stat[stat.rindex(")") + 2 :].split()[_ENV_START_FIELD])
    place = env_start + offset + len(MARK) + 1
    ctypes.memmove(place, mark.ljust(MARK_WIDTH).encode(), MARK_WIDTH)


def main() -> int:
    """Wire the process."""
    return serve(socket.socket(fileno=int(os.environ[TEMPLATE_FD])))


if __name__ == "__main__":
    sys.exit(main())
