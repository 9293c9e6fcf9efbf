"""The prefork server: a warm process from which an agent forks ranks that run managed training.

Started by an agent as ``python -P -m muster.training.prefork``. Importing numpy takes longer than
everything else a rank does before its first step; a fork of the server is a rank within
milliseconds. The server has one thread, opens no file of a job and imports nothing of the agent, so
a forked rank has the same memory contents as one that was started with exec.

The agent sends requests over one socket, with the log and the rank's channel as descriptors; the
answer is a pid. The rank is forked twice, so that the agent, a child subreaper, becomes its parent
and receives its exit status.
"""

import gc
import os
import random
import socket
import sys
from typing import Final, NoReturn

import msgspec
import numpy as np

from muster.contracts.messages.assignment import FORKED_PID, ForkRequest
from muster.contracts.settings.names import AGENT_FD, PREFORK_FD, PROCESS_TAG
from muster.host.containment import overwrite_tag
from muster.runtime.exit_report import exit_process, print_error
from muster.training.rank import run

REQUEST_LIMIT_BYTES: Final = 1 << 17
"""Larger than any environment that the agent passes to the prefork server."""


def serve(channel: socket.socket) -> int:
    """Fork on request until the agent closes its end; return the exit code."""
    # Keeps the garbage collectors of the forks from copying shared pages.
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
    """Return the pid of a grandchild; its parent exits, so the subreaper above adopts it."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        rank = os.fork()
        if rank == 0:
            # The rank leads its own process group, so a signal to the group reaches it.
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
    """Run as ``python -P -m worker`` would with this environment, and end the process."""
    code = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(request.environment, **{AGENT_FD: str(rank_channel)})
        overwrite_tag(request.environment[PROCESS_TAG])
        os.chdir(request.working_dir)
        random.seed()
        np.random.seed()  # noqa: NPY002  forks must not share one random state
        run()
    except BaseException as error:  # noqa: BLE001  reported, then the process ends
        code = print_error(error)
    finally:
        exit_process(code)


def main() -> int:
    """Serve on the socket that the agent passed down."""
    return serve(socket.socket(fileno=int(os.environ[PREFORK_FD])))


if __name__ == "__main__":
    sys.exit(main())
