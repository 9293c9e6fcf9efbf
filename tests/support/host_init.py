"""The first process of a test host: names it, mounts its own files, starts what it is asked for.

``python host_init.py FD NAME MOUNT...`` in namespaces of its own; each MOUNT is what follows the
word ``mount``. Every datagram at the socket FD is a request, with a socket for the answers. The
host ends with this process, which ends when the other side of FD is closed.
"""

import json
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from typing import Any

Started = dict[int, tuple[subprocess.Popen[bytes], socket.socket]]
"""By pid, with where to report the exit code."""


def main() -> None:
    control, name, *mounts = int(sys.argv[1]), *sys.argv[2:]
    socket.sethostname(name)
    for mount in mounts:
        words = ["mount", *shlex.split(mount)]
        subprocess.run(words, check=True)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler nothing would be written
    requests = socket.socket(fileno=control)
    requests.send(b"up")
    started: Started = {}
    while True:
        readable, _, _ = select.select([control, wake], [], [])
        if wake in readable:
            os.read(wake, 4096)
            reap(started)
        if control in readable:
            request, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)  # far longer than any
            if not request:
                return
            answers = socket.socket(fileno=fds[0])
            answer(json.loads(request), fds[1:], answers, started)


def answer(
    request: dict[str, Any], fds: list[int], answers: socket.socket, started: Started
) -> None:
    if "kind" in request:  # a socket is in the network namespace of the process that made it
        with answers, socket.socket(socket.AF_INET, request["kind"]) as made:
            socket.send_fds(answers, [b"made"], [made.fileno()])
        return
    stdin, stdout, stderr = fds
    try:
        process = subprocess.Popen(
            **request, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True
        )
    except OSError as error:
        with answers:
            answers.send(str(error).encode())
        return
    finally:
        for fd in fds:
            os.close(fd)
    started[process.pid] = process, answers
    # The kernel translates the pid of credentials for the receiver's namespace, even of a zombie.
    credentials = struct.pack("3i", process.pid, os.getuid(), os.getgid())
    answers.sendmsg([b"started"], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, credentials)])


def reap(started: Started) -> None:
    """Report the exit codes, and reap the orphans of the host."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] not in started:
                continue
            process, answers = started.pop(ended[0])
            process.returncode = os.waitstatus_to_exitcode(ended[1])
            with answers, suppress(OSError):  # who asked may be gone
                answers.send(str(process.returncode).encode())


if __name__ == "__main__":
    main()
