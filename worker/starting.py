"""Two ways from an order to a process.

Exec is right for every program; a fork of the warm template is fast for a training of ours.
Either way the process leads a session of its own, has its log as output and a channel to us, and
is a child of this process.
"""

import errno
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import msgspec

from muster.contracts.agent import FORKED_PID, ForkRequest
from muster.contracts.environ import AGENT_FD, MARK, MARK_WIDTH, TEMPLATE_FD, THREAD_PINS
from muster.contracts.messages import StartRank
from muster.descriptors import DescriptorLimits
from muster.processes import kill, marked
from muster.sight import require_descriptors
from worker.oversize import oversize

IMPORT_PATIENCE_SECONDS: Final = 10.0
"""The first fork waits for the template's imports; no rank lives yet that could be kept waiting."""

FORK_PATIENCE_SECONDS: Final = 1.0
"""Later ones take milliseconds, and the agent hears nobody meanwhile. Exec always works."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A process of ours; `handle` if the standard library keeps one that wants its exit code."""

    pid: int
    handle: subprocess.Popen[bytes] | None = None


class Starter(Protocol):
    """A way to start a rank."""

    def start(self, order: StartRank, log: int, channel: socket.socket) -> Started:
        """Start the process; raises OSError."""

    def warm_up(self) -> None:
        """Prepare for the first start, which else does that."""

    def close(self) -> None:
        """Give up what is kept warm."""


class Exec:
    """``python -P -m worker``, which becomes the program."""

    def __init__(self, limits: DescriptorLimits) -> None:
        self._limits = limits

    def start(self, order: StartRank, log: int, channel: socket.socket) -> Started:
        given = {**order.environment, AGENT_FD: str(channel.fileno())}
        environment = {**os.environ, **given}
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(order.working_dir),
                env=environment,
                pass_fds=(channel.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise oversize(environment, given) from error
            raise
        self._limits.impose(process.pid)  # long before its interpreter is through with starting
        return Started(pid=process.pid, handle=process)

    def warm_up(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is kept."""


class Fork:
    """Forks of a template that imports while the agent finds its coordinator."""

    def __init__(self, job_uid: str, limits: DescriptorLimits) -> None:
        self._cold = Exec(limits)
        self._limits = limits
        self._mark = f"{job_uid}/template"
        self._template: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._doubtful: list[str] = []
        """Marks of what the template may have left: nothing starts before that is ended."""

    def warm_up(self) -> None:
        """Start the template, once: what happens to it, exec does the rest."""
        if self._template is not None:
            return
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(IMPORT_PATIENCE_SECONDS)
        with theirs:
            self._template = subprocess.Popen(
                [sys.executable, "-P", "-m", "muster.template"],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **THREAD_PINS,
                    MARK: self._mark.ljust(MARK_WIDTH),
                    TEMPLATE_FD: str(theirs.fileno()),
                },
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._limits.impose(self._template.pid)

    def start(self, order: StartRank, log: int, channel: socket.socket) -> Started:
        # A fork that cannot go there would only seem to crash.
        os.stat(f"{order.working_dir}/.")  # noqa: PTH116  a Path would lose the dot
        pid = self._ask(order, log, channel)
        if pid is not None:
            return Started(pid=pid)
        self._end_doubtful()
        return self._cold.start(order, log, channel)

    def _give_up(self, order: StartRank) -> None:
        """End the template. It may have made the fork without having said so."""
        self.close()
        self._doubtful = [order.environment[MARK], self._mark]

    def _end_doubtful(self) -> None:
        """End what is left of a template; raises OSError if nobody can look now."""
        while self._doubtful:
            require_descriptors()
            for record in marked(self._doubtful[-1]):
                kill(record)
            self._doubtful.pop()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            if self._template is not None:
                self._template.send_signal(signal.SIGKILL)
                self._template.wait()

    def _ask(self, order: StartRank, log: int, channel: socket.socket) -> int | None:
        """Return the pid of a fork, or None: then the template is no good, and is given up."""
        self.warm_up()
        if self._channel is None:
            return None
        request = ForkRequest(
            environment={**os.environ, **order.environment}, working_dir=order.working_dir
        )
        try:
            content = msgspec.msgpack.encode(request)
            socket.send_fds(self._channel, [content], [log, channel.fileno()])
            answer = self._channel.recv(FORKED_PID.size)
        except OSError:
            answer = b""
        if not answer:
            self._give_up(order)
            return None
        self._channel.settimeout(FORK_PATIENCE_SECONDS)
        (pid,) = FORKED_PID.unpack(answer)
        return int(pid)
