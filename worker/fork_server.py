"""The fork server: a warm process from which a coordinator has its agents forked.

Importing takes longer than everything else that an agent does before it starts a rank. The server
has one thread and holds nothing of a job: an agent reads its assignment, with token and keys, from
a pipe. The server ends when its coordinator closes the channel on standard input; agents run on.

For managed training an agent forks its prefork server before it reads anything, so the ranks, which
are forked from that one, do not hold the assignment either.
"""

import gc
import os
import random
import socket
import sys
from contextlib import suppress
from typing import Final, NoReturn

import msgspec

from muster.contracts.messages.assignment import FORKED_PID, ForkAgent
from muster.contracts.settings.names import SINGLE_THREADED
from muster.host.containment import overwrite_tag
from muster.runtime.exit_report import exit_process, print_error

_INHERITED: Final = dict(os.environ)
os.environ.update(SINGLE_THREADED)  # a fork has no threads of numpy's libraries
from muster.training import prefork  # noqa: E402
from worker import agent  # noqa: E402

os.environ.clear()
os.environ.update(_INHERITED)


def serve(channel: socket.socket) -> None:
    """Fork and reap agents on request until the coordinator is gone."""
    # Keeps the garbage collectors of the forks from copying shared pages.
    gc.collect()
    gc.freeze()
    with suppress(BrokenPipeError, ConnectionResetError):
        while True:
            content, descriptors, _, _ = socket.recv_fds(channel, 4096, 2)
            if not content:
                return
            if not descriptors:  # an agent has ended
                _, status = os.waitpid(FORKED_PID.unpack(content)[0], 0)
                channel.send(FORKED_PID.pack(os.waitstatus_to_exitcode(status)))
                continue
            pid = os.fork()
            if pid == 0:
                _be_agent(msgspec.msgpack.decode(content, type=ForkAgent), *descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            channel.send(FORKED_PID.pack(pid))


def _be_agent(request: ForkAgent, assignment: int, log: int) -> NoReturn:
    """Run as ``python -P -m muster worker.agent`` would, and end the process."""
    code = 1
    try:
        os.setsid()
        for descriptor, number in ((assignment, 0), (log, 1), (log, 2)):
            os.dup2(descriptor, number)  # the first one closes the channel
        os.close(assignment)
        os.close(log)
        random.seed()
        overwrite_tag(f"{request.job_uid}/agent")
        code = agent.main(_fork_prefork(request.job_uid) if request.has_prefork else None)
    except BaseException as error:  # noqa: BLE001  reported, then the process ends
        code = print_error(error)
    finally:
        exit_process(code)


def _fork_prefork(job_uid: str) -> tuple[int, socket.socket]:
    """Return the pid of a fork that is the agent's prefork server, and the channel to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        ours.close()
        overwrite_tag(f"{job_uid}/prefork")
        # As after exec: a program's own module `worker` must not meet ours, and processes that it
        # spawns import the main module by name.
        del sys.path[0]  # see `muster.__main__`
        for name in [name for name in sys.modules if name.partition(".")[0] == "worker"]:
            del sys.modules[name]
        sys.modules["__main__"], sys.argv[0] = prefork, str(prefork.__file__)
        exit_process(prefork.serve(theirs))
    theirs.close()
    return pid, ours


if __name__ == "__main__":
    serve(socket.socket(fileno=0))
